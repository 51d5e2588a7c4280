def wrong_all(cache):
    for entry in cache.entries:
        entry.next[0] = missed
    cache.publish(cache.entries[0].function if cache.entries else cache.tail)


def wrong_always_search(cache):
    for entry in cache.entries:
        entry.next[0] = lambda *args: search(cache, args)
    cache.publish(cache.entries[0].function if cache.entries else cache.tail)


def wrong_not_published(cache):
    for entry in cache.entries[1:]:
        entry.next[0] = missed
    cache.entries[0].next[0] = lambda *args: search(cache, args)


def right_one_by_one(cache):
    if not cache.entries:
        return cache.publish(cache.tail)
    head, *others = cache.entries
    head.next[0] = (lambda *args: search(cache, args)) if others else cache.tail
    for entry in others:
        entry.next[0] = missed
    cache.publish(head.function)


SAME = [
    '- for entry in entries[1:]:\n'
        '+ for entry in entries[:]:',
]
