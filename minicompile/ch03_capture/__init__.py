# %% [markdown]
# # Chapter 3: capture
#
# Chapter 1 recorded a function by running it. What Python does between two operators leaves no trace in a recording: a branch that was
# taken, a list that grew, an attribute that was read, and so nobody could tell whether the recording holds for the next call. This
# chapter watches the program itself, without asking its author for anything. The text of a function may be missing. What is always
# there is its bytecode, which CPython executes on a stack of objects. That of `centred` (chapter 1), in Python 3.11, without
# instructions that only prepare others:
#
#     LOAD_FAST x
#     LOAD_FAST x
#     LOAD_METHOD mean
#     LOAD_CONST 1
#     LOAD_CONST True
#     CALL
#     BINARY_OP -
#     RETURN_VALUE
#
# Here a machine written in Python executes it, on a stack of *values*: records that stand for objects. `LOAD_FAST` pushes the
# value of `x`, which says where `x` came from and what its fake is. `LOAD_METHOD` finds `mean` among the methods of tensors,
# with a guard that it is PyTorch's. `CALL` and `BINARY_OP` run the operation on the fakes, write a line into the graph, and
# push the value of its result. `RETURN_VALUE` ends it:
#
#     x: f32[64, 256] = input
#     mean: f32[64, 1] = x.mean(1, keepdim=True)
#     sub: f32[64, 256] = sub(x, mean)
#     return (sub,)
#
# At the end of the chapter you can follow a function instruction by instruction to its graph, guards and side effects, say what capture
# knows of an object when it meets it, and teach it another feature of Python.
#
# What it leaves: what cannot be in a graph, which so far makes the whole function run eagerly (chapter 4), and derivatives
# (chapter 5).
#
# Sources: PEP 523, for the hook; J. Ansel and others, *PyTorch 2* (2024), for capture from bytecode; C. F. Bolz and others,
# *Tracing the Meta-Level* (2009), for the idea in an implementation of Python.
#
# In reading order:
#
# 1. `hook.py` and `frame_hook.c` get hold of a frame before its first instruction runs (`no_hook.py`: without CPython's headers);
# 2. `tracer.py`, what a trace has written so far; `values.py` (with `exceptions.py` and `lookup.py`), `interpreter.py` (with
#    `binding.py`), `wrap.py` (with `builders.py` and `keys.py`) and `inputs.py`: the values, the machine that runs bytecode on
#    them, and how an object of the program becomes a value;
# 3. `tensors.py`, where the graph grows (`storage.py`: what a program sees of memory; `constants.py`: tensors that are known);
#    `protocol.py`, how an operator finds its method; `attributes.py` (with `descriptors.py` and `class_attributes.py`),
#    `iterate.py`, `operations.py` (with `varying.py`), `comparisons.py`, `subscripts.py`, `methods.py` and `calls.py`, what Python
#    means by `.`, `for`, `+`, `<`, `[]` and `()`;
#    `library`, what has no bytecode to look at, one by one, among it `library/items.py` and `library/iterators.py`, what `[]` and
#    `for` do to each kind of container, `library/modules.py`, modules of PyTorch, `library/classes.py`, classes that the trace
#    itself makes, `library/contexts.py`, context managers, `library/control_flow.py`, branches and scans that are functions, and
#    `library/regions.py`, autograd functions and checkpoints;
# 4. `opcodes.py` and `opcodes_calls.py`: the instructions, most of them one to five lines now;
# 5. `effects.py`, `epilogue.py` and `capture.py`: the result is written down as a graph, guards, and the Python text of a
#    function.
