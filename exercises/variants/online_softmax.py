from minicompile.ch09_triton.reductions import _full, _masked, _tile

wrong_not_rescaled = [("{s} * {e} + 1.0", "{s} + 1.0")]
wrong_from_zero = [("_full(r, float('-inf'), r.dtype)", "_full(r, 0.0, r.dtype)")]
wrong_beyond_the_end = [("_masked(r, _tile(r, r.dtype), float('-inf'), r.dtype)", "_masked(r, _tile(r, r.dtype), 0.0, r.dtype)")]
wrong_infinity_less_itself = [("tl.where({x} == {m}, 1.0, tl.exp(-tl.abs({x} - {m})))", "tl.exp(-tl.abs({x} - {m}))")]
wrong_always_rescaled = [("tl.where({x} > {m}, {s} * {e} + 1.0, {s} + {e})", "{s} * {e} + 1.0")]
wrong_lanes_not_joined = [("tl.sum({s} * tl.exp({m} - {n}_max), 1)", "tl.sum({s}, 1)")]
wrong_no_maximum = [("tl.exp(-tl.abs({x} - {m}))", "tl.exp({x})"), ("{s} * {e} + 1.0", "{s} + {e}"),
                    ("tl.exp({m} - {n}_max)", "tl.exp(-{n}_max)")]


def right_two_exponentials(r):
    n = r.name
    return ([f"{n}_m = {_full(r, float('-inf'), r.dtype)}", f"{n}_s = {_full(r, 0.0, r.dtype)}"],
            [f"{n}_x = {_masked(r, _tile(r, r.dtype), float('-inf'), r.dtype)}",
             f"{n}_new = tl.maximum({n}_m, {n}_x, propagate_nan=tl.PropagateNan.ALL)",
             f"{n}_old = tl.where({n}_m == {n}_new, {n}_s, {n}_s * tl.exp({n}_m - {n}_new))",
             f"{n}_s = {n}_old + tl.where({n}_x == {n}_new, 1.0, tl.exp({n}_x - {n}_new))", f"{n}_m = {n}_new"],
            [f"{n}_top = tl.reduce({n}_m, 1, nan_max)[:, None]", f"{n}_all = tl.sum({n}_s * tl.exp({n}_m - {n}_top), 1)[:, None]"],
            [f"{n}_top", f"{n}_all"])
