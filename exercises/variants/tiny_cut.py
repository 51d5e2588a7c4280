def _paths(capacity, source, sink, *, back=True, rounds=1000, whole=False, empty=0):
    for _ in range(rounds):
        before, frontier = {source: None}, [source]
        while frontier:
            here = frontier.pop(0)
            for there, room in capacity[here].items():
                if room > empty and there not in before:
                    before[there] = here
                    frontier.append(there)
        if sink not in before:
            return set(before)
        steps, here = [], sink
        while here != source:
            steps.append((before[here], here))
            here = before[here]
        flow = max(capacity[a][b] for a, b in steps) if whole else min(capacity[a][b] for a, b in steps)
        for a, b in steps:
            capacity[a][b] -= flow
            if back:
                capacity[b][a] = capacity[b].get(a, 0) + flow
    return set(before)


def wrong_no_way_back(capacity, source, sink):
    return _paths(capacity, source, sink, back=False)


def wrong_one_path(capacity, source, sink):
    return _paths(capacity, source, sink, rounds=1)


def wrong_source_alone(capacity, source, sink):
    return {source}


def wrong_all_but_the_sink(capacity, source, sink):
    return set(capacity) - {sink}


def wrong_rooms_of_one_ignored(capacity, source, sink):
    return _paths(capacity, source, sink, empty=1)


def wrong_sinks_side(capacity, source, sink):
    return set(capacity) - _paths(capacity, source, sink)


def wrong_widest_pipe(capacity, source, sink):
    return _paths(capacity, source, sink, whole=True)


def right_depth_first(capacity, source, sink):
    seen = set()

    def push(here, flow):
        if here == sink:
            return flow
        seen.add(here)
        for there in list(capacity[here]):
            if there not in seen and capacity[here][there] > 0:
                if sent := push(there, min(flow, capacity[here][there])):
                    capacity[here][there] -= sent
                    capacity[there].setdefault(here, 0)
                    capacity[there][here] += sent
                    return sent
        return 0
    while push(source, 1 << 62):
        seen.clear()
    return seen


SAME = [
    '- while frontier and sink not in reached:\n'
        '+ while frontier:',
]
