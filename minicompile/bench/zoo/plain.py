"""Models written in plain PyTorch, the way tutorials and papers' repositories write them."""
from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from ..models import GPT, GPTConfig, Llama, LlamaConfig, ResNet50
from .huggingface import TINY, Sizes

PLAIN: dict = {}


def plain(build):
    """Register build(sizes) -> (model, inputs), inputs(batch) -> {"args": ...} or keyword arguments."""
    PLAIN[build.__name__] = build
    return build


def vectors(s: Sizes, *shape):
    return lambda batch=s.batch: {"args": (torch.randn(batch, *shape),)}


def tokens(s: Sizes, length: int = 0):
    return lambda batch=s.batch: {"args": (torch.randint(0, s.vocab, (batch, length or s.length)),)}


@plain
def perceptron(s):
    W = 2 * s.width
    return nn.Sequential(nn.Flatten(), nn.Linear(784, W), nn.ReLU(), nn.Linear(W, W), nn.ReLU(), nn.Linear(W, 10)), vectors(s, 1, 28, 28)


class Recurrent(nn.Module):
    def __init__(self, kind, s):
        super().__init__()
        self.embed, self.net = nn.Embedding(s.vocab, s.width), kind(s.width, s.width, num_layers=2, batch_first=True)
        self.head = nn.Linear(s.width, s.vocab)

    def forward(self, x):
        return self.head(self.net(self.embed(x))[0])


@plain
def lstm(s):
    return Recurrent(nn.LSTM, s), tokens(s, min(s.length, 64))


@plain
def gru(s):
    return Recurrent(nn.GRU, s), tokens(s, min(s.length, 64))


class Cells(nn.Module):
    """A recurrent net written as a loop over its cell."""

    def __init__(self, s):
        super().__init__()
        self.cell, self.head = nn.LSTMCell(s.width, s.width), nn.Linear(s.width, 1)

    def forward(self, x):
        h = c = x.new_zeros(x.shape[0], self.cell.hidden_size)
        seen = []
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], (h, c))
            seen.append(h)
        return self.head(torch.stack(seen, 1))


@plain
def lstm_cells(s):
    return Cells(s), vectors(s, 12, s.width)


@plain
def transformer_encoder(s):
    layer = nn.TransformerEncoderLayer(s.width, s.heads, s.inner, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, s.layers), vectors(s, s.length, s.width)


@plain
def transformer(s):
    model = nn.Transformer(s.width, s.heads, s.layers, s.layers, s.inner, dropout=0.0, batch_first=True)
    return model, lambda batch=s.batch: {"args": (torch.randn(batch, s.length, s.width), torch.randn(batch, s.length // 2, s.width))}


@plain
def gpt(s):
    model = GPT(GPTConfig(vocab_size=s.vocab, block_size=s.positions, layers=s.layers, heads=s.heads, width=s.width))
    return model, lambda batch=s.batch: {"args": tuple(torch.randint(0, s.vocab, (batch, s.length)) for _ in range(2))}


@plain
def llama(s):
    model = Llama(LlamaConfig(vocab_size=s.vocab, width=s.width, layers=s.layers, heads=s.heads, key_heads=s.heads // 2))
    return model, lambda batch=s.batch: {"args": tuple(torch.randint(0, s.vocab, (batch, s.length)) for _ in range(2))}


@plain
def resnet50(s):
    side = 64 if s is TINY else 224
    return ResNet50(), lambda batch=s.batch: {"args": (torch.randn(batch, 3, side, side), torch.randint(0, 10, (batch,)))}


def double_conv(inputs, outputs):
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True),
                         nn.Conv2d(outputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class UNet(nn.Module):
    """Ronneberger et al., 2015."""

    def __init__(self, width):
        super().__init__()
        sizes = [width * 2 ** i for i in range(4)]
        self.down = nn.ModuleList(double_conv(a, b) for a, b in zip([3, *sizes], sizes))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2) for a, b in zip(sizes, sizes[1:]))
        self.join = nn.ModuleList(double_conv(2 * a, a) for a in sizes[:-1])
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x):
        kept = []
        for block in self.down[:-1]:
            x = block(x)
            kept.append(x)
            x = F.max_pool2d(x, 2)
        x = self.down[-1](x)
        for up, join, skip in zip(reversed(self.up), reversed(self.join), reversed(kept)):
            x = join(torch.cat((skip, up(x)), 1))
        return self.head(x)


@plain
def unet(s):
    return UNet(8 if s is TINY else 32), vectors(s, 3, *2 * (32 if s is TINY else 128,))


@plain
def dcgan_generator(s):
    W = s.width // 2
    layers = [nn.ConvTranspose2d(64, 4 * W, 4), nn.BatchNorm2d(4 * W), nn.ReLU(True)]
    for inputs, outputs in ((4 * W, 2 * W), (2 * W, W)):
        layers += [nn.ConvTranspose2d(inputs, outputs, 4, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(True)]
    return nn.Sequential(*layers, nn.ConvTranspose2d(W, 3, 4, 2, 1), nn.Tanh()), vectors(s, 64, 1, 1)


@plain
def discriminator(s):
    """With spectral normalization as torch.nn.utils.parametrizations writes it."""
    norm, W = nn.utils.parametrizations.spectral_norm, s.width
    return nn.Sequential(norm(nn.Conv2d(3, W, 4, 2, 1)), nn.LeakyReLU(0.2), norm(nn.Conv2d(W, 2 * W, 4, 2, 1)), nn.LeakyReLU(0.2),
                         nn.Flatten(), norm(nn.Linear(2 * W * 64, 1))), vectors(s, 3, 32, 32)


class Autoencoder(nn.Module):
    """A variational autoencoder; the noise is an input."""

    def __init__(self, W):
        super().__init__()
        self.encode, self.decode = nn.Sequential(nn.Linear(784, W), nn.SiLU(), nn.Linear(W, 64)), nn.Sequential(
            nn.Linear(32, W), nn.SiLU(), nn.Linear(W, 784))

    def forward(self, x, noise):
        mean, log_variance = self.encode(x).chunk(2, -1)
        out = self.decode(mean + noise * (0.5 * log_variance).exp())
        kl = -0.5 * (1 + log_variance - mean.pow(2) - log_variance.exp()).sum(-1).mean()
        return {"out": out, "loss": F.binary_cross_entropy_with_logits(out, x.sigmoid()) + 1e-3 * kl}


@plain
def autoencoder(s):
    return Autoencoder(2 * s.width), lambda batch=s.batch: {"args": (torch.randn(batch, 784), torch.randn(batch, 32))}


class WaveNet(nn.Module):
    """van den Oord et al., 2016: dilated causal convolutions with gates."""

    def __init__(self, W, layers):
        super().__init__()
        self.first = nn.Conv1d(1, W, 1)
        self.gates = nn.ModuleList(nn.Conv1d(W, 2 * W, 2, dilation=2 ** i) for i in range(layers))
        self.outs = nn.ModuleList(nn.Conv1d(W, W, 1) for _ in range(layers))
        self.last = nn.Conv1d(W, 1, 1)

    def forward(self, x):
        x, total = self.first(x), 0
        for gate, out in zip(self.gates, self.outs):
            a, b = gate(F.pad(x, (gate.dilation[0], 0))).chunk(2, 1)
            y = out(torch.tanh(a) * torch.sigmoid(b))
            x, total = x + y, total + y
        return self.last(F.relu(total))


@plain
def wavenet(s):
    return WaveNet(s.width // 4, 4 if s is TINY else 8), vectors(s, 1, 16 * s.length)


class Recommender(nn.Module):
    """Naumov et al., 2019 (DLRM): bags of embeddings, dot products between them, two perceptrons."""

    def __init__(self, s):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(s.vocab, s.width, mode="sum") for _ in range(6))
        self.bottom = nn.Sequential(nn.Linear(13, s.width), nn.ReLU(), nn.Linear(s.width, s.width), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(s.width + 21, s.width), nn.ReLU(), nn.Linear(s.width, 1))
        self.register_buffer("pairs", torch.tril_indices(7, 7, -1), persistent=False)

    def forward(self, dense, sparse):
        x = self.bottom(dense)
        features = torch.stack([x, *(table(sparse[:, i]) for i, table in enumerate(self.tables))], 1)
        products = torch.bmm(features, features.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return torch.sigmoid(self.top(torch.cat((x, products), 1)))


@plain
def recommender(s):
    return Recommender(s), lambda batch=16 * s.batch: {"args": (torch.randn(batch, 13), torch.randint(0, s.vocab, (batch, 6, 3)))}


class GraphAttention(nn.Module):
    """Velickovic et al., 2018, on an edge list, with scatters."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.linear, self.attend = nn.Linear(inputs, outputs), nn.Linear(2 * outputs, 1)

    def forward(self, x, edges):
        h = self.linear(x)
        source, target = edges
        score = F.leaky_relu(self.attend(torch.cat((h[source], h[target]), -1)).squeeze(-1), 0.2)
        weight = torch.exp(score - score.max())
        total = torch.zeros_like(h[:, 0]).to(weight.dtype).index_add(0, target, weight)
        return torch.zeros_like(h).index_add(0, target, (h[source] * (weight / (total[target] + 1e-9))[:, None]).to(h.dtype))


class GraphNet(nn.Module):
    def __init__(self, W):
        super().__init__()
        self.a, self.b, self.head = GraphAttention(16, W), GraphAttention(W, W), nn.Linear(W, 7)

    def forward(self, x, edges):
        return self.head(F.elu(self.b(F.elu(self.a(x, edges)), edges)))


@plain
def graph_attention(s):
    return GraphNet(s.width), lambda batch=s.batch: {"args": (torch.randn(32 * batch, 16), torch.randint(0, 32 * batch, (2, 128 * batch)))}


class PointNet(nn.Module):
    """Qi et al., 2017: a perceptron per point, then the maximum."""

    def __init__(self, W):
        super().__init__()
        self.points = nn.Sequential(nn.Conv1d(3, W, 1), nn.BatchNorm1d(W), nn.ReLU(), nn.Conv1d(W, 2 * W, 1), nn.BatchNorm1d(2 * W))
        self.head = nn.Sequential(nn.Linear(2 * W, W), nn.ReLU(), nn.Linear(W, 10))

    def forward(self, x):
        return self.head(self.points(x).max(-1).values)


@plain
def pointnet(s):
    return PointNet(s.width), vectors(s, 3, 4 * s.length)


class TextCNN(nn.Module):
    """Kim, 2014."""

    def __init__(self, s):
        super().__init__()
        self.embed = nn.Embedding(s.vocab, s.width)
        self.convs = nn.ModuleList(nn.Conv1d(s.width, s.width, k) for k in (3, 4, 5))
        self.head = nn.Linear(3 * s.width, 2)

    def forward(self, x):
        x = self.embed(x).transpose(1, 2)
        return self.head(torch.cat([F.relu(conv(x)).amax(-1) for conv in self.convs], 1))


@plain
def textcnn(s):
    return TextCNN(s), tokens(s)


class Radiance(nn.Module):
    """Mildenhall et al., 2020 (NeRF): encoded positions, a perceptron with a skip, and integration along rays."""

    def __init__(self, W):
        super().__init__()
        self.a = nn.Sequential(nn.Linear(39, W), nn.ReLU(), nn.Linear(W, W), nn.ReLU())
        self.b, self.head = nn.Sequential(nn.Linear(W + 39, W), nn.ReLU()), nn.Linear(W, 4)

    def forward(self, origins, directions):
        depth = torch.linspace(0.5, 2.0, 32, device=origins.device, dtype=origins.dtype)
        points = origins[:, None] + depth[:, None] * directions[:, None]
        scaled = [points * 2.0 ** i for i in range(6)]
        x = torch.cat([points, *(f(y) for y in scaled for f in (torch.sin, torch.cos))], -1)
        out = self.head(self.b(torch.cat((self.a(x), x), -1)))
        alpha = 1 - torch.exp(-F.softplus(out[..., 3]) * 0.05)
        through = torch.cumprod(torch.cat((torch.ones_like(alpha[:, :1]), 1 - alpha[:, :-1]), 1), 1)
        return ((alpha * through)[..., None] * out[..., :3].sigmoid()).sum(1)


@plain
def radiance_field(s):
    return Radiance(s.width), lambda batch=16 * s.batch: {"args": (torch.randn(batch, 3), torch.randn(batch, 3))}


class Flow(nn.Module):
    """Dinh et al., 2017 (RealNVP): affine couplings and the log of their determinant."""

    def __init__(self, W, layers):
        super().__init__()
        self.nets = nn.ModuleList(nn.Sequential(nn.Linear(32, W), nn.Tanh(), nn.Linear(W, 64)) for _ in range(layers))

    def forward(self, x):
        determinant = 0
        for i, net in enumerate(self.nets):
            a, b = x.chunk(2, -1) if i % 2 else x.chunk(2, -1)[::-1]
            scale, shift = net(a).chunk(2, -1)
            scale = torch.tanh(scale)
            x, determinant = torch.cat((a, b * scale.exp() + shift), -1), determinant + scale.sum(-1)
        likelihood = -0.5 * (x.square() + math.log(2 * math.pi)).sum(-1) + determinant
        return {"x": x, "loss": -likelihood.mean()}


@plain
def flow(s):
    return Flow(s.width, 4 if s is TINY else 8), vectors(s, 64)


class Oscillator(nn.Module):
    """A neural differential equation, integrated with Runge and Kutta's method in a Python loop."""

    def __init__(self, W):
        super().__init__()
        self.field = nn.Sequential(nn.Linear(8, W), nn.Tanh(), nn.Linear(W, 8))

    def forward(self, x, h: float = 0.1):
        for _ in range(6):
            a = self.field(x)
            b = self.field(x + 0.5 * h * a)
            c = self.field(x + 0.5 * h * b)
            x = x + h / 6 * (a + 2 * b + 2 * c + self.field(x + h * c))
        return x


@plain
def neural_ode(s):
    return Oscillator(s.width), vectors(s, 8)


class Denoiser(nn.Module):
    """A step of a diffusion model: sinusoidal time embedding, group norms, self-attention, residual blocks (Ho et al., 2020)."""

    def __init__(self, W):
        super().__init__()
        self.W, self.time = W, nn.Sequential(nn.Linear(W, W), nn.SiLU(), nn.Linear(W, W))
        self.first, self.last = nn.Conv2d(3, W, 3, padding=1), nn.Conv2d(W, 3, 3, padding=1)
        self.norms = nn.ModuleList(nn.GroupNorm(8, W) for _ in range(4))
        self.convs = nn.ModuleList(nn.Conv2d(W, W, 3, padding=1) for _ in range(4))
        self.qkv, self.norm = nn.Conv2d(W, 3 * W, 1), nn.GroupNorm(8, W)

    def forward(self, x, t):
        angles = t[:, None] * torch.exp(torch.arange(self.W // 2, device=x.device, dtype=x.dtype) * (-9.0 / (self.W // 2)))
        time = self.time(torch.cat((angles.sin(), angles.cos()), -1))
        h = self.first(x)
        for norm, conv in zip(self.norms, self.convs):
            h = h + conv(F.silu(norm(h) + time[:, :, None, None]))
        q, k, v = (part.flatten(2).transpose(1, 2) for part in self.qkv(self.norm(h)).chunk(3, 1))
        h = h + F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None])[:, 0].transpose(1, 2).reshape(h.shape)
        return self.last(F.silu(h))


@plain
def denoiser(s):
    side = 8 if s is TINY else 32
    return Denoiser(max(32, s.width // 4)), lambda batch=s.batch: {"args": (torch.randn(batch, 3, side, side), torch.rand(batch) * 1000)}
