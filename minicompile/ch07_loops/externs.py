# %% [markdown]
# # Library calls
#
# Matrix products, convolutions and attention go to the library kernels that eager uses, and so does
# everything that has no lowering. A call needs real memory for its operands. What layout it accepts differs:
# BLAS reads a matrix transposed as happily as not, so `mm(x, w.t())` must not copy `w`; a convolution picks
# its algorithm by layout, so it gets exactly the strides that its fake operands had when the layouts were
# decided.
#
# `relu(x) @ w.t()` shows both sides of it. `relu(x)` was lazy, a rule for computing an element (`lazy.py`), and has to be stored
# before a library can read it. `w.t()` is memory already, in other strides, and is handed over as such:
#
#     loop0: for i0 < 3, i1 < 4    # full_default, maximum_default
#         v0: f32 = load x[4*i0 + i1]
#         v1: f32 = constant(0.0)
#         v2: f32 = maximum(v0, v1)
#         buf0[4*i0 + i1] = v2
#     extern1: buf1 = aten.mm.default(buf0[3, 4]:4,1, w[4, 5]:1,4)
#     return buf1[3, 5]:5,1
#
# A `View`, as the operands of `extern1` are, is printed as the buffer, its sizes and, behind the colon, its strides.

# %%
import torch
from torch import fx

from ..ch01_graphs.graph import map_args
from ..ch01_graphs.shapes import expr_of
from ..ch01_graphs.symbolic import as_expr, provably_nonnegative
from ..ch06_decompositions.decompose import read_results
from ..errors import Unsupported
from .ir import Extern, View
from .lazy import Lazy, Lowering, as_view, dense_strides, from_buffer, new_buffer, sizes_of, strides_of, window
from .table import aten

MATRIX_OPS = {aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default, aten.mv.default,
              aten.dot.default, aten.addmv.default}


def blas_readable(size, stride) -> bool:
    """Can BLAS read a (batch of) matrices with these strides without a copy: one of the two inner dims
    has stride 1."""
    if len(size) < 2 or 0 in size:
        return True

    def unit(d, other):
        """Steps by one along `d`, and by at least a whole line along the other."""
        apart = size[other] == 1 or provably_nonnegative(as_expr(stride[other]) - size[d])
        return (stride[d] == 1 or size[d] == 1) and apart

    return unit(-1, -2) or unit(-2, -1)


# %% [markdown]
# What BLAS takes is a matrix whose rows, or whose columns, are contiguous, at any distance from each other that keeps them apart.
# Everything else is given what the fake has (`wanted`): `window` finds the tensor lying in memory like that, or copies it.

# %%
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
#
# `operand` above has put each argument into memory, which is where a lazy tensor stops being lazy (`lazy.py`). `emit_extern` appends the
# call to the program. `move` is the copy to another device, made once for each tensor and device; a constant moves now, not at run time.

# %%
def call_extern(g: Lowering, op):
    """Call the ATen kernel `op` on the arguments of the current node; returns its results as `Lazy` tensors
    in memory."""
    if op._schema.is_mutable:
        raise Unsupported(f"{op} mutates in a functional graph", g.node.meta.get("location"))
    if any(r.alias_info is not None for r in op._schema.returns):
        op = copying_twin(op)

    def convert(a):
        value = g.values[a] if isinstance(a, fx.Node) else expr_of(a)
        return operand(g, op, value, a.meta.get("val")) if isinstance(value, Lazy) else value

    args, kwargs = map_args(convert, (g.node.args, g.node.kwargs))
    several = isinstance(g.val, (tuple, list))
    read, results, names = read_results(g.node), [], []
    for i, fake in enumerate(g.val if several else [g.val]):
        name = None
        if isinstance(fake, torch.Tensor) and (not several or i in read or None in read):
            name = new_buffer(g, fake.dtype, fake.device, sizes_of(fake), strides_of(fake))
        names.append(name)
        unread = isinstance(fake, torch.Tensor) and name is None
        results.append(from_buffer(g, name) if name else None if unread else expr_of(fake))
    emit_extern(g, op, args, kwargs, names)
    return results if several else results[0]


def emit_extern(g: Lowering, op, args, kwargs, names) -> None:
    name, location = f"extern{len(g.program.nodes)}", g.node.meta.get("location")
    call = Extern(name, op, tuple(args), dict(kwargs), tuple(names), location, (g.node.name,),
                  asked=g.node in g.refusals and not g.node.users)
    g.program.nodes.append(call)


def copying_twin(op):
    packet = getattr(aten, op._schema.name.removeprefix("aten::") + "_copy", None)
    twin = getattr(packet, op._overloadname, None) if packet is not None else None
    if twin is None:
        raise Unsupported(f"{op} returns a view and has no lowering")
    return twin


def move(g: Lowering, x: Lazy, device: torch.device) -> Lazy:
    """`x` on another device; the same tensor is moved once, and a constant before the program runs."""
    key = (id(x), device)
    constant = x.view and g.program.constants.get(x.view.buffer)
    if key not in g.moved and constant is not None and x.view.layout == g.program.buffers[x.view.buffer].layout:
        there = constant.to(device)
        name = new_buffer(g, x.dtype, device, there.shape, there.stride())
        g.program.constants[name] = there
        g.moved[key] = (x, from_buffer(g, name))
    if key not in g.moved:
        name = new_buffer(g, x.dtype, device, x.size, dense_strides(x.size, x.stride))
        emit_extern(g, aten._to_copy.default, (window(g, x),), {"device": device}, (name,))
        g.moved[key] = (x, from_buffer(g, name))
    return g.moved[key][1]
