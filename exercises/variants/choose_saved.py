from torch import fx

from minicompile.ch05_autograd.maxflow import INFINITE, Network, add_edge, add_vertex, maximum_flow, sink_side
from minicompile.ch05_autograd.partition import (forward_use, is_checkpointed, is_fusible, leaves_region, must_not_recompute, price, stages,
                                                 with_ancestors)


def _needed(joint, halves):
    nodes = [n for n in joint.gm.graph.nodes if n.op != "output" and n not in halves.backward]
    consumed = {n for n in nodes if any(u in halves.backward for u in n.users)}
    return nodes, consumed | {g for g in halves.gradients if isinstance(g, fx.Node) and g not in halves.backward}


def _cut(joint, halves, *, barrier=True, halve=True, checkpoints=True, nearest=True, uniform=False, roots=True):
    nodes, consumed = _needed(joint, halves)
    stage, wanted = stages(nodes, halves), with_ancestors(consumed)
    net = Network()
    source, sink = add_vertex(net), add_vertex(net)
    inner = {}
    for node in nodes:
        if node not in wanted:
            continue
        enter, leave = inner[node] = add_vertex(net), add_vertex(net)
        use = forward_use(node, halves, stage)
        written = halve and (use.library or use.far or use.output or not is_fusible(node))
        repeated = checkpoints and is_checkpointed(node) and not leaves_region(node, halves)
        cost = price(node, joint, written)
        add_edge(net, enter, leave, INFINITE if repeated else min(cost, 1) if uniform else cost)
        if node.op == "placeholder" and roots or barrier and must_not_recompute(node, halves, use):
            add_edge(net, source, enter, INFINITE)
        for argument in node.all_input_nodes:
            add_edge(net, inner[argument][1], enter, INFINITE)
        if node in consumed:
            add_edge(net, leave, sink, INFINITE)
    maximum_flow(net, source, sink)
    if nearest:
        behind = sink_side(net, sink)
    else:
        reached, queue = {source}, [source]
        for v in queue:
            for e in net.out[v]:
                if net.room[e] and net.head[e] not in reached:
                    reached.add(net.head[e])
                    queue.append(net.head[e])
        behind = set(range(len(net.out))) - reached
    return [n for n, (enter, leave) in inner.items() if leave in behind and enter not in behind]


def wrong_all_that_backward_reads(joint, halves):
    nodes, consumed = _needed(joint, halves)
    return [n for n in nodes if n in consumed]


def wrong_only_inputs(joint, halves):
    nodes, consumed = _needed(joint, halves)
    wanted = with_ancestors(consumed)
    return [n for n in nodes if n.op == "placeholder" and n in wanted]


def wrong_everything_is_recomputed(joint, halves):
    return _cut(joint, halves, barrier=False)


def wrong_prefers_speed(joint, halves):
    return _cut(joint, halves, "speed")


def wrong_equal_prices(joint, halves):
    return _cut(joint, halves, uniform=True)


def wrong_writes_are_free(joint, halves):
    return _cut(joint, halves, halve=False)


def wrong_saves_in_checkpoints(joint, halves):
    return _cut(joint, halves, checkpoints=False)


def wrong_nearest_to_the_inputs(joint, halves):
    return _cut(joint, halves, nearest=False)


def right_two_passes(joint, halves, prices=None):
    nodes, consumed = _needed(joint, halves)
    wanted = [n for n in nodes if n in with_ancestors(consumed)]
    stage, net = stages(nodes, halves), Network()
    vertex = {(n, side): add_vertex(net) for n in wanted for side in ("in", "out")}
    source, sink = add_vertex(net), add_vertex(net)
    for n in wanted:
        use = forward_use(n, halves, stage)
        fixed = n.op == "placeholder" or must_not_recompute(n, halves, use)
        hidden = is_checkpointed(n) and not leaves_region(n, halves)
        memory = use.library or use.far or use.output or not is_fusible(n)
        add_edge(net, vertex[n, "in"], vertex[n, "out"], INFINITE if hidden else (prices or price)(n, joint, memory))
        if fixed:
            add_edge(net, source, vertex[n, "in"], INFINITE)
        if n in consumed:
            add_edge(net, vertex[n, "out"], sink, INFINITE)
    for n in wanted:
        for a in n.all_input_nodes:
            add_edge(net, vertex[a, "out"], vertex[n, "in"], INFINITE)
    if maximum_flow(net, source, sink) >= INFINITE:
        raise AssertionError("no cut")
    side = sink_side(net, sink)
    return [n for n in wanted if vertex[n, "out"] in side and vertex[n, "in"] not in side]


wrong_a_gradient_made_in_forward_is_not_needed = [
    (""" | \\
        {g for g in halves.gradients if isinstance(g, fx.Node) and g not in halves.backward}""", "")]


# What backward does not need has no way to the sink, and so no part in the cut; the readers of a library call are in a later stage than
# it; a placeholder is not cheap.
SAME = [
    "- nodes = [n for n in joint.gm.graph.nodes if n.op != 'output' and n not in halves.backward]\n"
        "+ nodes = [n for n in joint.gm.graph.nodes if n not in halves.backward]",
    "- consumed = {n for n in nodes if any((u in halves.backward for u in n.users))} | {g for g in halves.gradients "
        "if isinstance(g, fx.Node) and g not in halves.backward}\n"
        "+ consumed = {n for n in nodes if any((u in halves.backward for u in n.users))} | {g for g in halves.gradients "
        "if isinstance(g, fx.Node)}",
    "- if node not in wanted:\n- continue\n"
        "+ if True:\n+ pass",
    "- continue\n"
        "+ pass",
    "- written = use.library or use.far or use.output or (not is_fusible(node))\n"
        "+ written = use.library or use.far or use.output",
    "- if node.op == 'placeholder' or must_not_recompute(node, halves, use):\n"
        "+ if must_not_recompute(node, halves, use):",
]
