from minicompile.ch02_guards.sources import path_of
from minicompile.ch03_capture.epilogue import source_text
from minicompile.ch03_capture.values import TensorVal
from minicompile.ch12_training.slots import autograd


def _forget(ep, *, users=True, outputs=True, names=True, through=True, erase=True, lines=True, inputs=True, once=False, unseen=True):
    tx, text, unread = ep.tx, [], []
    read = {s for value in ep.names for s in (path_of(value.source) if through else [value.source])} if names else set()
    for leaf in autograd(tx).gradients:
        old = autograd(tx).found.get(leaf)
        if old is None and leaf.source is not None and unseen and lines:
            text.append(f"{source_text(ep, leaf.source)}.grad = None")
        if type(old) is not TensorVal or users and old.node.users or outputs and old.node in ep.outputs or old.source in read:
            continue
        if once and old.node in unread:
            continue
        if lines:
            text.append(f"{source_text(ep, leaf.source)}.grad = None")
        if old.node not in unread:
            unread.append(old.node)
    if erase:
        for node in unread:
            if inputs:
                del tx.tensors.inputs[node]
            tx.graph.erase_node(node)
    return text


def wrong_nothing(ep):
    return []


def wrong_what_the_graph_reads(ep):
    return _forget(ep, users=False, erase=False)


def wrong_what_leaves(ep):
    return _forget(ep, names=False)


def wrong_what_is_reached_through_it(ep):
    return _forget(ep, through=False)


def wrong_inputs_stay(ep):
    return _forget(ep, erase=False)


def wrong_only_what_was_looked_at(ep):
    return _forget(ep, unseen=False)


def wrong_no_lines(ep):
    return _forget(ep, lines=False)


def wrong_one_line_for_two(ep):
    return _forget(ep, once=True)


def right_step_by_step(ep):
    return _forget(ep)


SAME = ["- for node in unread:\n+ for node in sorted(unread, key=str):"]
