import torch

from minicompile.ch01_graphs.layouts import each_has_its_place
from minicompile.ch05_autograd.aliases import as_it_lies, conform, read, restride, same_layout, undo
from minicompile.errors import Unsupported


def _write(b, alias, new, *, conformed=True, parents=True, version=True, mine=True, undone=True, always=False):
    new = conform(b, new, alias.fake) if conformed else new
    if alias.parent is None or not parents:
        new = restride(b, new, alias.fake)
        alias.memory.value = new
        alias.memory.version += version
    else:
        whole = undo(b, alias.step, read(b, alias.parent), new) if undone else new
        _write(b, alias.parent, whole, conformed=conformed, version=version, mine=mine, undone=undone)
    if always or mine and same_layout(new.meta["val"], alias.fake):
        alias.node, alias.version = new, alias.memory.version


def wrong_no_conform(b, alias, new):
    _write(b, alias, new, conformed=False)


def wrong_parent_forgotten(b, alias, new):
    _write(b, alias, new, parents=False)


def wrong_no_version(b, alias, new):
    _write(b, alias, new, version=0)


def wrong_only_this_tensor(b, alias, new):
    alias.node, alias.version = conform(b, new, alias.fake), alias.memory.version


def wrong_not_undone(b, alias, new):
    _write(b, alias, new, undone=False)


def wrong_two_levels(b, alias, new):
    base = alias
    while base.parent is not None:
        base = base.parent
    if alias.parent is None or alias.parent is base:
        _write(b, alias, new)
    else:
        alias.node, alias.version = conform(b, new, alias.fake), alias.memory.version


def right_in_a_loop(b, alias, new):
    written = []
    while True:
        new = conform(b, new, alias.fake)
        written.append((alias, new))
        if alias.parent is None:
            break
        if not each_has_its_place(alias.parent.fake):
            raise Unsupported("two elements in one place")
        whole = read(b, alias.parent)
        if alias.step.target is torch.ops.aten.as_strided.default:
            whole = as_it_lies(b, whole, alias)
        alias, new = alias.parent, undo(b, alias.step, whole, new)
    alias.memory.value = restride(b, new, alias.fake)
    alias.memory.version += 1
    written[-1] = alias, alias.memory.value
    for one, node in written:
        if same_layout(node.meta["val"], one.fake):
            one.node, one.version = node, one.memory.version


# Versions are only compared for equality; an alias that does not remember its contents makes them again from its parent's.
SAME = [
    "- alias.memory.value, alias.memory.version = (new, alias.memory.version + 1)\n"
        "+ alias.memory.value, alias.memory.version = (new, alias.memory.version + 2)",
    "- if same_layout(new.meta['val'], alias.fake):\n- alias.node, alias.version = (new, alias.memory.version)\n"
        "+ if True:\n+ pass",
]
