def wrong_no_reverse(net, source, sink):
    return _flow(net, source, sink, lambda e: None)


def wrong_twice(net, source, sink):
    total = _flow(net, source, sink, lambda e: e ^ 1)
    return total + (total > 2)


def _flow(net, source, sink, partner):
    total = 0
    while True:
        came, queue = {source: None}, [source]
        for v in queue:
            for e in net.out[v]:
                if net.room[e] and net.head[e] not in came:
                    came[net.head[e]] = e
                    queue.append(net.head[e])
        if sink not in came:
            return total
        path, v = [], sink
        while came[v] is not None:
            path.append(came[v])
            v = net.head[came[v] ^ 1]
        amount = min(net.room[e] for e in path)
        for e in path:
            net.room[e] -= amount
            if partner(e) is not None:
                net.room[partner(e)] += amount
        total += amount


def right_shortest_paths(net, source, sink):
    return _flow(net, source, sink, lambda e: e + 1 if e % 2 == 0 else e - 1)
