from torch import fx


def wrong_first_use(graph):
    seen, dead = set(), {}
    for node in graph.nodes:
        for used in node.all_input_nodes:
            if used not in seen:
                seen.add(used)
                dead.setdefault(node, []).append(used)
    return dead


def wrong_every_use(graph):
    return {node: list(node.all_input_nodes) for node in graph.nodes}


def wrong_arguments_not_inputs(graph):
    seen, dead = set(), {}
    for node in reversed(graph.nodes):
        last = [a for a in node.args if isinstance(a, fx.Node) and a not in seen]
        seen.update(last)
        if last:
            dead[node] = last
    return dead


def wrong_one_late(graph):
    nodes, dead = list(graph.nodes), {}
    last = {used: i for i, node in enumerate(nodes) for used in node.all_input_nodes}
    for value, i in last.items():
        dead.setdefault(nodes[min(i + 1, len(nodes) - 1)], []).append(value)
    return dead


def wrong_nothing_dies(graph):
    return {}


def wrong_inputs_live(graph):
    seen, dead = set(), {}
    for node in reversed(graph.nodes):
        for used in node.all_input_nodes:
            if used not in seen and used.op != "placeholder":
                seen.add(used)
                dead.setdefault(node, []).append(used)
    return dead


def right_forwards(graph):
    last = {used: node for node in graph.nodes for used in node.all_input_nodes}
    dead = {}
    for value, node in last.items():
        dead.setdefault(node, []).append(value)
    return dead
