from minicompile.ch07_loops.builder import Builder
from minicompile.ch07_loops.lazy import NONE, emit_loop, footprint, linear, make_vars, present_order

wrong_order_of_the_result = [("make_vars(\"i\", kept_size, present_order(kept_size, strides[0]))", "make_vars(\"i\", kept_size)")]
wrong_order_of_the_reduction = [("order = [d for d in present_order(x.size, x.stride) if d in dims]", "order = sorted(dims)")]
wrong_fastest_first = [("order = [d for d in present_order(x.size, x.stride) if d in dims]",
                        "order = [d for d in present_order(x.size, x.stride) if d in dims][::-1]")]
wrong_one_result = [("in zip(names, strides, finish(b, elements, position)):",
                     "in [*zip(names, strides, finish(b, elements, position))][:1]:")]
wrong_position_in_memory = [("linear([index[d] for d in dims], contiguous_strides([x.size[d] for d in dims]))", "linear(index, x.stride)")]
wrong_position_in_order = [("linear([index[d] for d in dims], contiguous_strides([x.size[d] for d in dims]))", "0")]
wrong_contiguous_result = [("b.store(name, linear(out_index, stride), result)",
                            "b.store(name, linear(out_index, contiguous_strides(kept_size)), result)")]


def right_two_lists(g, xs, dims, finish, names, strides):
    x, b = xs[0], Builder()
    left = [d for d in range(len(x.size)) if d not in set(dims)]
    outer, out = make_vars("i", [x.size[d] for d in left], present_order([x.size[d] for d in left], strides[0]))
    memory = [d for d in present_order(x.size, x.stride) if d in set(dims)]
    inner, along = make_vars("r", [x.size[d] for d in memory])
    where = dict(zip(left, out)) | dict(zip(memory, along))
    index = tuple(where[d] for d in range(len(x.size)))
    values = [b.read(t, index) for t in xs]
    at, step = 0, 1
    for d in reversed(dims):
        at, step = linear([where[d]], [step], at), step * x.size[d]
    results = finish(b, values, at)
    for k, name in enumerate(names):
        b.store(name, linear(out, strides[k]), results[k])
    emit_loop(g, outer, inner, b, NONE.union(*(footprint(t)[0] for t in xs)))


SAME = [
    '- index: list = [0] * len(x.size)\n'
        '+ index: list = [1] * len(x.size)',
]
