from functools import partial

from minicompile.ch08_fusion.dependencies import nbytes


def _score(f, a, b, flows, common, *, alone=2, shared=1, half=2, outside=True, both=True, size=nbytes):
    total = 0
    for n in flows:
        others = f.readers[n] - set(b.members) if outside else ()
        total += size(f.buffers[n]) * (shared if others else alone)
    for n in common if both else ():
        total += size(f.buffers[n]) if not a.reads[n].isdisjoint(b.reads[n]) else size(f.buffers[n]) // half
    return total


wrong_flows_once = partial(_score, alone=1)
wrong_flows_always_twice = partial(_score, outside=False)
wrong_ignores_common = partial(_score, both=False)
wrong_common_always_full = partial(_score, half=1)
wrong_elements_not_bytes = partial(_score, size=lambda b: nbytes(b) // b.dtype.itemsize)


def wrong_readers_of_a(f, a, b, flows, common):
    return _score(f, a, a, flows, []) + _score(f, a, b, [], common)


def wrong_counts_buffers(f, a, b, flows, common):
    return 2 * len(flows) + len(common)


def wrong_what_flows_is_not_common(f, a, b, flows, common):
    return _score(f, a, b, flows, [n for n in common if n not in flows])


def right_in_two_sums(f, a, b, flows, common):
    saved = [(2 - any(r not in b.members for r in f.readers[n])) * nbytes(f.buffers[n]) for n in flows]
    return sum(saved) + sum(nbytes(f.buffers[n]) >> (not a.reads[n] & b.reads[n]) for n in common)
