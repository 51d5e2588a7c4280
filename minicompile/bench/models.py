"""The architectures that the benchmarks run, written to their published descriptions in plain PyTorch.

GPT: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), pre-norm transformer with
learned positions and tied embeddings.
ResNet-50: He et al., "Deep Residual Learning" (2015), with the stride in the 3x3 convolution.
Llama: Touvron et al., "LLaMA" (2023): RMS norms, rotary positions, gated linear units. It is written the way
model libraries write it: settings are read from a config object in `forward`, attention is looked up in a
table, the result is a dataclass. Only the overhead benchmark uses it.
Captions: models of the library transformers, a ViT whose output a GPT-2 describes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass
class GPTConfig:
    """Sizes of a GPT. `dropout` is a probability; `bias` adds biases to linear and normalization layers."""

    vocab_size: int
    block_size: int
    layers: int
    heads: int
    width: int
    dropout: float = 0.0
    bias: bool = False


class LayerNorm(nn.Module):
    def __init__(self, width: int, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x):
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=config.bias)
        self.proj = nn.Linear(config.width, config.width, bias=config.bias)
        self.residual_dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        batch, time, width = x.shape
        q, k, v = (t.view(batch, time, self.heads, width // self.heads).transpose(1, 2)
                   for t in self.qkv(x).split(width, dim=2))
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.residual_dropout(self.proj(y.transpose(1, 2).reshape(batch, time, width)))


class Block(nn.Module):
    def __init__(self, config: GPTConfig):
        super().__init__()
        self.norm1, self.norm2 = LayerNorm(config.width, config.bias), LayerNorm(config.width, config.bias)
        self.attention = Attention(config)
        self.up = nn.Linear(config.width, 4 * config.width, bias=config.bias)
        self.down = nn.Linear(4 * config.width, config.width, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """`forward(tokens, targets)`, both int64 [batch, time]: (logits [batch, time, vocab], mean loss)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.token = nn.Embedding(config.vocab_size, config.width)
        self.position = nn.Embedding(config.block_size, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = LayerNorm(config.width, config.bias)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        for name, p in self.named_parameters():
            if p.dim() >= 2:
                residual = name.endswith(("proj.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / (2 * config.layers) ** 0.5 if residual else 0.02)
        self.head.weight = self.token.weight

    def forward(self, tokens, targets):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token(tokens) + self.position(positions))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))
        return logits, loss

    def flops_per_step(self, batch: int) -> float:
        """Floating-point operations of forward and backward: 6 per parameter and token, and the attention
        products (Chowdhery et al., "PaLM", 2022, appendix B)."""
        c = self.config
        matmul_parameters = sum(p.numel() for p in self.parameters()) - self.position.weight.numel()
        return batch * c.block_size * (6 * matmul_parameters + 12 * c.layers * c.width * c.block_size)


@dataclass
class LlamaConfig:
    vocab_size: int = 100
    width: int = 32
    layers: int = 16
    heads: int = 4
    key_heads: int = 2
    epsilon: float = 1e-6
    theta: float = 10000.0
    attention: str = "sdpa"


@dataclass
class LlamaOutput:
    logits: torch.Tensor
    loss: torch.Tensor | None = None


def causal_attention(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


ATTENTION = {"sdpa": causal_attention}


def rotated(x, cos, sin):
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class RMSNorm(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config, self.weight = config, nn.Parameter(torch.ones(config.width))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config.epsilon))


class LlamaBlock(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config, width = config, config.width
        self.norm1, self.norm2 = RMSNorm(config), RMSNorm(config)
        self.q = nn.Linear(width, width, bias=False)
        inner = width // config.heads * config.key_heads
        self.k, self.v = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.o = nn.Linear(width, width, bias=False)
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x, cos, sin):
        c, h = self.config, self.norm1(x)
        q, k, v = (p(h).view(*h.shape[:2], -1, c.width // c.heads).transpose(1, 2)
                   for p in (self.q, self.k, self.v))
        k, v = (t.repeat_interleave(c.heads // c.key_heads, dim=1) for t in (rotated(k, cos, sin), v))
        h = ATTENTION[c.attention](rotated(q, cos, sin), k, v).transpose(1, 2).reshape(x.shape)
        x = x + self.o(h)
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """`forward(tokens, labels=None)`, both int64 [batch, time]: a LlamaOutput."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.config = config
        self.token = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(LlamaBlock(config) for _ in range(config.layers))
        self.norm, self.head = RMSNorm(config), nn.Linear(config.width, config.vocab_size, bias=False)
        size = config.width // config.heads
        frequencies = config.theta ** (-torch.arange(0, size, 2) / size)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, tokens, labels=None, **settings):
        x = self.token(tokens)
        angles = torch.arange(tokens.shape[1], device=tokens.device)[:, None] * self.frequencies
        angles = torch.cat((angles, angles), dim=-1)
        for block in self.blocks[:self.config.layers]:
            x = block(x, cos=angles.cos(), sin=angles.sin())
        logits = self.head(self.norm(x))
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten(), **settings)
        return LlamaOutput(logits, loss)


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int):
        super().__init__()
        outputs = 4 * width
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity() if stride == 1 and inputs == outputs else \
            nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        return F.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


class ResNet50(nn.Module):
    """`forward(images, labels)`: float [batch, 3, H, W] and int64 [batch] give (logits [batch, 10],
    mean loss)."""

    # A multiply-add counts twice. He et al. give 3.8e9, with the stride in the 1x1 layer.
    FORWARD_FLOPS_224 = 2 * 4.09e9

    def __init__(self):
        super().__init__()
        layers, inputs = [], 64
        for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for i in range(count):
                layers.append(Bottleneck(inputs, width, stride if i == 0 else 1))
                inputs = 4 * width
        self.conv, self.bn = nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.layers = nn.Sequential(*layers)
        self.fc = nn.Linear(inputs, 10)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(m, Bottleneck):     # starts as the identity (Goyal et al., 2017), for stability
                nn.init.zeros_(m.bn3.weight)

    def forward(self, images, labels):
        x = self.layers(self.pool(F.relu(self.bn(self.conv(images)))))
        logits = self.fc(x.mean((2, 3)))
        return logits, F.cross_entropy(logits, labels)

    def flops_per_step(self, batch: int, size: int = 224) -> float:
        """Forward plus backward (twice the forward), scaled by area from the 224x224 figure."""
        return 3 * batch * self.FORWARD_FLOPS_224 * (size / 224) ** 2


class Captioner(nn.Module):
    """An encoder of images and a decoder of text, both of the library transformers: a ViT (Dosovitskiy et al., 2020) and a
    GPT-2 that looks at what the ViT made. `forward(images, labels, mask)` as `CaptionBatches` has them: (logits [batch,
    block, vocab], mean loss)."""

    def __init__(self, vit: dict, gpt2: dict):
        super().__init__()
        import transformers
        encoder = transformers.ViTConfig(**vit)
        decoder = transformers.GPT2Config(**gpt2, use_cache=False, add_cross_attention=True, is_decoder=True,
                                          bos_token_id=0, eos_token_id=0)
        config = transformers.VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
        config.pad_token_id = config.decoder_start_token_id = 0
        self.model = transformers.VisionEncoderDecoderModel(config)

    def forward(self, images, labels, mask):
        outputs = self.model(pixel_values=images, labels=labels, decoder_attention_mask=mask)
        return outputs.logits, outputs.loss

    def flops_per_step(self, batch: int, block: int) -> float:
        """6 per parameter and token, and the products of attention; cross-attention's keys and values come from the encoder's tokens."""
        vit, gpt2 = self.model.encoder, self.model.decoder
        patches = (vit.config.image_size // vit.config.patch_size) ** 2 + 1
        text = sum(p.numel() for name, p in gpt2.named_parameters() if "wpe" not in name)       # tied: the table is the head
        images = sum(p.numel() for p in vit.parameters())
        attention = vit.config.num_hidden_layers * vit.config.hidden_size * patches ** 2 + \
            gpt2.config.n_layer * gpt2.config.n_embd * block * (block + patches)
        return batch * (6 * text * block + 6 * images * patches + 12 * attention)
