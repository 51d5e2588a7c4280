"""Canonical integer expressions: every simplification keeps the value, for all values of the symbols."""

import math
import re
from fractions import Fraction

import pytest
from hypothesis import assume, example, given, settings, strategies as st

from minicompile.ch01_graphs.symbolic import (Expr, Symbol, add, bounds, coefficient, count_atoms, evaluate, floordiv, mod, mul,
                                               provably_less, substitute, symbols, to_text)
from minicompile.errors import Unsupported

SIZES = {"i0": 8, "i1": 64, "i2": 3}
VARS = {n: Symbol(n, s) for n, s in SIZES.items()}
S0 = Symbol("s0", None, 2)


class Truncating(int):
    """An integer that divides as C++ and Triton do."""

    def __add__(self, other): return Truncating(int(self) + other)
    def __sub__(self, other): return Truncating(int(self) - other)
    def __mul__(self, other): return Truncating(int(self) * other)
    def __neg__(self): return Truncating(-int(self))
    def __truediv__(self, other): return Truncating(math.trunc(Fraction(int(self), int(other))))
    def __mod__(self, other): return self - (self / other) * other
    def __ge__(self, other): return Truncating(int(self) >= int(other))


def trees():
    leaves = st.one_of(st.integers(-70, 70), st.sampled_from([*VARS.values(), S0]).map(lambda s: s.expr))
    return st.recursive(leaves, lambda inner: st.tuples(st.sampled_from("+-*/%"), inner, inner), max_leaves=8)


def build(tree):
    """(expression, plain Python function of the symbol values)"""
    if not isinstance(tree, tuple):
        return tree, lambda v: evaluate(tree, v) if isinstance(tree, Expr) else tree
    op, left, right = tree
    (a, fa), (b, fb) = build(left), build(right)
    if op in "/%" and b == 0:
        b, fb = 7, lambda v: 7
    fn = {"+": add, "-": lambda x, y: add(x, mul(y, -1)), "*": mul, "/": floordiv, "%": mod}[op]
    py = {"+": lambda x, y: x + y, "-": lambda x, y: x - y, "*": lambda x, y: x * y, "/": lambda x, y: x // y,
          "%": lambda x, y: x % y}[op]
    return fn(a, b), lambda v: py(fa(v), fb(v))


values = st.fixed_dictionaries({**{n: st.integers(0, s - 1) for n, s in SIZES.items()}, "s0": st.integers(2, 50)})


@settings(max_examples=400, deadline=None)
@given(trees(), values)
@example(("%", S0.expr, -3), {"i0": 0, "i1": 0, "i2": 0, "s0": 5})
@example(("/", ("/", S0.expr, 2), -3), {"i0": 0, "i1": 0, "i2": 0, "s0": 2})
@example(("/", ("/", -1, S0.expr), ("+", 1, VARS["i0"].expr)), {"i0": 1, "i1": 0, "i2": 0, "s0": 2})
@example(("/", ("*", VARS["i0"].expr, ("/", -1, S0.expr)), 7), {"i0": 1, "i1": 0, "i2": 0, "s0": 2})
def test_simplification_keeps_the_value_bounds_and_text(tree, v):
    e, expected = build(tree)
    half = {VARS["i1"]: 5}
    try:
        want, in_part = expected(v), expected({**v, "i1": 5})
    except ZeroDivisionError:
        assume(False)
    assert evaluate(e, v) == want
    low, high = bounds(e)
    assert (low is None or low <= want) and (high is None or want <= high)
    assert eval(to_text(e), {}, dict(v)) == want
    assert eval(re.sub("[a-z]+[0-9]+|[0-9]+", r"T(\g<0>)", to_text(e, floordiv="/", truncates=True)), {"T": Truncating}, dict(v)) == want
    if isinstance(e, Expr):
        assert evaluate(substitute(e, half), v) == in_part


@settings(max_examples=200, deadline=None)
@given(trees(), trees(), values)
def test_equal_forms_and_provable_order(a, b, v):
    (x, fx), (y, fy) = build(a), build(b)
    try:
        left, right = fx(v), fy(v)
    except ZeroDivisionError:
        assume(False)
    if x == y:
        assert left == right
    if provably_less(x, y):
        assert left < right


def test_common_factors_cancel():
    i, s = VARS["i0"].expr, S0.expr
    assert floordiv(8 * s * i + 8 * s, 32 * s) == floordiv(i + 1, 4)
    assert floordiv(s * i + 2 * s, s * s) == floordiv(i + 2, s)
    assert floordiv(2 * i + 4, 6 * s) == floordiv(i + 2, 3 * s)


def test_rows_that_are_shifted_against_each_other():
    i, j, s = Symbol("i", 256).expr, Symbol("j", 513).expr, S0.expr
    assert (floordiv(770 * i + j, 769), mod(770 * i + j, 769)) == (i, i + j)
    assert (floordiv(-770 * i - j, 769), mod(-3 * i, 2)) == (floordiv(-1 * i - j, 769) - i, mod(-1 * i, 2))
    k = Symbol("k", s).expr
    assert floordiv(7 * s * i + k, 3 * s) == 2 * i + floordiv(s * i + k, 3 * s)


def test_flatten_and_unflatten_cancel():
    i, j = VARS["i0"].expr, VARS["i1"].expr
    flat = 64 * i + j
    assert (flat // 64, flat % 64) == (i, j)
    assert (flat // 8) // 8 == i
    s, x = S0.expr, i + j + S0.expr
    assert 3 * (x // 8) * 8 + 3 * (x % 8) + s == 3 * x + s and add(x % 8, 8 * s * (x // 8)) != x
    assert (x % s) * s + (x // s) * s * s == x * s and (x % (2 * s)) * i + 2 * (x // (2 * s)) * s * i == x * i
    inner = Symbol("k", S0.expr).expr
    symbolic = S0.expr * i + inner
    assert (symbolic // S0.expr, symbolic % S0.expr) == (i, inner)


def test_a_part_of_a_product_is_divided():
    i, s, t = VARS["i1"].expr, S0.expr, Symbol("s1", None, 1).expr
    j, k = Symbol("j", s).expr, Symbol("k", s * t).expr
    assert (floordiv(s * i + j, 8 * s), mod(s * i + j, 8 * s)) == (i // 8, s * (i % 8) + j)
    assert (floordiv(s * t * i + k, 8 * s * t), mod(s * t * i + k, 8 * s * t)) == (i // 8, s * t * (i % 8) + k)
    assert (floordiv(s * i + j, s * t), mod(s * i + j, s * t)) == (floordiv(i, t), s * mod(i, t) + j)
    assert floordiv(s * i + k, 8 * s) != i // 8 and floordiv(s * i + j, -1 * s * t) != floordiv(i, -1 * t)


def test_coefficient_is_the_stride_or_none():
    i, j = VARS["i0"].expr, VARS["i1"].expr
    assert coefficient(64 * i + j, VARS["i0"]) == 64
    assert coefficient(S0.expr * i + 3, VARS["i0"]) == S0.expr
    assert coefficient((3 * i + j) // 5, VARS["i0"]) is None
    assert symbols((i + j) // 5 + S0.expr) == {VARS["i0"], VARS["i1"], S0}


def test_numerators_that_can_be_negative_are_lifted_where_division_truncates():
    i, x = Symbol("i", 10).expr, Symbol("x", None, -1000).expr
    assert to_text(mod(9 - i, 5), truncates=True) == "(-i + 9) % 5"
    assert to_text(floordiv(9 - i, 5), floordiv="//", truncates=True) == "(-i + 9) // 5 - 1 + 1"
    assert to_text(floordiv(9 - i, 5), floordiv="/", truncates=True) == "((-i + 9) >= 5) - 1 + 1"       # no division
    assert to_text(mod(9 - i, 5), floordiv="/", truncates=True) == "(-i + 9) - 5*((-i + 9) >= 5)"
    assert to_text(mod(x, 7), truncates=True) == "(x + 1001) % 7"
    unknown = mul(x, x - 1)
    assert bounds(unknown)[0] is None and to_text(mod(unknown, 7), truncates=True).endswith("% 7 + 7) % 7")
    assert to_text(mod(S0.expr - Symbol("j", S0.expr).expr, 4), truncates=True) == "(-j + s0) % 4"


def test_indices_do_not_grow_without_end():
    """Each level holds the one below twice; after ten of them a division would take minutes to simplify."""
    index, seen = Symbol("i").expr, 0
    with pytest.raises(Unsupported, match="more than 1000 times"):
        for n in range(40):
            size = Symbol(f"s{n}", lower=2).expr
            index = index // size * 3 + index % size
            seen = count_atoms(index)
    assert 500 < seen <= 4000
