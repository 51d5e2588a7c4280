# %% [markdown]
# # Symbolic integers
#
# Two places in a compiler need arithmetic on integers it does not know yet. Tensor *sizes* may differ from
# call to call, and memory *indices* depend on loop variables. Both want the same small algebra: sums,
# products, floor division and remainder over named, non-negative integers. torch.compile uses sympy here, and
# profiles of its compile time show it. The forms that occur are few, so we write them down: an expression is
# a Python `int`, or an `Expr` kept in one canonical form, so that equal expressions compare equal and most
# questions ("is this index contiguous?") are structural.
#
# The canonical form is a *linear combination*: a constant plus integer coefficients times terms, where a term
# is a product of atoms, and an atom is a symbol, a floor division or a remainder. For example `64*i0 + i1` is
# `Expr({(i0,): 64, (i1,): 1}, 0)`.

# %%
import functools
import itertools
import math
from dataclasses import dataclass
from typing import Callable, Iterable, Union

import torch

from ..errors import Unsupported

# %% [markdown]
# ## Atoms
#
# A `Symbol` is an unknown integer in `[lower, size)`. Loop variables have `lower == 0` and a size that is an
# int or itself an expression. Size symbols (`s0`) have no upper bound and `lower == 2`: sizes 0 and 1 behave
# differently under broadcasting, so a compiled artefact never pretends that they are general.
#
# The other two kinds of atoms are what is left when a division does not come out even. Their operands are
# expressions, so they nest.

# %%
@dataclass(frozen=True, eq=False)
class Symbol:
    """An integer unknown with `lower <= value < size`; `size` None means unbounded. Identity is the name.
    `real`: a float that a kernel takes as an argument; it occurs in no arithmetic. `hint`: the value in the
    call that was traced, for decisions that may be wrong."""

    name: str
    size: "int | Expr | None" = None
    lower: int = 0
    real: bool = False
    hint: int = 64

    def __post_init__(self):
        object.__setattr__(self, "_hash", hash(self.name))

    def __hash__(self):
        return self._hash

    def __eq__(self, other):
        return isinstance(other, Symbol) and other.name == self.name

    def __repr__(self):
        return self.name

    @property
    def expr(self) -> "Expr":
        return Expr({(self,): 1}, 0)


@dataclass(frozen=True, repr=False)
class Division:
    """A part of `numerator / divisor`, which does not come out even."""

    numerator: "Expr"
    divisor: "int | Expr"

    @functools.cached_property
    def text(self):                     # kept: the terms of what surrounds it are sorted by it, at every level again
        return f"({self.numerator}){self.sign}({self.divisor})"

    @functools.cached_property
    def atoms(self) -> int:
        return count_atoms(self.numerator) + count_atoms(self.divisor)

    def __repr__(self):
        return self.text


class FloorDiv(Division):
    """`numerator // divisor`, rounding toward minus infinity as Python does."""
    sign = "//"


class Mod(Division):
    """`numerator % divisor`, with the sign of the divisor as in Python."""
    sign = "%"


Atom = Union[Symbol, FloorDiv, Mod]
Int = Union[int, "Expr"]


def count_atoms(e: "Int") -> int:
    """How many symbols the text of a size has."""
    return 0 if isinstance(e, int) else sum(1 if isinstance(a, Symbol) else a.atoms for term in e.terms for a in term)


def _atom_key(atom: Atom):
    return atom.name if isinstance(atom, Symbol) else atom.text

# %% [markdown]
# ## Expressions
#
# Operators build the canonical form and return a plain `int` as soon as nothing symbolic is left, so code
# that handles static shapes pays nothing for the generality.
#
# `terms` is a dictionary from a product, which is a sorted tuple of atoms, to its coefficient. The empty
# product does not occur; its coefficient is `const`. Adding two expressions adds coefficients with equal keys
# and drops those that became 0, so two expressions that are equal as polynomials have equal dictionaries. A quotient and a
# remainder that make up their numerator, `8*(x // 8) + x % 8` or `(x // s0)*s0*s1 + (x % s0)*s1`, become it again. The
# operators of Python call the functions below, which also accept plain integers.

# %%
class Expr:
    """A constant plus integer multiples of products of atoms, immutable and hashable."""

    __slots__ = ("terms", "const", "_hash")
    free_symbols = frozenset()             # of PyTorch's own kind; meta kernels look for sizes that are data

    def __init__(self, terms: dict[tuple[Atom, ...], int], const: int):
        self.terms, self.const = terms, const
        self._hash = hash((frozenset(terms.items()), const))

    def __hash__(self):
        return self._hash

    def __eq__(self, other):
        return isinstance(other, Expr) and self._hash == other._hash and \
            self.const == other.const and self.terms == other.terms

    def __repr__(self):
        return to_text(self)

    def __add__(self, other): return add(self, other)
    __radd__ = __add__
    def __sub__(self, other): return add(self, mul(other, -1))
    def __rsub__(self, other): return add(other, mul(self, -1))
    def __mul__(self, other): return mul(self, other)
    __rmul__ = __mul__
    def __neg__(self): return mul(self, -1)
    def __floordiv__(self, other): return floordiv(self, other)
    def __rfloordiv__(self, other): return floordiv(other, self)
    def __mod__(self, other): return mod(self, other)
    def __rmod__(self, other): return mod(other, self)


def _make(terms: dict, const: int) -> Int:
    terms = {t: c for t, c in terms.items() if c}
    for term, c in terms.items():
        for rest in term:
            if isinstance(rest, Mod) and len(divisor := _terms(rest.divisor)) == 1:
                ((atoms, n),), others = divisor, _without(term, [rest])
                quotient = tuple(sorted((*others, FloorDiv(rest.numerator, rest.divisor), *atoms), key=_atom_key))
                if terms.get(quotient) == c * n:
                    left = {t: k for t, k in terms.items() if t not in (term, quotient)}
                    return add(_make(left, const), mul(_of_terms({others: c}), rest.numerator))
    return Expr(terms, const) if terms else const


def as_expr(x: "Int | Symbol") -> Int:
    """An `int` or `Expr` from an int, Expr or Symbol."""
    return x.expr if isinstance(x, Symbol) else x


def add(a: Int, b: Int) -> Int:
    if type(a) is int and type(b) is int:                # most are
        return a + b
    a, b = as_expr(a), as_expr(b)
    if isinstance(a, int):
        a, b = b, a
    if isinstance(b, int):
        return a + b if isinstance(a, int) else Expr(a.terms, a.const + b) if b else a
    terms = dict(a.terms)
    for t, c in b.terms.items():
        terms[t] = terms.get(t, 0) + c
    return _make(terms, a.const + b.const)


def mul(a: Int, b: Int) -> Int:
    if type(a) is int and type(b) is int:
        return a * b
    a, b = as_expr(a), as_expr(b)
    if isinstance(a, int):
        a, b = b, a
    if isinstance(b, int):
        if isinstance(a, int) or b == 0:
            return a * b if b else 0
        return a if b == 1 else Expr({t: c * b for t, c in a.terms.items()}, a.const * b)       # as canonical as `a` is
    terms: dict = {}
    for ta, ca in _terms(a):
        for tb, cb in _terms(b):
            t = tuple(sorted(ta + tb, key=_atom_key))
            terms[t] = terms.get(t, 0) + ca * cb
    return _of_terms(terms)

# %% [markdown]
# ## Bounds and division
#
# `(64*i0 + i1) // 64` should become `i0`, and `% 64` should become `i1`: flattening and unflattening a tensor
# must cancel, or every view would leave divisions in the generated kernels. Two facts do it. Multiples of the
# divisor leave the division exactly: `(n*a + b) // n == a + b // n` for all integers. What remains vanishes
# when its bounds say `0 <= b < n`. With a symbolic `n` we ask whether `n - 1 - b` has a non-negative lower
# bound after putting each loop variable at its largest value.
#
# The functions below come in this order. `bounds` adds up the bounds of the terms, where a negative
# coefficient exchanges the lower and the upper one. `_maximised` replaces each loop variable by its largest
# value, and keeps sizes as they are, so that `i0 < s0` can be proved although nobody knows `s0`.
# `_divide_terms` takes multiples of the divisor out of a sum. `_without_common_factor` shortens a fraction.
# `floordiv` and `mod` try these in turn, from cheap to expensive, and only then make a new atom.

# %%
def symbols(e: Int) -> set[Symbol]:
    """All symbols in an expression, those inside divisions and those of loop sizes excluded."""
    e = as_expr(e)
    if isinstance(e, int):
        return set()
    found: set[Symbol] = set()
    for term in e.terms:
        for atom in term:
            if isinstance(atom, Symbol):
                found.add(atom)
            else:
                found |= symbols(atom.numerator) | symbols(atom.divisor)
    return found


# %% [markdown]
# The bounds of an expression come from those of its *atoms*, the things that are multiplied in its terms. A symbol
# knows its own. A division is bounded by the bounds of what is divided, as long as the divisor is positive. A
# remainder lies between 0 and the divisor less one, and below the dividend if that is not negative.

# %% tags=["exercise:bounds"]
def _atom_bounds(atom: Atom) -> tuple[int | None, int | None]:
    if isinstance(atom, Symbol):
        if atom.size is None:
            return atom.lower, None
        if isinstance(atom.size, int):
            return atom.lower, max(atom.size - 1, atom.lower)
        upper = bounds(atom.size)[1]
        return atom.lower, None if upper is None else upper - 1
    low, high = bounds(atom.numerator)
    dlow, dhigh = bounds(atom.divisor)
    if dlow is None or dlow <= 0:
        return None, None
    if isinstance(atom, FloorDiv):
        lower = low if low is None else low // dlow if low < 0 else 0 if dhigh is None else low // dhigh
        return lower, None if high is None else max(high, 0) // dlow
    upper = None if dhigh is None else dhigh - 1
    if low is not None and low >= 0 and high is not None:
        upper = high if upper is None else min(upper, high)
    return 0, upper


def bounds(e: Int) -> tuple[int | None, int | None]:
    """Inclusive (lower, upper) bounds; None where unknown."""
    e = as_expr(e)
    if isinstance(e, int):
        return e, e
    low: int | None = e.const
    high: int | None = e.const
    for term, c in e.terms.items():
        tlow, thigh = 1, 1
        for atom in term:
            alow, ahigh = _atom_bounds(atom)
            if len(term) == 1:
                tlow, thigh = alow, ahigh
            elif alow is None or alow < 0 or tlow is None:
                tlow, thigh = None, None
                break
            else:
                tlow = tlow * alow
                thigh = None if ahigh is None or thigh is None else thigh * ahigh
        if c < 0:
            tlow, thigh = thigh, tlow
        low = None if low is None or tlow is None else low + c * tlow
        high = None if high is None or thigh is None else high + c * thigh
    return low, high


# %% [markdown]
# Numbers are not enough for a loop over `s0` rows: the largest value of `i0` is `s0 - 1`, which no number bounds.
# So `provably_less` works on expressions. It puts each loop variable of `a` at its largest value, subtracts that
# from `b`, and asks whether the difference, in which sizes may cancel now, has a lower bound above zero. For `i0 <
# s0` the difference is `s0 - (s0 - 1)`, which is 1. A False means "not proved", and never "not true".

# %%
def _maximised(e: Int) -> Int:
    """An upper bound that keeps size symbols: loop variables with positive coefficients go to size - 1. A product
    grows with each of its factors where none is negative; another stays as it is."""
    if isinstance(e, int):
        return e
    out: Int = e.const
    for term, c in e.terms.items():
        value: Int = c
        grows = len(term) == 1 or all((low := _atom_bounds(atom)[0]) is not None and low >= 0 for atom in term)
        for atom in term:
            if grows and isinstance(atom, Symbol) and atom.size is not None:
                value = mul(value, atom.size - 1 if c > 0 else atom.lower)
            else:
                value = mul(value, Expr({(atom,): 1}, 0))
        out = add(out, value)
    return out


def provably_less(a: Int, b: Int) -> bool:
    """True when `a < b` for every value of the symbols; False means unknown."""
    low = bounds(add(b, mul(_maximised(as_expr(a)), -1)))[0]
    return low is not None and low > 0


def provably_nonnegative(a: Int) -> bool:
    low = bounds(a)[0]
    return low is not None and low >= 0 or provably_less(mul(a, -1), 1)


# %% [markdown]
# `_divide_terms` is the first fact of the text above. By a number, as much of each term goes to the quotient as is a multiple, and what
# remains of its coefficient to the rest: `(770*i + j) // 769` is `i + (i + j) // 769`, and where `i + j` is smaller than 769, `i`.
# (Programs that shift the rows of a matrix against each other by padding and another shape ask for this.) By a product such as `4*s0`,
# this is done with the terms that contain the product's atoms, each as often. A divisor that is a sum is only recognised if it is
# the dividend.
#
# Shifting the other way gives `(769*i + j) // 770`. Nothing can be taken out, but with one multiple more than there is, it is
# `i + (j - i) // 770`, and that quotient is 0 or -1. Such a division is worth having: processors have no instruction that divides
# several integers at once, and instead of dividing one can compare (`to_text`). `_brought_near` asks whether it is so.

# %%
def _divide_terms(a: Expr, b: Int, nearest: bool = False) -> tuple[Int, Int]:
    """Split `a` into (q, r) with a == q*b + r, taking out of `a` what can be divided. Coefficients keep their sign, or (`nearest`)
    become as small as possible."""
    if not isinstance(b, int) and (len(b.terms) > 1 or b.const):
        return (1, 0) if a == b else (0, a)
    (divisor, number), = [((), b)] if isinstance(b, int) else b.terms.items()
    quotient, rest = {}, {}
    for t, c in a.terms.items():
        left = list(t)
        if all(atom in left and left.remove(atom) is None for atom in divisor):
            sign = 1 if c * number > 0 else -1
            quotient[tuple(left)] = sign * ((abs(c) + (abs(number) // 2 if nearest else 0)) // abs(number))
            c -= quotient[tuple(left)] * number
        rest[t] = c
    q, r = divmod(a.const, b) if isinstance(b, int) else (quotient.pop((), 0), a.const)
    return _make(quotient, q), _make(rest, r)


def _brought_near(a: Expr, b: Int) -> tuple[Int, Int] | None:
    """`a` split in the second way, if `r // b` is then known to be one of two numbers that follow each other."""
    if isinstance(b, int):
        quotient, rest = _divide_terms(a, b, nearest=True)
        low, high = bounds(rest)
        if None not in (low, high) and high // b - low // b < 2:
            return quotient, rest
    return None


# %% [markdown]
# Where sizes vary, a divisor is often a product of which the dividend has a part. With a row `i` and an element `j` of it,
# `(s0*i + j) // (8*s0)` is `i // 8`, and the remainder `(i % 8)*s0 + j`: for `0 <= r < g` and a positive `f`, `(q*g + r) // (f*g)` is
# `q // f`. (An instance norm, whose rows are the channels of each image, has such an index, and each of its elements cost nine divisions.)

# %%
def _by_parts(a: Expr, b: Int) -> tuple[Int, Int, Int, Int] | None:
    """(q, f, g, r) with a == q*g + r, b == f*g, 0 <= r < g, and f > 0; None if no such factor of `b` is found."""
    if isinstance(b, int) or len(b.terms) > 1 or b.const:
        return None
    (atoms, number), = b.terms.items()
    for count in range(len(atoms)):
        for taken in dict.fromkeys(itertools.combinations(atoms, count)):
            inner = _of_terms({_without(atoms, taken): 1})
            factor = _of_terms({taken: number})
            if factor == 1 or (low := bounds(factor)[0]) is None or low <= 0:
                continue
            outer, rest = _divide_terms(a, inner)
            if provably_nonnegative(rest) and provably_less(rest, inner):
                return outer, factor, inner, rest
    return None


# %% [markdown]
# If nothing leaves the division, numerator and divisor may still have a factor in common: `(8*s0*s1 + 4*s0) //
# (4*s0)` is `2*s1 + 1`. The factor is the greatest common divisor of all coefficients, times the atoms that occur
# in every term. The small functions behind it take an expression into a list of terms and back.

# %%
def _without_common_factor(a: Int, b: Int) -> list[Int]:
    """a and b, divided by what divides all of their terms: 8*s0*s1 + 4*s0 and 4*s0 become 2*s1 + 1 and 1."""
    both = _terms(a), _terms(b)
    number, common = math.gcd(*[c for terms in both for _, c in terms]), list(both[1][0][0])
    for term in [t for terms in both for t, _ in terms]:
        left = list(term)
        common = [atom for atom in common if atom in left and left.remove(atom) is None]
    if number == 1 and not common:
        return [a, b]
    return [_of_terms((_without(t, common), c // number) for t, c in terms) for terms in both]


def _terms(e: Int) -> list:
    """[(product of atoms, its number)], the constant last with an empty product."""
    return [((), e)] if isinstance(e, int) else [*e.terms.items(), *([((), e.const)] if e.const else [])]


def _of_terms(terms) -> Int:
    terms = dict(terms)
    const = terms.pop((), 0)
    return _make(terms, const)


def _without(term: tuple, atoms: list) -> tuple:
    left = list(term)
    for atom in atoms:
        left.remove(atom)
    return tuple(left)


# %% [markdown]
# Now the two divisions. Both go from cheap to expensive: numbers, dividing by one, a constant that is smaller than
# the divisor, then the two facts, then shortening the fraction. `floordiv` knows one rule more, `(x // a) // b ==
# x // (a*b)` for a positive `b`. A quotient that none of this removes becomes an atom, and is treated like a symbol from then on.
# `mod` is parallel, with what remains in the place of what leaves. (A shortened remainder has to be multiplied by
# the factor again.)

# %%
def floordiv(a: Int, b: Int) -> Int:
    a, b = as_expr(a), as_expr(b)
    if isinstance(a, int) and isinstance(b, int):
        return a // b
    if b == 1 or a == 0:
        return a
    if isinstance(a, int):
        return 0 if a >= 0 and provably_less(a, b) else _division(FloorDiv, Expr({}, a), b)
    quotient, rest = _divide_terms(a, b)
    if provably_nonnegative(rest) and provably_less(rest, b):
        return quotient
    if (parts := _by_parts(a, b)) is not None:
        return floordiv(parts[0], parts[1])
    quotient, rest = _brought_near(a, b) or (quotient, rest)
    if isinstance(rest, int):
        return add(quotient, floordiv(rest, b))
    smaller, divisor = _without_common_factor(rest, b)
    if divisor != b:
        return add(quotient, floordiv(smaller, divisor))
    if isinstance(b, int) and b > 0 and len(rest.terms) == 1 and rest.const == 0:
        (term, c), = rest.terms.items()
        if c == 1 and len(term) == 1 and isinstance(inner := term[0], FloorDiv) and isinstance(inner.divisor, int):
            return add(quotient, floordiv(inner.numerator, inner.divisor * b))
    return add(quotient, _division(FloorDiv, rest, b))


def mod(a: Int, b: Int) -> Int:
    a, b = as_expr(a), as_expr(b)
    if isinstance(a, int) and isinstance(b, int):
        return a % b
    if b == 1 or a == 0:
        return 0
    if isinstance(a, int):
        return a if a >= 0 and provably_less(a, b) else _division(Mod, Expr({}, a), b)
    _, rest = _divide_terms(a, b)
    if provably_nonnegative(rest) and provably_less(rest, b):
        return rest
    if (parts := _by_parts(a, b)) is not None:
        outer, factor, inner, rest = parts
        return add(mul(mod(outer, factor), inner), rest)
    _, rest = _brought_near(a, b) or (_, rest)
    if isinstance(rest, int):
        return mod(rest, b)
    if isinstance(b, int):
        smaller, divisor = _without_common_factor(rest, b)
        if divisor != b:
            return mul(mod(smaller, divisor), b // divisor)
    return _division(Mod, rest, b)


MOST_ATOMS = 1000


def _division(kind, numerator: Expr, divisor: Int) -> Expr:
    """A division that does not come out even. Each level of a view of a view whose sizes vary may hold the one below
    several times; what would take minutes to simplify is left to the stages that need no index."""
    atom = kind(numerator, divisor)
    if atom.atoms > MOST_ATOMS:
        raise Unsupported(f"an index in which sizes that vary occur more than {MOST_ATOMS} times")
    return Expr({(atom,): 1}, 0)

# %% [markdown]
# ## Substitution, evaluation, text
#
# Putting expressions in the place of symbols and putting numbers in their place is the same computation: do
# the arithmetic of the expression again, with other operands. Python's operators choose what happens. Ints
# give an int, SymInts a SymInt, and expressions an expression, simplified on the way.
#
# `coefficient` answers the most frequent question of the later chapters: by how much does an address grow
# when this variable grows by one? It has an answer only where the expression is linear in the variable.

# %%
def _computed(e: Int, value_of: Callable[[Symbol], object]):
    """The arithmetic of `e`, done on `value_of(symbol)`."""
    if not isinstance(e, Expr):
        return e
    total = e.const
    for term, c in e.terms.items():
        value = c
        for atom in term:
            if isinstance(atom, Symbol):
                value = value * value_of(atom)
            elif isinstance(atom, FloorDiv):
                value = value * (_computed(atom.numerator, value_of) // _computed(atom.divisor, value_of))
            else:
                value = value * (_computed(atom.numerator, value_of) % _computed(atom.divisor, value_of))
        total = total + value
    return total


def evaluate(e: "Int | Symbol", values: dict[str, int]):
    """The value of `e` given each symbol's value by name: an int, or a SymInt."""
    return _computed(as_expr(e), lambda symbol: values[symbol.name])


def present(x):
    """The value of a size or a SymInt, SymFloat or SymBool in the call that was traced, without a guard, for decisions that may
    be wrong; anything else as it is."""
    if isinstance(x, Expr):
        return _computed(x, lambda symbol: symbol.hint)
    return x.node.hint if isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool)) else x


def substitute(e: "Int | Symbol", mapping: "dict[Symbol, Int | Symbol]") -> Int:
    """Replace symbols by expressions and simplify again."""
    return _computed(as_expr(e), lambda symbol: as_expr(mapping.get(symbol, symbol)))


def coefficient(e: Int, symbol: Symbol) -> Int | None:
    """The stride of `symbol` in `e`: its coefficient if `e` is linear in it, None if it occurs otherwise."""
    e = as_expr(e)
    if isinstance(e, int):
        return 0
    out: Int = 0
    for term, c in e.terms.items():
        plain = [a for a in term if a == symbol]
        inside = any(symbol in symbols(a.numerator) | symbols(a.divisor)
                     for a in term if not isinstance(a, Symbol))
        if inside or len(plain) > 1:
            return None
        if plain:
            rest = tuple(a for a in term if a != symbol)
            out = add(out, Expr({rest: c}, 0) if rest else c)
    return out


# %% [markdown]
# Python's division rounds down, that of C++ and Triton toward zero: `-1 // 5` is -1 in the one and 0 in the other, and
# `-1 % 5` is 4 or -1. Numerators can be negative although no index is: flipping a repeated dimension reads element
# `(9 - i) % 5`, whose canonical form is `(4 - i) % 5`. Both roundings agree where neither number is negative, and
# adding a multiple of the divisor makes the numerator so: `(4 - i + 5) % 5`, and `(4 - i + 5) // 5 - 1`. How many multiples it
# takes follows from the lower bound. Where no bound is known, and for a divisor that may be negative (a program may divide
# sizes by what it likes), the text computes the floor from the truncated remainder.
#
# In C++, a quotient that is 0 or 1 after this is the answer of a comparison, and what it leaves a difference:
# `(j - i + 770) >= 770`. (A GPU multiplies by the inverse of the divisor, which costs as little.)

# %%
def _lift(numerator: Int, divisor: Int) -> int | None:
    """The smallest k for which `numerator + k * divisor` is known not to be negative; None if none is known
    that keeps it in 32 bits, or the divisor may be negative."""
    low, high = bounds(numerator)
    by, largest = bounds(divisor)
    if by is None or by < 0:
        return None
    if provably_nonnegative(numerator):
        return 0
    if low is None or by == 0:
        return None
    k = -(low // by)
    return k if None in (high, largest) or high + k * largest < 2**31 else None


def to_text(e: Int, name: Callable[[Symbol], str] = lambda s: s.name, floordiv: str = "//",
            truncates: bool = False) -> str:
    """Render for Python by default; backends pass their own spelling of division. `truncates`: division and remainder
    round toward zero, as in C++ and Triton."""
    e = as_expr(e)
    if isinstance(e, int):
        return str(e)

    def operand(x):
        text = to_text(x, name, floordiv, truncates)
        return text if text.isidentifier() or text.isdigit() else f"({text})"

    def atom_text(a, alone):
        if isinstance(a, Symbol):
            return name(a)
        over, under, divides = a.numerator, operand(a.divisor), isinstance(a, FloorDiv)
        lift = _lift(over, a.divisor) if truncates else 0
        if lift is not None:
            lifted = add(over, mul(a.divisor, lift))
            if floordiv == "/" and provably_less(lifted, mul(a.divisor, 2)):
                text = f"({operand(lifted)} >= {under})"
                text = text if divides else f"{operand(lifted)} - {under}*{text}"
            else:
                text = f"{operand(lifted)} {floordiv if divides else '%'} {under}"
            text += f" - {lift}" if divides and lift else ""
        else:
            over = operand(over)
            text = f"({over} % {under} + {under}) % {under}"
            text = f"({over} - {text}) {floordiv} {under}" if divides else text
        return text if alone else f"({text})"

    parts = []
    for term, c in sorted(e.terms.items(), key=lambda item: [_atom_key(a) for a in item[0]]):
        factors = [atom_text(a, len(term) == 1 and c == 1) for a in term]
        sign = "-" if c < 0 else ""
        parts.append(sign + "*".join(([str(abs(c))] if abs(c) != 1 else []) + factors))
    if e.const or not parts:
        parts.append(str(e.const))
    return " + ".join(parts).replace("+ -", "- ")


def product(sizes: Iterable[Int]) -> Int:
    out: Int = 1
    for s in sizes:
        out = mul(out, s)
    return out
