"""Every model of the zoo by name: `library/architecture`."""
from __future__ import annotations

import importlib.util
import zlib

import torch
from torch import nn

from . import huggingface, vision
from .huggingface import Sizes
from .plain import PLAIN

LIBRARIES = {"hf": "transformers", "timm": "timm", "torchvision": "torchvision", "plain": "torch"}
# In a mixed order, so that the first so many are a sample of all
MODELS = sorted((f"{library}/{name}" for library, names in (
    ("hf", huggingface.architectures(huggingface.TINY)), ("timm", vision.TIMM), ("torchvision", vision.TORCHVISION), ("plain", PLAIN))
    for name in names), key=lambda name: zlib.crc32(name.encode()))


def installed(name: str) -> bool:
    """Whether the library of a model can be imported here."""
    return importlib.util.find_spec(LIBRARIES[name.partition("/")[0]]) is not None


def build(name: str, sizes: Sizes):
    """(model, inputs): the model in training mode without dropout, on the CPU, and inputs(batch) -> (args, kwargs).

    Parameters that an initialization leaves constant (biases, norms, zero-initialized branches, layer scales) get noise: what is
    multiplied by zero could not be wrong."""
    library, _, member = name.partition("/")
    torch.manual_seed(0)
    make = {"hf": huggingface.build, "timm": vision.build_timm, "torchvision": vision.build_torchvision,
            "plain": lambda member, sizes: PLAIN[member](sizes)}[library]
    model, inputs = make(member, sizes)
    for module in model.modules():
        if isinstance(module, (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)) or hasattr(module, "drop_prob") or \
                type(module).__name__ == "StochasticDepth":
            for attribute in ("p", "drop_prob"):
                if isinstance(getattr(module, attribute, None), float):
                    setattr(module, attribute, 0.0)
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point() and p.numel() and p.min() == p.max():
                p.add_(torch.randn_like(p), alpha=0.1)

    def split(batch):
        torch.manual_seed(batch)
        found = dict(inputs(batch=batch))
        return found.pop("args", ()), found
    return model.train(), split
