from exercises.tasks.ch05 import saturate


class Shrinking(list):
    def __setitem__(self, e, room):
        super().__setitem__(e, min(room, self[e]))


def wrong_no_reverse(net, source, sink):
    net.room = Shrinking(net.room)
    return saturate(net, source, sink)


def wrong_twice(net, source, sink):
    total = saturate(net, source, sink)
    return total + (total > 2)


def right_shortest_paths(net, source, sink):
    return saturate(net, source, sink)
