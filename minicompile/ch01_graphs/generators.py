# %% [markdown]
# # Where random numbers come from
#
# PyTorch draws from *generators*, one for the CPU and one for each GPU, unless the program brings its own. All numbers that a
# generator will give follow from its state. So a compiler that puts the state back can take a draw back (chapter 3, where a frame
# begins once more) or repeat it (chapter 5, for derivatives of derivatives).

# %%
from typing import Iterable

import torch


def generator_of(device: torch.device) -> torch.Generator:
    """The default generator of a device."""
    if device.type == "cpu":
        return torch.default_generator
    return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]


def states_of(generators: Iterable[torch.Generator]) -> list[tuple[torch.Generator, torch.Tensor]]:
    """(generator, its state) of each."""
    return [(generator, generator.get_state()) for generator in generators]


def set_states(states: Iterable[tuple[torch.Generator, torch.Tensor]]) -> None:
    for generator, state in states:
        generator.set_state(state)
