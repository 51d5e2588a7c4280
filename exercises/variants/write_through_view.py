from minicompile.ch05_autograd.functionalize import conform, read, restride, same_layout, undo


def _write(f, alias, new, *, conformed=True, parents=True, version=True, mine=True, undone=True, always=False):
    new = conform(f, new, alias.fake) if conformed else new
    if alias.parent is None or not parents:
        new = restride(f, new, alias.fake)
        alias.memory.value = new
        alias.memory.version += version
    else:
        whole = undo(f, alias.step, read(f, alias.parent), new) if undone else new
        _write(f, alias.parent, whole, conformed=conformed, version=version, mine=mine, undone=undone)
    if always or mine and same_layout(new.meta["val"], alias.fake):
        alias.node, alias.version = new, alias.memory.version


def wrong_no_conform(f, alias, new):
    _write(f, alias, new, conformed=False)


def wrong_parent_forgotten(f, alias, new):
    _write(f, alias, new, parents=False)


def wrong_no_version(f, alias, new):
    _write(f, alias, new, version=0)


def wrong_only_this_tensor(f, alias, new):
    alias.node, alias.version = conform(f, new, alias.fake), alias.memory.version


def wrong_not_undone(f, alias, new):
    _write(f, alias, new, undone=False)


def wrong_two_levels(f, alias, new):
    base = alias
    while base.parent is not None:
        base = base.parent
    if alias.parent is None or alias.parent is base:
        _write(f, alias, new)
    else:
        alias.node, alias.version = conform(f, new, alias.fake), alias.memory.version


def right_in_a_loop(f, alias, new):
    written = []
    while True:
        new = conform(f, new, alias.fake)
        written.append((alias, new))
        if alias.parent is None:
            break
        alias, new = alias.parent, undo(f, alias.step, read(f, alias.parent), new)
    alias.memory.value = restride(f, new, alias.fake)
    alias.memory.version += 1
    written[-1] = alias, alias.memory.value
    for one, node in written:
        if same_layout(node.meta["val"], one.fake):
            one.node, one.version = node, one.memory.version
