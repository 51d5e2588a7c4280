from chapters.tiny import operands, part, to_save


def _halves(joint, *, choose=to_save, first=False, kept=True, everything=False, inputs_too=False):
    graph, k = joint.graph, len(joint.graph.inputs) - joint.tangents
    inputs, tangents = graph.inputs[:k], graph.inputs[k:]
    outputs, gradients = graph.outputs[:joint.outputs], graph.outputs[joint.outputs:]
    late = set(tangents)
    for n in graph.nodes:
        if late & set(operands(n)):
            late.add(n)
    forward = part(graph, inputs, [n for n in graph.nodes if n not in late]).nodes
    saved = forward if everything else choose(graph, forward)
    return (part(graph, inputs, outputs + saved if kept else outputs),
            part(graph, tangents + saved if first else saved + tangents, gradients))


def wrong_everything_saved(joint):
    return _halves(joint, everything=True)


def wrong_inputs_saved(joint):
    return _halves(joint, choose=lambda graph, forward: [n for n in forward if n in graph.inputs])


def wrong_tangents_first(joint):
    return _halves(joint, first=True)


def wrong_nothing_kept(joint):
    return _halves(joint, kept=False)


def wrong_products_saved(joint):
    return _halves(joint, choose=lambda graph, forward: [n for n in forward if n in graph.inputs or "mm" in n.name])


def wrong_one_graph(joint):
    k = len(joint.graph.inputs) - joint.tangents
    return (part(joint.graph, joint.graph.inputs[:k], joint.graph.outputs[:joint.outputs]),
            part(joint.graph, joint.graph.inputs, joint.graph.outputs[joint.outputs:]))


def right_from_the_inputs(joint):
    graph = joint.graph
    split = len(graph.inputs) - joint.tangents
    early = set(graph.inputs[:split])
    for n in graph.nodes:
        if n not in graph.inputs and all(x in early for x in operands(n)):
            early.add(n)
    saved = to_save(graph, [n for n in graph.nodes if n in early])
    forward = part(graph, graph.inputs[:split], [*graph.outputs[:joint.outputs], *saved])
    return forward, part(graph, [*saved, *graph.inputs[split:]], graph.outputs[joint.outputs:])
