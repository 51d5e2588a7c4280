# %% [markdown]
# # Chapter 3: capture
#
# From a Python function to a graph, without asking the function's author for anything. In reading order:
#
# 1. `hook.py` and `frame_hook.c` get hold of a frame before its first instruction runs (`no_hook.py`: without CPython's headers);
# 2. `tracer.py`, what a trace has written so far; `values.py` (with `exceptions.py` and `lookup.py`), `interpreter.py` (with
#    `binding.py`), `wrap.py` and `inputs.py`: the records that stand for objects, the machine that runs bytecode on them, and
#    how an object of the program becomes such a record;
# 3. `tensors.py`, where the graph grows (`storage.py`: what a program sees of memory); `protocol.py`, how an operator
#    finds its method; `attributes.py`, `iterate.py`, `operations.py` (with `varying.py`), `comparisons.py`,
#    `subscripts.py`, `methods.py` and `calls.py`, what Python means by `.`, `for`, `+`, `<`, `[]` and `()`; `library`,
#    what has no bytecode to look at, one by one, among it `items.py` and `iterators.py`, what `[]` and `for` do to each
#    kind of container, `modules.py`, modules of PyTorch, `classes.py`, classes that the trace itself makes, `contexts.py`,
#    context managers, `control_flow.py`, branches and scans that are functions, and `regions.py`, autograd functions and
#    checkpoints;
# 4. `opcodes.py` and `opcodes_calls.py`: the instructions, now one to five lines each;
# 5. `effects.py`, `epilogue.py` and `capture.py`: the result is written down as a graph, guards, and the Python text of a
#    function.
