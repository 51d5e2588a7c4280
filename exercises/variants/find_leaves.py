from minicompile.ch01_graphs.graph import history_of
from minicompile.ch03_capture.tracer import unsupported


def _leaves(tx, outputs, *, all_of_them=False, outside=True, first=False, reverse=False, walk=False, one_way=False):
    nodes, found = history_of([o.fake for o in (outputs[:1] if first else outputs)]), []
    if one_way:
        nodes = []
        for node in (o.fake.grad_fn for o in outputs):
            while node is not None:
                nodes.append(node)
                node = node.next_functions[0][0] if node.next_functions else None
    for node in nodes:
        if outside and type(node).__name__ == "EnterBackward":
            unsupported(tx, "backward() into a tensor that was computed before the compiled function was called")
        if type(node).__name__ == "AccumulateGrad":
            found.append(id(node.variable))
    if all_of_them:
        return [v for v in tx.tensors.of_fake.values() if v.fake.requires_grad and v.fake.is_leaf]
    if walk:
        return [tx.tensors.of_fake[key] for key in sorted(found, key=lambda k: str(tx.tensors.of_fake[k].node))]
    leaves = [value for key, value in tx.tensors.of_fake.items() if key in found]
    return leaves[::-1] if reverse else leaves


def wrong_all_leaves(tx, outputs):
    return _leaves(tx, outputs, all_of_them=True)


def wrong_history_outside_is_ignored(tx, outputs):
    return _leaves(tx, outputs, outside=False)


def wrong_first_output(tx, outputs):
    return _leaves(tx, outputs, first=True)


def wrong_reversed(tx, outputs):
    return _leaves(tx, outputs, reverse=True)


def wrong_by_name(tx, outputs):
    return _leaves(tx, outputs, walk=True)


def wrong_first_operand_only(tx, outputs):
    return _leaves(tx, outputs, one_way=True)


def right_in_other_words(tx, outputs):
    return _leaves(tx, outputs)
