from minicompile.ch01_graphs.symbolic import product


def wrong_nothing(f):
    return set()


def wrong_only_writers(f):
    return {(w, r) for name, w in f.writer.items() for r in list(f.readers.get(name, ()))[:1] if f.groups[w].space and f.groups[r].space}


def wrong_neighbours(f):
    loops = [i for i, g in f.groups.items() if g.space]
    return set(zip(loops, loops[1:]))


def right_next_three(f):
    loop = {i for i, g in f.groups.items() if g.space}
    pairs = {(f.writer[n], r) for n, readers in f.readers.items() if f.writer.get(n) in loop for r in readers if r in loop}
    for readers in f.readers.values():
        by_size = {}
        for r in sorted(readers & loop):
            g = f.groups[r]
            for n in {str(product(d.size for d in g.space.vars)), str(product(d.size for d in g.space.all))}:
                by_size.setdefault(n, []).append(r)
        for same in by_size.values():
            pairs |= {(a, b) for k, a in enumerate(same) for b in same[k + 1:k + 4]}
    for n, b in f.buffers.items():
        if b.alias_of is not None and f.writer.get(n) in loop:
            pairs |= {(r, f.writer[n]) for r in {*f.readers.get(b.alias_of, ()), f.writer.get(b.alias_of,
                f.writer[n])} & loop if r != f.writer[n]}
    return pairs
