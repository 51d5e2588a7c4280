"""Chapter 12: the whole training step as one graph. `backward.py` brings `loss.backward()` into the captured graph,
`hooks.py` the hooks that it calls, `slots.py` what a program sees of both in its tensors, also of histories that are used up,
`data.py` tensors that get other memory, `optimizers.py` what `optimizer.step()` does. Importing the package registers what it adds to
capture."""
from . import backward, data, hooks, optimizers, slots  # noqa: F401 (they fill tables of chapter 3)
