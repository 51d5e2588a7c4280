# %% [markdown]
# # Library calls
#
# Matrix products, convolutions and attention go to the library kernels that eager uses, and so does
# everything that has no lowering. A call needs real memory for its operands. What layout it accepts differs:
# BLAS reads a matrix transposed as happily as not, so `mm(x, w.t())` must not copy `w`; a convolution picks
# its algorithm by layout, so it gets exactly the strides that its fake operands had when the layouts were
# decided.

# %%
from __future__ import annotations

import torch

from ..ch01_graphs.graph import map_args
from ..ch01_graphs.shapes import expr_of
from ..errors import Unsupported
from .ir import Extern, View
from .lazy import (Lazy, Lowering, as_view, dense_strides, from_buffer, new_buffer, sizes_of, strides_of,
                   window)
from .table import aten

MATRIX_OPS = {aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default, aten.mv.default,
              aten.dot.default, aten.addmv.default}


def blas_readable(size, stride) -> bool:
    """Can BLAS read a (batch of) matrices with these strides without a copy: one of the two inner dims
    has stride 1."""
    if len(size) < 2 or 0 in size:
        return True
    rows, cols = stride[-2], stride[-1]
    fits = (cols == 1 or size[-1] == 1) and (size[-2] == 1 or not isinstance(rows, int) or rows >= size[-1]) or \
        (rows == 1 or size[-2] == 1) and (size[-1] == 1 or not isinstance(cols, int) or cols >= size[-2])
    return fits


def operand(g: Lowering, op, x: Lazy, fake) -> View:
    """`x` in memory, in a layout that `op` takes."""
    wanted = strides_of(fake) if fake is not None else x.stride
    if op in MATRIX_OPS:
        view = as_view(g, x)
        if view is not None and blas_readable(x.size, view.layout.stride):
            return view
    return window(g, x, wanted)

# %% [markdown]
# ## A call
#
# The fakes of the node say what comes back: one buffer per tensor result, with the strides of the fake, which
# whoever runs the program must make true. Results that nobody reads get no name. Operators that return a
# *view* would hand out memory that somebody else owns; PyTorch has a copying twin for each, and that is what
# gets called.

# %%
def call_extern(g: Lowering, op, args, kwargs):
    """Call the ATen kernel `op`; returns its results as `Lazy` tensors in memory."""
    schema = op._schema
    if schema.is_mutable:
        raise Unsupported(f"{op} mutates in a functional graph", g.node.meta.get("location"))
    if any(r.alias_info is not None for r in schema.returns):
        op = copying_twin(op)
    flat_args = map_args(lambda a: a, (g.node.args, g.node.kwargs))

    def convert(a, original):
        if isinstance(a, (list, tuple)):
            converted = [convert(x, o) for x, o in zip(a, original)]      # fx has list types of its own
            return converted if isinstance(a, list) else tuple(converted)
        if isinstance(a, dict):
            return {k: convert(v, original[k]) for k, v in a.items()}
        return operand(g, op, a, original.meta.get("val")) if isinstance(a, Lazy) else a

    args, kwargs = convert(tuple(args), flat_args[0]), convert(dict(kwargs), flat_args[1])
    val = g.val
    several = isinstance(val, (tuple, list))
    results, names = [], []
    read = {u.args[1] for u in g.node.users if len(u.args) > 1} if several else {0}
    whole = several and any(u.op == "output" or u.target.__name__ != "getitem" for u in g.node.users)
    for i, fake in enumerate(val if several else [val]):
        if not isinstance(fake, torch.Tensor):
            results.append(expr_of(fake) if fake is not None else None)
            names.append(None)
            continue
        name = None
        if i in read or whole:
            name = new_buffer(g, fake.dtype, fake.device, sizes_of(fake), strides_of(fake))
        names.append(name)
        results.append(from_buffer(g, name) if name else None)
    g.program.nodes.append(Extern(f"extern{len(g.program.nodes)}", op, args, kwargs, tuple(names), (),
                                  g.node.meta.get("location"), (g.node.name,)))
    return results if several else results[0]


def copying_twin(op):
    packet = getattr(aten, op._schema.name.removeprefix("aten::") + "_copy", None)
    twin = getattr(packet, op._overloadname, None) if packet is not None else None
    if twin is None:
        raise Unsupported(f"{op} returns a view and has no lowering")
    return twin


def move(g: Lowering, x: Lazy, device: torch.device) -> Lazy:
    """`x` on another device; the same tensor is moved once."""
    key = (id(x), device)
    if key not in g.moved:
        name = new_buffer(g, x.dtype, device, x.size, dense_strides(x.size, x.stride))
        g.program.nodes.append(Extern(f"extern{len(g.program.nodes)}", aten._to_copy.default, (window(g, x),),
                                      {"device": device}, (name,), (), g.node.meta.get("location"), (g.node.name,)))
        g.moved[key] = (x, from_buffer(g, name))
    return g.moved[key][1]
