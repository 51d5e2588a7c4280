# %% [markdown]
# # From groups to kernels
#
# While fusion decides, loop bodies stay as they are, and a group only collects what its members will become.
# This module does the rest, once per group: it rewrites the bodies, drops what nobody reads, merges
# dimensions and describes the result as a `Kernel`.

# %%
from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from ..ch01_graphs.symbolic import Symbol, symbols
from ..ch07_loops.ir import Inst, Ref
from .dependencies import rewrite
from .iteration import merge_dims
from .kernel import Kernel

if TYPE_CHECKING:
    from .fuse import Fuser, Group

# %% [markdown]
# ## What nobody reads
#
# A buffer that only this kernel reads becomes
# *local*. A store that nobody at all reads is removed, with the arithmetic that only it needed.

# %%
def prune(body, dead: set[str]):
    """`body` without stores to `dead` buffers and without instructions that nothing uses."""
    used: set[int] = set()
    keep = []
    for i in range(len(body) - 1, -1, -1):
        op, args, _ = body[i]
        if op == "store" and args[0] not in dead or op == "indirect" or i in used:
            keep.append(i)
            used.update(a.id for a in args if type(a) is Ref)
    keep.reverse()
    if len(keep) == len(body):
        return body
    number = {old: new for new, old in enumerate(keep)}
    return tuple(Inst(op, tuple(Ref(number[a.id]) if type(a) is Ref else a for a in args), dtype)
                 for op, args, dtype in (body[i] for i in keep))


def kernel_name(members, number: int) -> str:
    """`fused_add_gelu_3`: the operators that went in, shortened."""
    words: list[str] = []
    for node in members:
        for origin in node.origins:
            word = re.sub(r"(_default|_tensor|_scalar)?(_\d+)*$", "", origin.lower()).strip("_")
            if word and word not in words:
                words.append(word)
    return "_".join(["fused", *words[:5], str(number)])


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
    bodies = {i: prune(rewrite(f.nodes[i].body, g.mapping[i]), dead) for i in g.members}
    indices = []
    for body in bodies.values():
        for op, args, _ in body:
            indices += [a for a in (args[1:2] if op in ("load", "store") else args) if type(a) is not int and
                        hasattr(a, "terms")]
    indices = list(dict.fromkeys(indices))
    blocks, map_v = merge_dims(g.space.vars[:len(g.space.vars) - len(g.walked)], indices, "i")
    walked, map_w = merge_dims(g.walked, indices, "w")
    rvars, map_r = merge_dims(g.space.rvars, indices, "r")
    vars, mapping = blocks + walked, {**map_v, **map_w, **map_r}
    bound = 0
    for i in g.members:
        node, body = f.nodes[i], bodies[i]
        stored = {args[0] for op, args, _ in body if op == "store"}
        if not stored:
            continue
        names = dict(mapping)
        for op, args, _ in body:
            if op == "indirect":
                names[args[1]] = Symbol(f"t{bound}", args[1].size, args[1].lower).expr
                bound += 1
        body = rewrite(body, names)
        if node.reduction_vars:
            over = set().union(*(symbols(g.mapping[i][v]) for v in node.reduction_vars))
            shape = (vars, rvars) if over.isdisjoint(g.walked) else (blocks + rvars, walked)
        else:
            covers = any(not symbols(e).isdisjoint(wide) for e in g.mapping[i].values())
            shape = (vars + rvars, ()) if covers else (vars, ())
        loops.append(replace(node, vars=shape[0], reduction_vars=shape[1], body=body,
                             outputs=tuple(o for o in node.outputs if o in stored)))
    if not loops:
        return None
    return finish_kernel(f, g, loops, vars, rvars, walked, local - dead, number)


def finish_kernel(f: Fuser, g: Group, loops, vars, rvars, walked, local, number: int) -> Kernel:
    written, read, symbol_set = [], [], set()
    for loop in loops:
        for op, args, _ in loop.body:
            if op in ("load", "store"):
                (read if op == "load" else written).append(args[0])
            symbol_set.update(*(symbols(a) for a in args if hasattr(a, "terms")))
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
