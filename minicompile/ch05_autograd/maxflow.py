# %% [markdown]
# # Maximum flow
#
# A minimum cut tells which values to save; maximum flow finds it. This is Dinitz's algorithm: number the
# vertices by their distance from the source, push flow along edges that increase the distance until no more
# goes through, and repeat. Edges are stored in pairs, `e` and its reverse `e ^ 1`, so pushing flow is two
# additions.

# %%
from dataclasses import dataclass, field

INFINITE = 1 << 60


@dataclass
class Network:
    """`out[v]` lists edge numbers; edge `e` leads to `head[e]` with `room[e]` left."""

    out: list[list[int]] = field(default_factory=list)
    head: list[int] = field(default_factory=list)
    room: list[int] = field(default_factory=list)


# %% [markdown]
# An edge is two entries: one from `a` to `b` with its capacity as room, and one from `b` to `a` without room. To
# push flow over an edge takes room from it and gives as much to its reverse, over which a later path can take the
# flow back. `_distances` is a breadth-first search from the source over edges with room left. It ends with None
# when the sink cannot be reached any more, and then the flow is maximal.

# %%
def add_vertex(net: Network) -> int:
    net.out.append([])
    return len(net.out) - 1


def add_edge(net: Network, a: int, b: int, capacity: int) -> None:
    for tail, head, room in ((a, b, capacity), (b, a, 0)):
        net.out[tail].append(len(net.head))
        net.head.append(head)
        net.room.append(room)


def _distances(net: Network, source: int, sink: int) -> list[int] | None:
    distance = [-1] * len(net.out)
    distance[source] = 0
    queue = [source]
    for v in queue:
        for e in net.out[v]:
            w = net.head[e]
            if net.room[e] and distance[w] < 0:
                distance[w] = distance[v] + 1
                queue.append(w)
    return distance if distance[sink] >= 0 else None


# %% [markdown]
# One round of the outer loop has fixed distances. The inner loop walks from the source, at each vertex over the
# next edge that has room and leads one step further away (`following` remembers which edges of a vertex have been
# tried). At the sink it pushes as much as the narrowest edge of the path allows, and goes back to where the first
# edge became full. From a dead end it steps back and never tries that edge again in this round.

# %% tags=["exercise:flow-bug"]
def maximum_flow(net: Network, source: int, sink: int) -> int:
    """The value of the maximum flow. Saturates the network: `net.room` holds the residual capacities
    afterwards, where what flows along e has been moved to the room of e ^ 1. At most O(V^2 E); near linear on
    these graphs."""
    total = 0
    while (distance := _distances(net, source, sink)) is not None:
        following = [0] * len(net.out)
        path: list[int] = []
        v = source
        while True:
            if v == sink:
                pushed = min(net.room[e] for e in path)
                total += pushed
                for e in path:
                    net.room[e] -= pushed
                    net.room[e ^ 1] += pushed
                first = next(i for i, e in enumerate(path) if not net.room[e])
                v = net.head[path[first] ^ 1]
                del path[first:]
                continue
            edges = net.out[v]
            while following[v] < len(edges):
                e = edges[following[v]]
                if net.room[e] and distance[net.head[e]] == distance[v] + 1:
                    break
                following[v] += 1
            if following[v] < len(edges):
                path.append(edges[following[v]])
                v = net.head[edges[following[v]]]
            elif v == source:
                break
            else:
                v = net.head[path.pop() ^ 1]
                following[v] += 1
    return total


# %% [markdown]
# When the flow is maximal, the vertices fall into two sides. Whoever can still reach the sink over edges with room
# is on the sink's side. All edges that lead into this side are full, and they are the minimum cut. There may be
# several cuts of the same price, and this is the one nearest to the sink, that is, to backward.

# %% tags=["exercise:sink-side"]
def sink_side(net: Network, sink: int) -> set[int]:
    """The vertices that can still reach the sink (which is one of them): the minimum cut nearest to it.

    `net` is saturated: `net.room` holds residual capacities, of the edges e and of their reverses e ^ 1. A
    vertex reaches another over an edge that has room left."""
    seen = {sink}
    queue = [sink]
    for v in queue:
        for e in net.out[v]:
            if net.room[e ^ 1] and net.head[e] not in seen:
                seen.add(net.head[e])
                queue.append(net.head[e])
    return seen
