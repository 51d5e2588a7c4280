def wrong_forwards(graph):
    for node in list(graph.nodes):
        if node.op not in ("placeholder", "output") and not node.users and is_pure(node):
            graph.erase_node(node)


def wrong_tensors_too(graph):
    for node in reversed(list(graph.nodes)):
        if node.op not in ("placeholder", "output") and not node.users:
            graph.erase_node(node)


def wrong_inputs_too(graph):
    for node in reversed(list(graph.nodes)):
        if node.op != "output" and not node.users and is_pure(node):
            graph.erase_node(node)


def wrong_last_only(graph):
    for node in reversed(list(graph.nodes)):
        if node.op not in ("placeholder", "output") and not node.users and is_pure(node):
            graph.erase_node(node)
            return


def wrong_twice_forwards(graph):
    for node in 2 * list(graph.nodes):
        if node.op == "call_function" and not node.users and is_pure(node) and not node._erased:
            graph.erase_node(node)


def wrong_one_user(graph):
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and is_pure(node) and all(is_pure(user) for user in node.users):
            for user in list(node.users):
                graph.erase_node(user)
            graph.erase_node(node)


def wrong_nothing(graph):
    return graph


def right_until_nothing_changes(graph):
    while dead := [n for n in graph.nodes if n.op not in ("placeholder", "output") and is_pure(n) and not n.users]:
        for node in dead:
            graph.erase_node(node)


SAME = [
    "- if node.op != 'placeholder' and (not node.users) and (node.op != 'output') and is_pure(node):\n"
        "+ if node.op != 'placeholder' and (not node.users) and is_pure(node):",
]
