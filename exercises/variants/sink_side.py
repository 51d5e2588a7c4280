def _search(net, sink, room, backwards=True, first=True):
    seen = {sink} if first else set()
    queue = [sink]
    for v in queue:
        for e in net.out[v]:
            if room(net, e) and net.head[e] not in seen:
                seen.add(net.head[e])
                queue.append(net.head[e])
    return seen


def wrong_forwards(net, sink):
    return _search(net, sink, lambda net, e: net.room[e])


def wrong_everything(net, sink):
    return _search(net, sink, lambda net, e: True)


def wrong_only_neighbours(net, sink):
    return {sink} | {net.head[e] for e in net.out[sink] if net.room[e ^ 1]}


def wrong_from_the_source(net, sink):
    seen = _search(net, 0, lambda net, e: net.room[e])
    return set(range(len(net.out))) - seen


def wrong_without_the_sink(net, sink):
    return _search(net, sink, lambda net, e: net.room[e ^ 1]) - {sink}


def right_recursive(net, sink):
    side = set()

    def visit(v):
        if v in side:
            return
        side.add(v)
        for e in range(len(net.head)):
            if net.head[e] == v and net.room[e]:
                visit(net.head[e ^ 1])
    visit(sink)
    return side
