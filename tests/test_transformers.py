"""Hugging Face transformers: small models built from their configuration classes, against eager.

One line of ARCHITECTURES per architecture. Each model runs forward and backward, uncompiled and compiled, from the same weights: every
field of the output, the gradient of every parameter and every buffer must agree. A few run by default, all with `-m slow`.
`python tests/test_transformers.py FILE.json` writes the table of graphs and breaks.
"""
from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import time
import warnings

import pytest
import torch

import minicompile
from recorders import Captures

try:
    import transformers
except ImportError:
    transformers = None

os.environ.setdefault("HF_HUB_OFFLINE", "1")
pytestmark = [pytest.mark.usefixtures("fresh"),
              pytest.mark.skipif(transformers is None, reason="transformers is not installed: pip install minicompile[test]")]


# ---- inputs: functions of (configuration, batch, length) ---------------------------------------------------

def ids(config, batch, length):
    return torch.randint(5, 90, (batch, length))


def padding(batch, length):
    """The last tokens of the first row are padding."""
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, -2:] = 0
    return mask


def language(config, batch=2, length=9):
    tokens = ids(config, batch, length)
    return {"input_ids": tokens, "attention_mask": padding(batch, length), "labels": tokens.clone()}


def unpadded(config, batch=2, length=9):
    tokens = ids(config, batch, length)
    return {"input_ids": tokens, "labels": tokens.clone()}


def translation(config, batch=2, length=9):
    return {"input_ids": ids(config, batch, length), "attention_mask": padding(batch, length),
            "labels": ids(config, batch, length - 2)}


def classes(config, batch=2, length=9):
    return {"input_ids": ids(config, batch, length), "attention_mask": padding(batch, length),
            "labels": torch.randint(0, 2, (batch,))}


def image(size):
    def make(config, batch=2, length=None):
        return {"pixel_values": torch.randn(batch, 3, size, size), "labels": torch.randint(0, 2, (batch,))}
    return make


def segmentation(config, batch=2, length=None):
    return {"pixel_values": torch.randn(batch, 3, 32, 32), "labels": torch.randint(0, 2, (batch, 32, 32))}


def speech(config, batch=2, length=9):
    return {"input_values": torch.randn(batch, 100 * length), "labels": torch.randint(5, 20, (batch, 4))}


def spectrogram(config, batch=2, length=None):
    return {"input_features": torch.randn(batch, 16, 40), "labels": torch.randint(5, 20, (batch, 6))}


def pairs(config, batch=2, length=9):
    return {"input_ids": ids(config, batch, length), "pixel_values": torch.randn(batch, 3, 32, 32), "return_loss": True}


# ---- the architectures -------------------------------------------------------------------------------------

SMALL = dict(vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=37,
             max_position_embeddings=64, pad_token_id=1, bos_token_id=2, eos_token_id=3)
GROUPED = {**SMALL, "num_key_value_heads": 2}
SEQ2SEQ = dict(vocab_size=99, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
               encoder_ffn_dim=37, decoder_ffn_dim=37, max_position_embeddings=64, pad_token_id=1, bos_token_id=2, eos_token_id=3,
               decoder_start_token_id=2)
VISION = dict(image_size=32, patch_size=8, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=37, num_labels=2)
SPEECH = dict(vocab_size=32, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=37, conv_dim=(32, 32),
              conv_stride=(4, 4), conv_kernel=(8, 4), num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2, mask_time_prob=0.0,
              mask_feature_prob=0.0, num_feat_extract_layers=2)
CLIP_TEXT = dict(vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=37,
                 max_position_embeddings=64, pad_token_id=1, bos_token_id=2, eos_token_id=3)
CLIP_VISION = dict(image_size=32, patch_size=8, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=37)

# name: (model class, settings of the configuration, inputs)
ARCHITECTURES = {
    # encoders
    "bert": ("BertForMaskedLM", SMALL, language),
    "roberta": ("RobertaForMaskedLM", SMALL, language),
    "camembert": ("CamembertForMaskedLM", SMALL, language),
    "xlm-roberta": ("XLMRobertaForSequenceClassification", SMALL, classes),
    "distilbert": ("DistilBertForMaskedLM", dict(vocab_size=99, dim=32, n_layers=2, n_heads=4, hidden_dim=37), language),
    "albert": ("AlbertForMaskedLM", {**SMALL, "embedding_size": 16}, language),
    "electra": ("ElectraForMaskedLM", {**SMALL, "embedding_size": 16}, language),
    "deberta": ("DebertaForMaskedLM", {**SMALL, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}, language),
    "deberta-v2": ("DebertaV2ForMaskedLM", {**SMALL, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}, language),
    "mpnet": ("MPNetForMaskedLM", SMALL, language),
    "xlm": ("XLMWithLMHeadModel", dict(vocab_size=99, emb_dim=32, n_layers=2, n_heads=4, max_position_embeddings=64), language),
    "xlnet": ("XLNetLMHeadModel", dict(vocab_size=99, d_model=32, n_layer=2, n_head=4, d_inner=37), language),
    "convbert": ("ConvBertForMaskedLM", {**SMALL, "embedding_size": 16}, language),
    "funnel": ("FunnelForMaskedLM", dict(vocab_size=99, block_sizes=[1, 1], d_model=32, n_head=4, d_head=8, d_inner=37), language),
    "longformer": ("LongformerForMaskedLM", {**SMALL, "attention_window": 4}, language),
    "big_bird": ("BigBirdForMaskedLM", {**SMALL, "attention_type": "original_full"}, language),
    "modernbert": ("ModernBertForMaskedLM", {**SMALL, "cls_token_id": 2, "sep_token_id": 3}, language),
    "fnet": ("FNetForMaskedLM", SMALL, unpadded),
    "squeezebert": ("SqueezeBertForMaskedLM", {**SMALL, "embedding_size": 32, "intermediate_size": 64}, language),
    "mobilebert": ("MobileBertForMaskedLM", {**SMALL, "embedding_size": 16, "intra_bottleneck_size": 32}, language),
    "layoutlm": ("LayoutLMForMaskedLM", SMALL, language),
    "rembert": ("RemBertForMaskedLM", {**SMALL, "input_embedding_size": 16, "output_embedding_size": 16}, language),
    "nystromformer": ("NystromformerForMaskedLM", {**SMALL, "num_landmarks": 64, "segment_means_seq_len": 64}, language),
    "roformer": ("RoFormerForMaskedLM", SMALL, language),
    "ernie": ("ErnieForMaskedLM", SMALL, language),
    "esm": ("EsmForMaskedLM", {**SMALL, "mask_token_id": 4, "position_embedding_type": "rotary"}, language),
    # decoders
    "gpt2": ("GPT2LMHeadModel", SMALL, language),
    "gpt_neo": ("GPTNeoForCausalLM", {**SMALL, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}, language),
    "gptj": ("GPTJForCausalLM", {**SMALL, "rotary_dim": 4}, language),
    "gpt_neox": ("GPTNeoXForCausalLM", SMALL, language),
    "gpt_bigcode": ("GPTBigCodeForCausalLM", SMALL, language),
    "opt": ("OPTForCausalLM", {**SMALL, "ffn_dim": 37, "word_embed_proj_dim": 32}, language),
    "bloom": ("BloomForCausalLM", dict(vocab_size=99, hidden_size=32, n_layer=2, n_head=4), language),
    "llama": ("LlamaForCausalLM", GROUPED, language),
    "mistral": ("MistralForCausalLM", {**GROUPED, "sliding_window": 4}, language),
    "mixtral": ("MixtralForCausalLM", {**GROUPED, "intermediate_size": 32, "num_local_experts": 4, "output_router_logits": True}, language),
    "qwen2": ("Qwen2ForCausalLM", GROUPED, language),
    "qwen2_moe": ("Qwen2MoeForCausalLM", {**GROUPED, "num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
                  language),
    "qwen3": ("Qwen3ForCausalLM", {**GROUPED, "head_dim": 8}, language),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {**GROUPED, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}, language),
    "gemma": ("GemmaForCausalLM", {**GROUPED, "head_dim": 8}, language),
    "gemma2": ("Gemma2ForCausalLM", {**GROUPED, "head_dim": 8, "sliding_window": 4}, language),
    "gemma3": ("Gemma3ForCausalLM", {**GROUPED, "head_dim": 8, "sliding_window": 4}, language),
    "phi": ("PhiForCausalLM", SMALL, language),
    "phi3": ("Phi3ForCausalLM", GROUPED, language),
    "falcon": ("FalconForCausalLM", SMALL, language),
    "mpt": ("MptForCausalLM", dict(vocab_size=99, d_model=32, n_layers=2, n_heads=4, max_seq_len=64), language),
    "stablelm": ("StableLmForCausalLM", GROUPED, language),
    "olmo": ("OlmoForCausalLM", GROUPED, language),
    "olmo2": ("Olmo2ForCausalLM", GROUPED, language),
    "starcoder2": ("Starcoder2ForCausalLM", GROUPED, language),
    "codegen": ("CodeGenForCausalLM", {**SMALL, "rotary_dim": 4}, language),
    "granite": ("GraniteForCausalLM", GROUPED, language),
    "cohere": ("CohereForCausalLM", GROUPED, language),
    "persimmon": ("PersimmonForCausalLM", SMALL, language),
    "biogpt": ("BioGptForCausalLM", SMALL, language),
    "xglm": ("XGLMForCausalLM", dict(vocab_size=99, d_model=32, num_layers=2, attention_heads=4, ffn_dim=37, max_position_embeddings=64),
             language),
    "mamba": ("MambaForCausalLM", dict(vocab_size=99, hidden_size=32, num_hidden_layers=2, state_size=8), language),
    "mamba2": ("Mamba2ForCausalLM", dict(vocab_size=99, hidden_size=32, num_hidden_layers=2, state_size=8, num_heads=8, head_dim=8,
                                         n_groups=1, chunk_size=4), language),
    "ctrl": ("CTRLLMHeadModel", dict(vocab_size=99, n_embd=32, n_layer=2, n_head=4, dff=37, n_positions=64), language),
    # sequence to sequence
    "t5": ("T5ForConditionalGeneration", dict(vocab_size=99, d_model=32, num_layers=2, num_heads=4, d_kv=8, d_ff=37,
                                              decoder_start_token_id=0), translation),
    "bart": ("BartForConditionalGeneration", SEQ2SEQ, translation),
    "mbart": ("MBartForConditionalGeneration", SEQ2SEQ, translation),
    "pegasus": ("PegasusForConditionalGeneration", SEQ2SEQ, translation),
    "marian": ("MarianMTModel", SEQ2SEQ, translation),
    "blenderbot": ("BlenderbotForConditionalGeneration", SEQ2SEQ, translation),
    "m2m_100": ("M2M100ForConditionalGeneration", SEQ2SEQ, translation),
    "led": ("LEDForConditionalGeneration", {**SEQ2SEQ, "attention_window": 4, "max_encoder_position_embeddings": 64,
                                            "max_decoder_position_embeddings": 64}, translation),
    # vision
    "vit": ("ViTForImageClassification", VISION, image(32)),
    "deit": ("DeiTForImageClassification", VISION, image(32)),
    "beit": ("BeitForImageClassification", {**VISION, "vocab_size": 99}, image(32)),
    "dinov2": ("Dinov2ForImageClassification", VISION, image(32)),
    "swin": ("SwinForImageClassification", dict(image_size=32, patch_size=2, embed_dim=16, depths=[1, 1], num_heads=[2, 4], window_size=4,
                                                num_labels=2), image(32)),
    "swinv2": ("Swinv2ForImageClassification", dict(image_size=32, patch_size=2, embed_dim=16, depths=[1, 1], num_heads=[2, 4],
                                                    window_size=4, num_labels=2), image(32)),
    "convnext": ("ConvNextForImageClassification", dict(hidden_sizes=[16, 32], depths=[1, 1], num_stages=2, num_labels=2), image(32)),
    "convnextv2": ("ConvNextV2ForImageClassification", dict(hidden_sizes=[16, 32], depths=[1, 1], num_stages=2, num_labels=2), image(32)),
    "resnet": ("ResNetForImageClassification", dict(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], num_labels=2), image(32)),
    "regnet": ("RegNetForImageClassification", dict(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], groups_width=16,
                                                    num_labels=2), image(32)),
    "mobilenet_v1": ("MobileNetV1ForImageClassification", dict(image_size=32, depth_multiplier=0.25, num_labels=2), image(32)),
    "mobilenet_v2": ("MobileNetV2ForImageClassification", dict(image_size=32, depth_multiplier=0.25, num_labels=2), image(32)),
    "mobilevit": ("MobileViTForImageClassification", dict(image_size=64, hidden_sizes=[32, 40, 48], neck_hidden_sizes=[8, 8, 16, 16, 24, 24, 32],
                                                          num_labels=2), image(64)),
    "segformer": ("SegformerForImageClassification", dict(image_size=32, num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1],
                                                          hidden_sizes=[16, 32], patch_sizes=[7, 3], strides=[4, 2],
                                                          num_attention_heads=[1, 2], mlp_ratios=[2, 2], num_labels=2), image(32)),
    "poolformer": ("PoolFormerForImageClassification", dict(num_encoder_blocks=2, depths=[1, 1], hidden_sizes=[16, 32], patch_sizes=[7, 3],
                                                            strides=[4, 2], padding=[2, 1], num_labels=2), image(32)),
    "efficientnet": ("EfficientNetForImageClassification", dict(
        image_size=32, width_coefficient=0.25, depth_coefficient=0.2, hidden_dim=320, kernel_sizes=[3, 3], in_channels=[32, 16],
        out_channels=[16, 24], strides=[1, 2], num_block_repeats=[1, 1], expand_ratios=[1, 6], depthwise_padding=[], num_labels=2), image(32)),
    # audio
    "wav2vec2": ("Wav2Vec2ForCTC", SPEECH, speech),
    "hubert": ("HubertForCTC", SPEECH, speech),
    "whisper": ("WhisperForConditionalGeneration", {**SEQ2SEQ, "num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 20,
                                                    "begin_suppress_tokens": None, "suppress_tokens": None}, spectrogram),
    "audio-spectrogram": ("ASTForAudioClassification", {**VISION, "max_length": 32, "num_mel_bins": 16, "patch_size": 8},
                          lambda config, batch=2, length=None: {"input_values": torch.randn(batch, 32, 16),
                                                                "labels": torch.randint(0, 2, (batch,))}),
    # text and images
    "clip": ("CLIPModel", dict(text_config=CLIP_TEXT, vision_config=CLIP_VISION, projection_dim=16), pairs),
    "siglip": ("SiglipModel", dict(text_config=CLIP_TEXT, vision_config=CLIP_VISION), pairs),
    "vilt": ("ViltForQuestionAnswering", {**SMALL, "image_size": 32, "patch_size": 8, "num_labels": 2},
             lambda config, batch=2, length=9: {"input_ids": ids(config, batch, length), "pixel_values": torch.randn(batch, 3, 32, 32),
                                                "labels": torch.rand(batch, 2)}),
    "blip": ("BlipModel", dict(text_config=CLIP_TEXT, vision_config=CLIP_VISION, projection_dim=16), pairs),
}
ALL = list(ARCHITECTURES)
# One of each family, for every run of the tests
FAST = ["bert", "gpt2", "llama", "mixtral", "bart", "vit", "resnet", "clip"]
# These ask for the numbers in a tensor while they build the graph, or copy whole configurations
BROKEN = {"deberta", "xlm", "longformer", "mamba", "led", "wav2vec2", "hubert", "vilt"}
# Their image size or block structure is fixed, or the sizes decide more than shapes
TWO_LENGTHS = {"mamba2"}                 # a length that is a multiple of the chunk takes another branch than one that is padded
ONE_SIZE = BROKEN | {"funnel", "nystromformer", "fnet", "xlnet"}


def no_dropout(settings) -> None:
    """Every probability of a random change to zero, so that two runs agree whoever draws the random numbers."""
    for name, value in vars(settings).items():
        if isinstance(value, transformers.PreTrainedConfig):
            no_dropout(value)
        elif "drop" in name and type(value) in (int, float):
            setattr(settings, name, type(value)(0))


def build(name, **more):
    """(model in training mode, its inputs)"""
    model_class, settings, inputs = ARCHITECTURES[name]
    cls = getattr(transformers, model_class)
    config = cls.config_class(**copy.deepcopy(settings), **more)
    no_dropout(config)
    torch.manual_seed(0)
    model = cls(config).train()
    if getattr(model, "loss_type", "") is None:
        model.loss_type = "ForCausalLM"                  # else transformers logs, once, that it guesses
    return model, lambda **sizes: inputs(config, **sizes)


# ---- running and comparing ---------------------------------------------------------------------------------

def leaves(value, path="output"):
    """(path, leaf) for every tensor and number inside an output: model outputs, tuples, caches."""
    if isinstance(value, torch.Tensor) or value is None or isinstance(value, (bool, int, float, str)):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}")
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            yield from leaves(item, f"{path}[{i}]")
    elif type(value).__module__.startswith("transformers") and not isinstance(value, transformers.PreTrainedConfig):
        for key, item in vars(value).items():
            yield from leaves(item, f"{path}.{key}")
    else:
        yield path, type(value)


def step(model, call, batch):
    """One forward and backward from the model's present weights; answers all that it leaves behind."""
    model.zero_grad()
    torch.manual_seed(1)
    output = call(**batch)
    loss = output.get("loss")
    if loss is None:
        loss = sum(v.float().square().mean() for v in output.values() if isinstance(v, torch.Tensor) and v.requires_grad)
    loss.backward()
    found = {path: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for path, leaf in leaves(output)}
    found.update({f"gradient of {n}": None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()})
    found.update({f"buffer {n}": b.clone() for n, b in model.named_buffers()})
    found["class"] = type(output)
    return found


def check_same(got: dict, expected: dict, tolerance=1e-4):
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(got[name], value, rtol=tolerance, atol=tolerance, msg=lambda m: f"{name}: {m}", equal_nan=True)
        else:
            assert got[name] == value, (name, got[name], value)


def from_same_state(model, run, *args):
    """run(*args), then the model's buffers as they were."""
    before = {n: b.clone() for n, b in model.named_buffers()}
    try:
        return run(*args)
    finally:
        with torch.no_grad():
            for n, b in model.named_buffers():
                b.copy_(before[n])


def check_training(name, backend, tolerance=1e-4):
    """One training step of an architecture, compiled, against eager. Answers what was captured."""
    model, inputs = build(name)
    batch = inputs()
    expected = from_same_state(model, step, model, model, batch)
    with Captures() as seen:
        compiled = minicompile.compile(model, backend=backend, fullgraph=name not in BROKEN)
        got = from_same_state(model, step, model, compiled, batch)
    check_same(got, expected, tolerance)
    return seen


def rows(names):
    """Parameters: the fast ones by default, the others when slow tests are asked for."""
    return [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", rows(ALL))
def test_captured_graph(name):
    seen = check_training(name, "eager")
    assert name in BROKEN or len(seen.graphs) == 1


@pytest.mark.parametrize("name", rows(ALL))
def test_differentiated_graph(name):
    check_training(name, "aot_eager")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "gpt2", "llama", "qwen2", "gemma2", "bart", "vit", "swin", "convnext", "resnet",
                                  "clip", "siglip"])
def test_generated_kernels(name):
    check_training(name, "cpp", tolerance=2e-3)


# ---- further calls -----------------------------------------------------------------------------------------

def check_eval(name, sizes, backend="eager"):
    """Calls without gradients at several sizes. A length and then a batch that changed become symbolic; no third version."""
    model, inputs = build(name)
    model.eval()
    compiled, first = minicompile.compile(model, backend=backend), 0
    with Captures() as seen, torch.no_grad():
        for batch, length in sizes:
            kwargs = inputs(batch=batch, length=length)
            check_same(dict(leaves(compiled(**kwargs))), dict(leaves(model(**kwargs))))
            first = first or len(seen.graphs)
    assert name in ONE_SIZE or len(seen.graphs) <= first + 2 + (name in TWO_LENGTHS)


SIZES = [(2, 9), (2, 12), (2, 14), (3, 11), (4, 10)]


@pytest.mark.parametrize("name", rows(ALL))
def test_other_sizes(name):
    check_eval(name, SIZES)


@pytest.mark.parametrize("name", rows(["gpt2", "llama", "bart", "t5", "gemma2", "mistral"]))
def test_generate(name):
    """The cache grows by one token a step, and `generate` decides with Python on every one."""
    model, inputs = build(name)
    model.eval()
    tokens = inputs()["input_ids"]
    settings = dict(max_new_tokens=6, do_sample=False, attention_mask=torch.ones_like(tokens))
    expected = model.generate(tokens, **settings)
    model.forward = minicompile.compile(model.forward, backend="eager")
    assert torch.equal(model.generate(tokens, **settings), expected)


# ---- the table ---------------------------------------------------------------------------------------------

def measure(name) -> dict:
    """One row of the table."""
    minicompile.reset()
    row = {"architecture": name, "class": ARCHITECTURES[name][0], "ok": False, "graphs": 0, "breaks": []}
    try:
        model, inputs = build(name)
        batch = inputs()
        expected = from_same_state(model, step, model, model, batch)
        with Captures() as seen:
            start = time.perf_counter()
            got = from_same_state(model, step, model, minicompile.compile(model, backend="eager"), batch)
            row["seconds"] = round(time.perf_counter() - start, 2)
        row["graphs"] = len(seen.graphs)
        row["breaks"] = sorted({f"{b.reason} ({os.path.basename(b.location.filename)}:{b.location.lineno})" for b in seen.breaks})
        check_same(got, expected)
        row["ok"] = True
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"
    print(f"{name:20} {'ok' if row['ok'] else 'WRONG':6} {row['graphs']:3} graphs {len(row['breaks']):3} breaks  {row.get('error', '')}", flush=True)
    return row


def write_table(path, names):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        table = [measure(name) for name in names]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    summary = {"architectures": len(table), "ok": sum(r["ok"] for r in table), "one graph": sum(r["ok"] and r["graphs"] == 1 for r in table)}
    print(summary)
    if path:
        found = {"command": f"python tests/test_transformers.py {path}", "commit": commit, "python": sys.version.split()[0],
                 "torch": torch.__version__, "transformers": transformers.__version__, "backend": "eager", **summary, "rows": table}
        with open(path, "w") as file:
            json.dump(found, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    paths = [a for a in sys.argv[1:] if a.endswith(".json")]
    write_table(paths[0] if paths else None, [a for a in sys.argv[1:] if a not in paths] or ALL)
