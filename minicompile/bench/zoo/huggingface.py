"""The architectures of Hugging Face transformers, built small from their configuration classes.

One row per architecture: name, (model class, settings of the configuration, inputs). `architectures(TINY)` are those that the
tests run on a CPU, `architectures(REAL)` those that the zoo times on a GPU: the same rows, wider and with longer inputs.
"""
from __future__ import annotations

import copy
import os
from dataclasses import dataclass

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@dataclass(frozen=True)
class Sizes:
    """What a row is built from; batch and length (tokens) are those of its inputs."""

    width: int
    layers: int
    heads: int
    inner: int
    positions: int
    vocab: int
    image: int
    patch: int
    window: int
    batch: int
    length: int


TINY = Sizes(width=32, layers=2, heads=4, inner=37, positions=64, vocab=99, image=32, patch=8, window=4, batch=2, length=9)
REAL = Sizes(width=512, layers=2, heads=8, inner=2048, positions=512, vocab=8192, image=224, patch=16, window=64, batch=16, length=256)


# ---- inputs: functions of (configuration, batch, length) ---------------------------------------------------

def ids(config, batch, length):
    """Tokens that no configuration gives a meaning of its own."""
    text = getattr(config, "text_config", config)
    return torch.randint(5, getattr(text, "vocab_size", 99) - 9, (batch, length))


def padding(batch, length):
    """The last tokens of the first row are padding."""
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, -2:] = 0
    return mask


def language(config, batch, length):
    tokens = ids(config, batch, length)
    return {"input_ids": tokens, "attention_mask": padding(batch, length), "labels": tokens.clone()}


def short_language(config, batch, length):
    """For models that run one step of Python per token."""
    return language(config, batch, min(length, 32))


def unpadded(config, batch, length):
    tokens = ids(config, batch, length)
    return {"input_ids": tokens, "labels": tokens.clone()}


def translation(config, batch, length):
    return {"input_ids": ids(config, batch, length), "attention_mask": padding(batch, length),
            "labels": ids(config, batch, length - 2)}


def classes(config, batch, length):
    return {"input_ids": ids(config, batch, length), "attention_mask": padding(batch, length),
            "labels": torch.randint(0, 2, (batch,))}


def image(size):
    def make(config, batch, length):
        return {"pixel_values": torch.randn(batch, 3, size, size), "labels": torch.randint(0, 2, (batch,))}
    return make


def speech(config, batch, length):
    return {"input_values": torch.randn(batch, 100 * length), "labels": torch.randint(5, 20, (batch, 4))}


def spectrogram(config, batch, length):
    return {"input_features": torch.randn(batch, config.num_mel_bins, 2 * config.max_source_positions),
            "labels": torch.randint(5, 20, (batch, 6))}


def sound_image(config, batch, length):
    return {"input_values": torch.randn(batch, config.max_length, config.num_mel_bins), "labels": torch.randint(0, 2, (batch,))}


def pairs(config, batch, length):
    size = config.vision_config.image_size
    return {"input_ids": ids(config, batch, length), "pixel_values": torch.randn(batch, 3, size, size), "return_loss": True}


def question(config, batch, length):
    return {"input_ids": ids(config, batch, length), "pixel_values": torch.randn(batch, 3, config.image_size, config.image_size),
            "labels": torch.rand(batch, 2)}


# ---- the architectures -------------------------------------------------------------------------------------

def architectures(s: Sizes) -> dict[str, tuple]:
    """name: (model class, settings of its configuration, inputs)."""
    W, L, H, F, P, V, I, Q, T = s.width, s.layers, s.heads, s.inner, s.positions, s.vocab, s.image, s.patch, s.length  # noqa: E741
    D, window = W // H, s.window

    def either(tiny, real):
        return tiny if s is TINY else real

    SMALL = dict(vocab_size=V, hidden_size=W, num_hidden_layers=L, num_attention_heads=H, intermediate_size=F,
                 max_position_embeddings=P, pad_token_id=1, bos_token_id=2, eos_token_id=3)
    GROUPED = {**SMALL, "num_key_value_heads": 2}
    SEQ2SEQ = dict(vocab_size=V, d_model=W, encoder_layers=L, decoder_layers=L, encoder_attention_heads=H, decoder_attention_heads=H,
                   encoder_ffn_dim=F, decoder_ffn_dim=F, max_position_embeddings=P, pad_token_id=1, bos_token_id=2, eos_token_id=3,
                   decoder_start_token_id=2)
    VISION = dict(image_size=I, patch_size=Q, hidden_size=W, num_hidden_layers=L, num_attention_heads=H, intermediate_size=F,
                  num_labels=2)
    SPEECH = dict(vocab_size=32, mask_time_prob=0.0, mask_feature_prob=0.0, hidden_size=W, num_hidden_layers=L,
                  num_attention_heads=H, intermediate_size=F,
                  **either(dict(conv_dim=(32, 32), conv_stride=(4, 4), conv_kernel=(8, 4), num_conv_pos_embeddings=16,
                                num_conv_pos_embedding_groups=2, num_feat_extract_layers=2), {}))
    CLIP_TEXT = dict(vocab_size=V, hidden_size=W, num_hidden_layers=L, num_attention_heads=H, intermediate_size=F,
                     max_position_embeddings=P, pad_token_id=1, bos_token_id=2, eos_token_id=3)
    CLIP_VISION = dict(image_size=I, patch_size=Q, hidden_size=W, num_hidden_layers=L, num_attention_heads=H, intermediate_size=F)

    SWIN = dict(image_size=I, num_labels=2, **either(dict(patch_size=2, embed_dim=16, depths=[1, 1], num_heads=[2, 4], window_size=4),
                                                     dict(patch_size=4, embed_dim=48, depths=[2, 2, 2], num_heads=[3, 6, 12],
                                                     window_size=7)))
    CONVNEXT = dict(num_labels=2, **either(dict(hidden_sizes=[16, 32], depths=[1, 1], num_stages=2),
                                           dict(hidden_sizes=[48, 96, 192, 384], depths=[2, 2, 2, 2])))
    RESNET = dict(num_labels=2, **either(dict(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1]),
                                         dict(embedding_size=64, hidden_sizes=[128, 256, 512, 1024], depths=[2, 2, 2, 2])))

    return {
        # encoders
        "bert": ("BertForMaskedLM", SMALL, language),
        "roberta": ("RobertaForMaskedLM", SMALL, language),
        "camembert": ("CamembertForMaskedLM", SMALL, language),
        "xlm-roberta": ("XLMRobertaForSequenceClassification", SMALL, classes),
        "distilbert": ("DistilBertForMaskedLM", dict(vocab_size=V, dim=W, n_layers=L, n_heads=H, hidden_dim=F), language),
        "albert": ("AlbertForMaskedLM", {**SMALL, "embedding_size": W // 2}, language),
        "electra": ("ElectraForMaskedLM", {**SMALL, "embedding_size": W // 2}, language),
        "deberta": ("DebertaForMaskedLM", {**SMALL, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}, language),
        "deberta-v2": ("DebertaV2ForMaskedLM", {**SMALL, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}, language),
        "mpnet": ("MPNetForMaskedLM", SMALL, language),
        "xlm": ("XLMWithLMHeadModel", dict(vocab_size=V, emb_dim=W, n_layers=L, n_heads=H, max_position_embeddings=P), language),
        "xlnet": ("XLNetLMHeadModel", dict(vocab_size=V, d_model=W, n_layer=L, n_head=H, d_inner=F), language),
        "convbert": ("ConvBertForMaskedLM", {**SMALL, "embedding_size": W // 2}, language),
        "funnel": ("FunnelForMaskedLM", dict(vocab_size=V, block_sizes=either([1, 1], [2, 2]), d_model=W, n_head=H, d_head=D,
                                             d_inner=F), language),
        "longformer": ("LongformerForMaskedLM", {**SMALL, "attention_window": window}, language),
        "big_bird": ("BigBirdForMaskedLM", {**SMALL, "attention_type": "original_full"}, language),
        "modernbert": ("ModernBertForMaskedLM", {**SMALL, "cls_token_id": 2, "sep_token_id": 3}, language),
        "fnet": ("FNetForMaskedLM", SMALL, unpadded),
        "squeezebert": ("SqueezeBertForMaskedLM", {**SMALL, "embedding_size": W, "intermediate_size": either(64, F)}, language),
        "mobilebert": ("MobileBertForMaskedLM", {**SMALL, "embedding_size": W // 2, "intra_bottleneck_size": W}, language),
        "layoutlm": ("LayoutLMForMaskedLM", SMALL, language),
        "rembert": ("RemBertForMaskedLM", {**SMALL, "input_embedding_size": W // 2, "output_embedding_size": W // 2}, language),
        "nystromformer": ("NystromformerForMaskedLM", {**SMALL, "num_landmarks": 64, "segment_means_seq_len": either(64, T)}, language),
        "roformer": ("RoFormerForMaskedLM", SMALL, language),
        "ernie": ("ErnieForMaskedLM", SMALL, language),
        "esm": ("EsmForMaskedLM", {**SMALL, "mask_token_id": 4, "position_embedding_type": "rotary"}, language),
        # decoders
        "gpt2": ("GPT2LMHeadModel", SMALL, language),
        "gpt_neo": ("GPTNeoForCausalLM", {**SMALL, "num_layers": L, "num_heads": H,
                                            "attention_types": [[["global", "local"], L // 2]]}, language),
        "gptj": ("GPTJForCausalLM", {**SMALL, "rotary_dim": D // 2}, language),
        "gpt_neox": ("GPTNeoXForCausalLM", SMALL, language),
        "gpt_bigcode": ("GPTBigCodeForCausalLM", SMALL, language),
        "opt": ("OPTForCausalLM", {**SMALL, "ffn_dim": F, "word_embed_proj_dim": W}, language),
        "bloom": ("BloomForCausalLM", dict(vocab_size=V, hidden_size=W, n_layer=L, n_head=H), language),
        "llama": ("LlamaForCausalLM", GROUPED, language),
        "mistral": ("MistralForCausalLM", {**GROUPED, "sliding_window": window}, language),
        "mixtral": ("MixtralForCausalLM", {**GROUPED, "intermediate_size": W, "num_local_experts": 4,
                                           "output_router_logits": True}, language),
        "qwen2": ("Qwen2ForCausalLM", GROUPED, language),
        "qwen2_moe": ("Qwen2MoeForCausalLM", {**GROUPED, "num_experts": 4, "moe_intermediate_size": W // 2,
                                              "shared_expert_intermediate_size": W // 2},
                      language),
        "qwen3": ("Qwen3ForCausalLM", {**GROUPED, "head_dim": D}, language),
        "qwen3_moe": ("Qwen3MoeForCausalLM", {**GROUPED, "head_dim": D, "num_experts": 4, "num_experts_per_tok": 2,
                                              "moe_intermediate_size": W // 2}, language),
        "gemma": ("GemmaForCausalLM", {**GROUPED, "head_dim": D}, language),
        "gemma2": ("Gemma2ForCausalLM", {**GROUPED, "head_dim": D, "sliding_window": window}, language),
        "gemma3": ("Gemma3ForCausalLM", {**GROUPED, "head_dim": D, "sliding_window": window}, language),
        "phi": ("PhiForCausalLM", SMALL, language),
        "phi3": ("Phi3ForCausalLM", GROUPED, language),
        "falcon": ("FalconForCausalLM", SMALL, language),
        "mpt": ("MptForCausalLM", dict(vocab_size=V, d_model=W, n_layers=L, n_heads=H, max_seq_len=P), language),
        "stablelm": ("StableLmForCausalLM", GROUPED, language),
        "olmo": ("OlmoForCausalLM", GROUPED, language),
        "olmo2": ("Olmo2ForCausalLM", GROUPED, language),
        "starcoder2": ("Starcoder2ForCausalLM", GROUPED, language),
        "codegen": ("CodeGenForCausalLM", {**SMALL, "rotary_dim": D // 2}, language),
        "granite": ("GraniteForCausalLM", GROUPED, language),
        "cohere": ("CohereForCausalLM", GROUPED, language),
        "persimmon": ("PersimmonForCausalLM", SMALL, language),
        "biogpt": ("BioGptForCausalLM", SMALL, language),
        "xglm": ("XGLMForCausalLM", dict(vocab_size=V, d_model=W, num_layers=L, attention_heads=H, ffn_dim=F, max_position_embeddings=P),
                 language),
        "mamba": ("MambaForCausalLM", dict(vocab_size=V, hidden_size=W, num_hidden_layers=2, state_size=either(8, 16)), short_language),
        "mamba2": ("Mamba2ForCausalLM", dict(vocab_size=V, hidden_size=W, num_hidden_layers=L, state_size=either(8, 64),
                                             num_heads=either(8, 16), head_dim=either(8, 64),
                                             n_groups=1, chunk_size=either(4, 64)), language),
        "ctrl": ("CTRLLMHeadModel", dict(vocab_size=V, n_embd=W, n_layer=L, n_head=H, dff=F, n_positions=P), language),
        # sequence to sequence
        "t5": ("T5ForConditionalGeneration", dict(vocab_size=V, d_model=W, num_layers=L, num_heads=H, d_kv=D, d_ff=F,
                                                  decoder_start_token_id=0), translation),
        "bart": ("BartForConditionalGeneration", SEQ2SEQ, translation),
        "mbart": ("MBartForConditionalGeneration", SEQ2SEQ, translation),
        "pegasus": ("PegasusForConditionalGeneration", SEQ2SEQ, translation),
        "marian": ("MarianMTModel", SEQ2SEQ, translation),
        "blenderbot": ("BlenderbotForConditionalGeneration", SEQ2SEQ, translation),
        "m2m_100": ("M2M100ForConditionalGeneration", SEQ2SEQ, translation),
        "led": ("LEDForConditionalGeneration", {**SEQ2SEQ, "attention_window": window, "max_encoder_position_embeddings": P,
                                                "max_decoder_position_embeddings": P}, translation),
        # vision
        "vit": ("ViTForImageClassification", VISION, image(I)),
        "deit": ("DeiTForImageClassification", VISION, image(I)),
        "beit": ("BeitForImageClassification", {**VISION, "vocab_size": V}, image(I)),
        "dinov2": ("Dinov2ForImageClassification", VISION, image(I)),
        "swin": ("SwinForImageClassification", SWIN, image(I)),
        "swinv2": ("Swinv2ForImageClassification", SWIN, image(I)),
        "convnext": ("ConvNextForImageClassification", CONVNEXT, image(I)),
        "convnextv2": ("ConvNextV2ForImageClassification", CONVNEXT, image(I)),
        "resnet": ("ResNetForImageClassification", RESNET, image(I)),
        "regnet": ("RegNetForImageClassification", {**RESNET, "groups_width": 16}, image(I)),
        "mobilenet_v1": ("MobileNetV1ForImageClassification", dict(image_size=I, depth_multiplier=either(0.25, 1.0), num_labels=2),
                         image(I)),
        "mobilenet_v2": ("MobileNetV2ForImageClassification", dict(image_size=I, depth_multiplier=either(0.25, 1.0), num_labels=2),
                         image(I)),
        "mobilevit": ("MobileViTForImageClassification", dict(image_size=either(64, 256), num_labels=2, **either(
            dict(hidden_sizes=[32, 40, 48], neck_hidden_sizes=[8, 8, 16, 16, 24, 24, 32]), {})), image(either(64, 256))),
        "segformer": ("SegformerForImageClassification", dict(image_size=I, num_labels=2, **either(
            dict(num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[16, 32], patch_sizes=[7, 3], strides=[4, 2],
                 num_attention_heads=[1, 2], mlp_ratios=[2, 2]), {})), image(I)),
        "poolformer": ("PoolFormerForImageClassification", dict(num_labels=2, **either(
            dict(num_encoder_blocks=2, depths=[1, 1], hidden_sizes=[16, 32], patch_sizes=[7, 3], strides=[4, 2], padding=[2, 1]),
            {})), image(I)),
        "efficientnet": ("EfficientNetForImageClassification", dict(image_size=I, num_labels=2, **either(
            dict(width_coefficient=0.25, depth_coefficient=0.2, hidden_dim=320, kernel_sizes=[3, 3], in_channels=[32, 16],
            out_channels=[16, 24],
                 strides=[1, 2], num_block_repeats=[1, 1], expand_ratios=[1, 6], depthwise_padding=[]),
            dict(width_coefficient=1.0, depth_coefficient=1.0, hidden_dim=1280))), image(I)),
        # audio
        "wav2vec2": ("Wav2Vec2ForCTC", SPEECH, speech),
        "hubert": ("HubertForCTC", SPEECH, speech),
        "whisper": ("WhisperForConditionalGeneration", {**SEQ2SEQ, "num_mel_bins": either(16, 80),
                                                        "max_source_positions": either(20, 256),
                                                        "max_target_positions": either(20, 128), "begin_suppress_tokens": None,
                                                        "suppress_tokens": None}, spectrogram),
        "audio-spectrogram": ("ASTForAudioClassification", {**VISION, "max_length": either(32, 256), "num_mel_bins": either(16, 128)},
                              sound_image),
        # text and images
        "clip": ("CLIPModel", dict(text_config=CLIP_TEXT, vision_config=CLIP_VISION, projection_dim=W // 2), pairs),
        "siglip": ("SiglipModel", dict(text_config=CLIP_TEXT, vision_config=CLIP_VISION), pairs),
        "vilt": ("ViltForQuestionAnswering", {**SMALL, "image_size": I, "patch_size": Q, "num_labels": 2}, question),
        "blip": ("BlipModel", dict(text_config=CLIP_TEXT, vision_config=CLIP_VISION, projection_dim=W // 2), pairs),
    }


def no_dropout(settings) -> None:
    """Every probability of a random change to zero, so that two runs agree whoever draws the random numbers."""
    import transformers
    for name, value in vars(settings).items():
        if isinstance(value, transformers.PreTrainedConfig):
            no_dropout(value)
        elif "drop" in name and type(value) in (int, float):
            setattr(settings, name, type(value)(0))


def build(name: str, sizes: Sizes = TINY, **more):
    """(model in training mode, a function inputs(batch, length) of keyword arguments for it). `more`: further settings."""
    import transformers
    model_class, settings, inputs = architectures(sizes)[name]
    cls = getattr(transformers, model_class)
    config = cls.config_class(**copy.deepcopy(settings), **more)
    no_dropout(config)
    torch.manual_seed(0)
    model = cls(config).train()
    if getattr(model, "loss_type", "") is None:
        model.loss_type = "ForCausalLM"                  # else transformers logs, once, that it guesses
    return model, lambda batch=sizes.batch, length=sizes.length: inputs(config, batch, length)
