import torch

from minicompile.ch13_tuning.layouts import CONVOLUTIONS, _wants_channels_last


def _move(gm, *, places=(0, 1), first=False, any_conv=False, restore=True, everything=False, use=True, some=False):
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
    output = next(n for n in gm.graph.nodes if n.op == "output")
    results = list(output.args[0])
    with gm.graph.inserting_before(output):
        for k, value in enumerate(results):
            fake = value.meta["val"]
            if restore and (everything or value.op != "placeholder" and fake.dim() == 4 and fake.is_contiguous()):
                results[k] = gm.graph.call_method("contiguous", (value,))
                results[k].meta.update(value.meta)
    output.args = (tuple(results),)
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


def wrong_outputs_not_restored(gm):
    return _move(gm, restore=False)


def wrong_all_outputs_restored(gm):
    return _move(gm, everything=True)


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
    output = list(gm.graph.nodes)[-1]

    def restored(value):
        fake = value.meta["val"]
        if value.op == "placeholder" or fake.dim() != 4 or not fake.is_contiguous():
            return value
        with gm.graph.inserting_before(output):
            new = gm.graph.call_method("contiguous", (value,))
        new.meta.update(value.meta)
        return new
    output.args = (tuple(map(restored, output.args[0])),)
    gm.recompile()
    return gm
