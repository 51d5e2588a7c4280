import torch

from minicompile.ch13_tuning.layouts import CONVOLUTIONS, _wants_channels_last


def _move(gm, *, places=(0, 1), first=False, any_conv=False, back=False, use=True, some=False):
    convolutions = [n for n in gm.graph.nodes if n.op == "call_function" and n.target in CONVOLUTIONS]
    wanted = [n for n in convolutions if any_conv or _wants_channels_last(n)]
    if not convolutions or len(wanted) < len(convolutions) and not some:
        return gm
    for node in wanted[:1] if first else wanted:
        with gm.graph.inserting_before(node):
            for position in places:
                moved = gm.graph.call_method("contiguous", (node.args[position],), {"memory_format": torch.channels_last})
                moved.meta.update(node.meta, val=node.args[position].meta["val"])
                if use:
                    node.update_arg(position, moved)
    if back:
        for node in wanted:
            with gm.graph.inserting_after(node):
                turned = gm.graph.call_method("contiguous", (node,))
            turned.meta.update(node.meta)
            node.replace_all_uses_with(turned, lambda user, turned=turned: user is not turned)
    gm.recompile()
    return gm


def wrong_inputs_only(gm):
    return _move(gm, places=(0,))


def wrong_weights_only(gm):
    return _move(gm, places=(1,))


def wrong_first_only(gm):
    return _move(gm, first=True)


def wrong_any_convolution(gm):
    return _move(gm, any_conv=True)


def wrong_some_of_them(gm):
    return _move(gm, some=True)


def wrong_turned_back_each_time(gm):
    return _move(gm, back=True)


def wrong_asked_in_vain(gm):
    return _move(gm, use=False)


def right_backwards(gm):
    nodes = [n for n in gm.graph.nodes if n.target in CONVOLUTIONS and n.op == "call_function"]
    if not nodes or any(not _wants_channels_last(n) for n in nodes):
        return gm
    for node in reversed(nodes):
        with gm.graph.inserting_before(node):
            moved = [gm.graph.call_method("contiguous", (a,), {"memory_format": torch.channels_last}) for a in node.args[:2]]
        for new, old in zip(moved, node.args):
            new.meta.update(old.meta)
        node.args = (*moved, *node.args[2:])
    gm.recompile()
    return gm


SAME = [
    "- convolutions = [n for n in gm.graph.nodes if n.op == 'call_function' and n.target in CONVOLUTIONS]\n"
        '+ convolutions = [n for n in gm.graph.nodes if n.target in CONVOLUTIONS]',
    '- if not convolutions or not all(map(_wants_channels_last, convolutions)):\n'
        '+ if not all(map(_wants_channels_last, convolutions)):',
]
