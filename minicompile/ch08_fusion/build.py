# %% [markdown]
# # From groups to kernels
#
# While fusion decides, loop bodies stay as they are, and a group only collects what its members will become.
# This module does the rest, once per group: it rewrites the bodies, merges dimensions and describes the result
# as a `Kernel`. A buffer that only this kernel reads becomes *local*. A store that nobody at all reads is left out,
# and with it the arithmetic that only it needed.

# %%
import re
from dataclasses import replace
from typing import Iterable

from ..ch01_graphs.symbolic import Expr, Int, Symbol, symbols
from ..ch07_loops.builder import normal
from ..ch07_loops.ir import Value, body_of, with_places
from .groups import Fuser, Group
from .iteration import merge_dims
from .kernel import Kernel

# %% [markdown]
# ## Other variables
#
# Fusion renames loop variables, splits them and merges them: `i0` becomes `16*i0 + i1`. Every index
# expression in a body changes the same way, and the algebra of chapter 1 removes the divisions that
# cancel. Buffers can get other names as well.

# %%
def rewrite(stores: Iterable[Value], mapping: dict[Symbol, Int], names: dict[str, str] = {}) -> tuple[Value, ...]:
    """These stores with loop variables replaced by expressions and buffers renamed: a new body, unless all stays as it is."""
    if not names and stays(mapping):
        return tuple(stores)
    return with_places(stores, lambda name, at: (names.get(name, name), normal(at)), mapping)


def stays(mapping: dict[Symbol, Int]) -> bool:
    """Whether each variable is replaced by itself, of the same size: equal symbols have equal names."""
    return all(e == v.expr and next(iter(symbols(e))).size == v.size for v, e in mapping.items())


def kernel_name(members, number: int) -> str:
    """`fused_add_gelu_3`: the operators that went in, shortened."""
    words: list[str] = []
    for origin in (origin for node in members for origin in node.origins):
        word = re.sub(r"(_default|_tensor|_scalar)?(_\d+)*$", "", origin.lower()).strip("_")
        if word and word not in words:
            words.append(word)
            if len(words) == 5:
                break
    return "_".join(["fused", *words, str(number)])


# %% [markdown]
# `build_kernel` first decides about memory. A buffer of the group that nobody outside reads is `local`, and lives
# in a register. If nobody at all reads it, its store is dropped. Then every loop is rewritten to the group's
# common variables. Dimensions that all loops pass through in one go are merged (`merge_dims`): a nest of 8 by 64
# whose every address is `64*i0 + i1` is a nest of 512, which leaves the code generators fewer loops. Last, each
# loop is told its shape: over the output variables, over these and the row, or folding the row.

# %%
def build_kernel(f: Fuser, g: Group, visible: set[str], number: int) -> Kernel | None:
    """The finished kernel of a group, or None if it has nothing to do. `visible`: names wanted after the
    program ends."""
    if any(d.size == 0 for d in g.space.vars):
        return None
    local, dead = set(), set()
    for name in g.writes:
        if name in visible or f.root[name] in f.aliased:
            continue
        outside = {f.find(r) for r in f.readers.get(name, ())} - {f.find(g.members[0])}
        if not outside:
            local.add(name)
            if not f.readers.get(name):
                dead.add(name)
    loops, wide = [], set(g.space.rvars)
    stores = {i: rewrite([s for s in f.nodes[i].stores if s.buffer not in dead], g.mapping[i]) for i in g.members}
    bodies = [body_of(ends) for ends in stores.values()]
    indices = list(dict.fromkeys(a for body in bodies for v in body for a in v.args if type(a) is Expr))
    blocks, map_v = merge_dims(g.space.vars[:len(g.space.vars) - len(g.walked)], indices, "i")
    walked, map_w = merge_dims(g.walked, indices, "w")
    rvars, map_r = merge_dims(g.space.rvars, indices, "r")
    vars, mapping = blocks + walked, {**map_v, **map_w, **map_r}
    for i, ends in stores.items():
        node = f.nodes[i]
        if node.reduction_vars:
            over = set().union(*(symbols(g.mapping[i][v]) for v in node.reduction_vars))
            shape = (vars, rvars) if over.isdisjoint(g.walked) else (blocks + rvars, walked)
        else:
            covers = any(not symbols(e).isdisjoint(wide) for e in g.mapping[i].values())
            shape = (vars + rvars, ()) if covers else (vars, ())
        loops.append(replace(node, vars=shape[0], reduction_vars=shape[1], stores=rewrite(ends, mapping)))
    return finish_kernel(f, g, loops, vars, rvars, walked, local - dead, number)


# %% [markdown]
# `finish_kernel` collects what the generators and the host program ask for: the buffers that are read and written,
# and the symbols that are mentioned anywhere and become arguments.

# %%
def finish_kernel(f: Fuser, g: Group, loops, vars, rvars, walked, local, number: int) -> Kernel:
    written = [s.buffer for loop in loops for s in loop.stores]
    read = [v.buffer for loop in loops for v in loop.loads]
    symbol_set = set().union(*(symbols(a) for loop in loops for v in loop.body for a in v.args if type(a) is Expr))
    for v in vars + rvars:
        symbol_set |= symbols(v.size)
    inputs = tuple(n for n in dict.fromkeys(read) if n not in written)
    outputs = tuple(n for n in dict.fromkeys(written) if n not in local)
    names = list(dict.fromkeys(read + written))
    for n in names:
        for e in (*f.buffers[n].layout.size, *f.buffers[n].layout.stride):
            symbol_set |= symbols(e)
    known = {*f.program.symbols.values(), *f.program.numbers}
    sizes = sorted((s for s in symbol_set if s in known), key=lambda s: s.name)
    members = [f.nodes[i] for i in g.members]
    return Kernel(kernel_name(members, number), g.device, vars, rvars, loops, frozenset(local),
                  {n: f.buffers[n] for n in names}, inputs, outputs, tuple(sizes),
                  tuple(dict.fromkeys(o for m in members for o in m.origins)), g.notes, walked)
