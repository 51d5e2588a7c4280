"""The programs that the book's explorers show, beside the tour's function and the block of `_lib.py`."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class ResidualBlock(nn.Module):
    """[batch, channels, height, width] -> the same, as in a ResNet."""

    def __init__(self, channels=16):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x):
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(h)))


def attention(q, k, v):
    """Causal attention written by hand."""
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(later, float("-inf")).softmax(-1) @ v


class Classifier(nn.Module):
    def __init__(self, width=64, classes=10):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * width, classes))

    def forward(self, x):
        return self.layers(x)


class Step:
    """A training step: gradients, loss, backward pass and optimizer."""

    def __init__(self):
        self.model = Classifier()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def __call__(self, x, labels):
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x), labels)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def residual_block():
    return ResidualBlock(), (torch.randn(4, 16, 32, 32),)


def attention_by_hand():
    return attention, tuple(torch.randn(2, 4, 64, 32, requires_grad=True) for _ in range(3))


def training_step():
    return Step(), (torch.randn(32, 64), torch.randint(10, (32,)))
