from torch import fx


def _behind(gm, gradients, *, own=True, direct=False, every=False, first=0, inputs=False):
    behind, count = {}, first
    for node in gm.graph.nodes:
        behind[node] = set()
        if "tangent" in node.meta or inputs and node.op == "placeholder":
            behind[node] = {count} if own else set()
            count += 1
        for used in node.all_input_nodes[:1] if every else node.all_input_nodes:
            behind[node] |= behind[used] if not direct or used.op == "placeholder" else set()
    return [behind[g] if isinstance(g, fx.Node) else set() for g in gradients]


def wrong_direct_only(gm, gradients):
    return _behind(gm, gradients, direct=True)


def wrong_first_operand(gm, gradients):
    return _behind(gm, gradients, every=True)


def wrong_counted_from_one(gm, gradients):
    return _behind(gm, gradients, first=1)


def wrong_inputs_counted(gm, gradients):
    return _behind(gm, gradients, inputs=True)


def wrong_all(gm, gradients):
    count = sum("tangent" in n.meta for n in gm.graph.nodes)
    return [set(range(count)) for _ in gradients]


def wrong_none(gm, gradients):
    return [set() for _ in gradients]


def right_backwards(gm, gradients):
    tangents = [n for n in gm.graph.nodes if "tangent" in n.meta]

    def reaches(node):
        seen, pending = set(), [node]
        while pending:
            if (here := pending.pop()) not in seen:
                seen.add(here)
                pending += here.all_input_nodes
        return {k for k, t in enumerate(tangents) if t in seen}
    return [reaches(g) if isinstance(g, fx.Node) else set() for g in gradients]
