"""Programs about statements, exceptions, generators, containers and the standard library. See language_classes.py and test_language.py."""
import bisect
import collections
import contextvars
import copy
import fractions
import functools
import heapq
import importlib
import inspect
import itertools
import json
import logging
import math
import operator
import random
import re
import statistics
import string
import struct
import sys
import textwrap
import threading
import time
import types
import typing
import warnings

import numpy as np
import torch
from language_classes import Base, Color, Key, Vec, program

# Exceptions


class Problem(Exception):
    def __init__(self, code, *rest):
        super().__init__(code, *rest)
        self.code = code

    def __str__(self):
        return f"problem {self.code}"


class SubProblem(Problem):
    pass


def thrower(kind, *args):
    raise kind(*args)


@program
def custom_exceptions(x):
    out = []
    for kind in (Problem, SubProblem, KeyError, ValueError):
        try:
            thrower(kind, 3, "more")
        except SubProblem as e:
            out.append(("sub", e.code, str(e), e.args, repr(e)))
        except Problem as e:
            out.append(("problem", e.code, e.args))
        except (KeyError, IndexError) as e:
            out.append(("key", str(e), isinstance(e, LookupError)))
        except Exception as e:
            out.append((type(e).__name__, e.args))
        else:
            out.append("else")
        finally:
            out.append("finally")
    return x + 1, out


@program
def exception_chaining(x):
    try:
        try:
            raise KeyError("a")
        except KeyError as e:
            raise ValueError("b") from e
    except ValueError as e:
        first = (repr(e.__cause__), repr(e.__context__), e.__suppress_context__)
    try:
        try:
            raise KeyError("a")
        except KeyError:
            raise ValueError("b") from None
    except ValueError as e:
        second = (e.__cause__, repr(e.__context__), e.__suppress_context__)
    try:
        try:
            [][0]
        except IndexError:
            raise ValueError("c")
    except ValueError as e:
        third = (e.__cause__, repr(e.__context__))
    return x + 1, first, second, third


@program
def bare_raise_and_else(x):
    log = []
    try:
        try:
            raise Problem(1)
        except Problem:
            log.append("first")
            raise
        finally:
            log.append("finally")
    except Problem as e:
        log.append(e.code)
    try:
        log.append("no error")
    except ValueError:
        log.append("never")
    else:
        log.append("else")
    return x + 1, log


def finally_wins():
    for i in range(3):
        try:
            return "try"
        finally:
            if i == 1:
                return "finally"
            continue


@program
def finally_control_flow(x):
    def f():
        try:
            raise ValueError
        finally:
            return 5
    return x + 1, finally_wins(), f()


@program
def try_in_loop(x):
    out = []
    for v in (1, 0, "a", None):
        try:
            out.append(10 / v)
        except ZeroDivisionError:
            continue
        except TypeError as e:
            out.append(str(e))
            if v is None:
                break
    return x * len(out), out


@program
def exception_variable_is_deleted(x):
    try:
        raise ValueError("v")
    except ValueError as e:
        kept = e
    try:
        e
    except NameError as error:
        name = type(error).__name__
    return x + 1, kept.args, name


@program
def exception_from_torch_shape(x):
    if x.shape[0] > 1:
        try:
            assert x.shape[0] == 77, f"got {x.shape[0]}"
        except AssertionError as e:
            return x + 1, str(e)


@program
def exception_attributes(x):
    e = Problem(5)
    e.extra = [1]
    e.add_note("noted")
    try:
        raise e
    except Problem as caught:
        same = caught is e
    return x + 1, same, e.extra, e.__notes__, e.code, bool(e), isinstance(e, Problem)


@program
def exception_objects_returned(x):
    return x + 1, Problem(1).args, type(Problem(2)), ValueError("a", 1)


@program
def stop_iteration_value(x):
    def g():
        yield 1
        return "result"
    it = g()
    next(it)
    try:
        next(it)
    except StopIteration as e:
        return x + 1, e.value, e.args


@program
def raises_after_work(x):
    y = x + 1
    if y.shape[0] > 0:
        raise Problem(7, "end")


@program(args=lambda: ([],))
def raises_after_side_effect(x, log):
    log.append(1)
    log.append(x + 1)
    raise KeyError("gone")


@program
def assertion_fails(x):
    assert x.dim() == 9, "wrong rank"


@program(breaks=True)
def exception_groups(x):
    out = []
    try:
        raise ExceptionGroup("g", [ValueError(1), KeyError(2)])
    except* ValueError as e:
        out.append(len(e.exceptions))
    except* KeyError as e:
        out.append("key")
    return x + 1, out


@program
def nested_handlers(x):
    def inner(n):
        try:
            if n == 0:
                raise KeyError(n)
            if n == 1:
                raise ValueError(n)
            return "fine"
        except KeyError:
            try:
                raise TypeError("t")
            except TypeError:
                return "typed"
            finally:
                pass
    out = []
    for n in range(3):
        try:
            out.append(inner(n))
        except ValueError as e:
            out.append(e.args[0])
    return x + 1, out


@program
def sys_exc_info(x):
    try:
        raise ValueError("q")
    except ValueError:
        kind = sys.exc_info()[0]
    return x + 1, kind


# Functions

@program
def star_arguments(x):
    def f(a, /, b, *args, c=3, d, **kw):
        return a, b, args, c, d, sorted(kw.items())
    l, d = [1, 2], {"d": 4}
    return (x + 1, f(*l, **d), f(1, *l, *l, d=1, **{"z": 2}, **{"y": 3}), f(1, b=2, d=3, a=9), (lambda *a, **k: (a, k))(*range(3), k=1),
            [*l, *l], (*l, 3), {*l, 5}, {**d, "e": 1})


@program
def wrong_arguments(x):
    def f(a, b, *, c):
        return a

    def g(a, /, b=1):
        return a

    def h():
        pass
    out = []
    for call in (lambda: f(1), lambda: f(1, 2), lambda: f(1, 2, 3, c=1), lambda: f(1, 2, c=3, d=4), lambda: f(1, a=1, c=2, b=3),
                 lambda: g(a=1), lambda: g(), lambda: g(1, 2, 3), lambda: h(1), lambda: f(), lambda: f(c=1), lambda: f(*[1], **{"b": 1}),
                 lambda: Base(), lambda: Base(1).f(), lambda: Base(1, 2)):
        try:
            call()
        except TypeError as e:
            out.append(str(e).split("<locals>.")[-1])
    return x + 1, out


@program(breaks=True)
def wrong_unpacked_arguments(x):
    out = []
    for call in (lambda: max(*3), lambda: dict(**3)):
        try:
            call()
        except TypeError as e:
            out.append(str(e))
    return x + 1, out


@program
def closures_and_nonlocal(x):
    total, log = 0, []

    def outer(n):
        count = n

        def inc(k=1):
            nonlocal count, total
            count += k
            total += 1
            return lambda: count * 10 + total
        return inc
    a, b = outer(1), outer(5)
    f = a()
    a(3)
    b()
    return x * total, f(), b()(), [g() for g in [lambda i=i: i for i in range(3)]], [g() for g in [lambda: i for i in range(3)]]


@program
def unbound_variables(x):
    out = []

    def late():
        return later
    try:
        late()
    except NameError as e:
        out.append(str(e))
    later = 1
    try:
        if x.dim() == 9:
            y = 1
        y
    except UnboundLocalError as e:
        out.append(str(e))
    try:
        undefined_name
    except NameError as e:
        out.append(str(e))
    del later
    try:
        late()
    except NameError as e:
        out.append(str(e))
    return x + 1, out


COUNTER = 0
REMOVED = 1


@program
def global_writes(x):
    global COUNTER, FRESH, REMOVED
    COUNTER += 1
    FRESH = x + COUNTER
    REMOVED = 2
    del REMOVED
    REMOVED = COUNTER
    return FRESH * 2, globals_seen()


def globals_seen():
    return COUNTER, "FRESH"


@program
def global_delete(x):
    global FRESH2
    FRESH2 = 5
    del FRESH2
    try:
        FRESH2
    except NameError as e:
        return x + 1, str(e)


@program
def walrus(x):
    out = []
    while (n := len(out)) < 3:
        out.append(n)
    if (m := max(out)) > 1 and (y := x * m) is not None:
        out.append(m)
    return y, out, [z := 1, z + 1], [last := i for i in range(3)], last


@program
def unpacking(x):
    a, (b, *c), *d = 1, (2, 3, 4), 5, 6
    *e, f = "abc"
    [g, h] = {"k": 1, "l": 2}
    (i), = [9]
    k, l = x
    for m, (n, o) in [(1, (2, 3))]:
        pass
    a, b = b, a
    first, *_ = range(3)
    *_, last = [1, 2, 3]
    return k + l, a, b, c, d, e, f, g, h, i, m, n, o, first, last


@program
def unpacking_errors(x):
    out = []
    for f in (lambda: unpack2([1]), lambda: unpack2([1, 2, 3]), lambda: unpack2(3), lambda: unpack3([1]), lambda: unpack2(iter([1]))):
        try:
            f()
        except (ValueError, TypeError) as e:
            out.append(str(e))
    return x + 1, out


def unpack2(v):
    a, b = v


def unpack3(v):
    a, b, *c = v


@program
def chained_comparison(x):
    a = 5
    return x + 1, 1 < a < 10 != 3, 1 < a > 7, a == 5 == 5.0, not a, a and 0 or "or", a if a > 3 else 0, None is not a


@program
def comprehensions(x):
    n = 3
    return ([i * n for i in range(4) if i % 2 for _ in range(2)], {i: n for i in "ab"}, {c for c in "hello"}, sum(i for i in range(n)),
            [[j * x for j in range(i)] for i in range(3)], [(lambda: i + n)() for i in range(2)],
            {k: v for k, v in zip("ab", [1, x])}["b"] + 1,
            [a for a, *b in [(1, 2, 3)]], list(i for i in range(3) if i), any(i > 1 for i in range(3)), tuple(i for i in (n, n)),
            [y for i in range(3) if (y := i * 2) > 1], [[k for k in range(i)] for i in range(3)])


@program
def delete_statements(x):
    a, b, l, d = 1, 2, [1, 2, 3, 4], {1: 2, 3: 4}
    del a, b
    del l[0], l[1:]
    del d[1]
    try:
        a
    except UnboundLocalError:
        c = "unbound"
    return x + 1, l, d, c


@program
def local_namespaces(x):
    a, b = 1, "b"
    d = locals()
    return x + d["a"], sorted(k for k in d if k != "d")


@program(breaks=True)
def globals_builtin(x):
    return x + globals()["COUNTER"] * 0, "np" in globals(), __name__ == globals()["__name__"]


@program
def imports_inside(x):
    import math as m
    import os.path
    from collections import OrderedDict as O, deque
    from math import pi
    mod = importlib.import_module("math")
    again = __import__("math")
    return x * pi, m.sqrt(4), os.path.join("a", "b"), O(a=1), deque([1]), mod is m, again.floor(2.5), sys.modules["math"] is m


@program(breaks=True)
def conditional_import(x):
    try:
        import not_a_module_at_all
    except ImportError as e:
        not_a_module_at_all = None
        message = str(e)
    try:
        from math import nothing_like_this
    except ImportError as e:
        name = type(e).__name__
    return x + 1, not_a_module_at_all, message, name


# Generators

@program
def generators(x):
    def gen(n):
        for i in range(n):
            got = yield i * x
            if got:
                yield got
        return "done"

    def delegating():
        r = yield from gen(2)
        yield r
        yield from [7, 8]
    g = gen(3)
    first = next(g)
    sent = g.send("hello")
    rest = list(g)
    return first, sent, rest, list(delegating()), next(g, "default"), sum(v.shape[0] for v in gen(2))


@program
def generator_close_and_throw(x):
    log = []

    def gen():
        try:
            yield 1
            yield 2
        except ValueError as e:
            log.append(str(e))
            yield "recovered"
        finally:
            log.append("closed")
    g, h = gen(), gen()
    next(g)
    a = g.throw(ValueError("thrown"))
    g.close()
    next(h)
    h.close()
    return x + 1, a, log


@program
def generator_expressions_are_lazy(x):
    log = []

    def note(i):
        log.append(i)
        return i
    g = (note(i) for i in range(5))
    a = next(g)
    b = next(g)
    return x * a, b, log


@program
def infinite_generator(x):
    def naturals():
        n = 0
        while True:
            yield n
            n += 1
    return x + 1, list(itertools.islice(naturals(), 3)), next(i for i in naturals() if i > 4), [a for a, _ in zip(naturals(), "ab")]


@program
def recursive_generator(x):
    def flatten(v):
        for i in v:
            if isinstance(i, list):
                yield from flatten(i)
            else:
                yield i
    return x + 1, list(flatten([1, [2, [3, [4]], 5]]))


@program
def generator_escapes(x):
    def gen(n):
        for i in range(n):
            yield i
    g = gen(3)
    return x + next(g), list(g)


@program(breaks=True)
def generator_returned(x):
    def gen(n):
        for i in range(n):
            yield i
    return x + 1, [*gen(2)], gen(3)


@program(args=lambda: ((i for i in range(5)), iter([1, 2, 3]), {"a": 1}.items()), breaks=True)
def iterators_as_arguments(x, g, it, items):
    return x + next(g), next(it), list(items), list(g), list(it)


@program
def iterators_escape(x):
    z = zip([1, 2], [x, 3])
    next(z)
    m, e, r = map(str, [1, 2]), enumerate("ab"), reversed([1, 2])
    return [list(z), list(m), list(e), list(r)], iter([1, 2])


@program(breaks=True)
def reversed_returned(x):
    return reversed([1, x]), x + 1


@program
def lazy_objects_returned(x):
    return zip([1], [2]), map(str, [1]), enumerate("a"), filter(None, [0, 1]), {1: 2}.keys(), {1: 2}.values(), {1: x}.items()


@program
def iterators_returned_where_they_are(x, pairs=[1, 2, 3]):
    shared = iter([1, 2, 3, x])
    z, m, e, c = zip(shared, shared), map(lambda v: v + x, pairs), enumerate([x, x + 1], 5), itertools.count(3)
    next(z), next(m), next(e), next(c)
    listed, done = [1, 2], zip([1], [x])
    later = zip(listed, [x])
    listed[0] = 7
    list(done)
    return shared, z, m, e, next(c), repr(c.__class__), later, done, \
        itertools.chain([1], [x]), itertools.product([1], [x]), itertools.islice([x], 1)


@program
def iterators_have_classes(x):
    made = map(str, [1]), zip(), enumerate(""), filter(None, []), reversed([1]), reversed(()), itertools.chain(), itertools.repeat(1), \
        iter([]), iter({}), reversed({}), iter(int, 1), iter(x), itertools.count()
    return [(type(i).__name__, isinstance(i, (zip, map, itertools.count)), hasattr(i, "__next__")) for i in made], x + 1


@program
def iterables_are_asked_when_an_iterator_is_made(x):
    asked = []

    class Items:
        def __iter__(self):
            asked.append("iter")
            return iter([1, 2])

    makers = zip, enumerate, itertools.chain, itertools.cycle, itertools.pairwise, lambda i: map(str, i), lambda i: itertools.islice(i, 2)
    for make in makers:
        iterator = make(Items())
        asked.append("made")
        next(iterator)
    return asked, x + 1


@program
def containers_change_behind_their_iterators(x):
    one, two, listed = {"a": 1}, collections.OrderedDict(a=1, b=2), [1, 2]
    its = map(str, one), iter(two), reversed(listed), zip(queue := collections.deque([1]))
    one["b"] = 2
    two.move_to_end("a")
    listed.append(3)
    queue.append(2)
    out = []
    for it in its:
        try:
            out.append(list(it))
        except RuntimeError as error:
            out.append(str(error))
    return out, x + 1


@program
def iterators_go_on_behind_an_error(x):
    out = []
    for it in (map(int, ["a", "1"]), filter(lambda v: 1 // v, [0, 1]), zip(map(int, ["b", "2"]), [3, 4])):
        try:
            next(it)
        except (ValueError, ZeroDivisionError):
            out.append(next(it))
    return out, x + 1


class InTurns:
    """An iterator that says now and then that it is at its end, or that something is wrong."""
    def __init__(self, ends=(), errors=()):
        self.i, self.ends, self.errors = 0, ends, errors

    def __iter__(self):
        return self

    def __next__(self):
        self.i += 1
        if self.i in self.errors:
            raise ValueError(self.i)
        if self.i in self.ends or self.i > 9:
            raise StopIteration
        return self.i

    def __len__(self):
        return 5

    def __getitem__(self, index):
        return next(self)


TURNS = (lambda i: zip(i), lambda i: map(str, i), lambda i: filter(None, i), enumerate, itertools.cycle, itertools.accumulate,
         lambda i: itertools.starmap(str, zip(i)), lambda i: itertools.compress(range(9), i), lambda i: itertools.chain(i, [0]),
         lambda i: itertools.takewhile(bool, i), lambda i: itertools.islice(i, 4), lambda i: itertools.tee(i)[1],
         lambda i: iter(i.__next__, 4))


@program
def iterators_are_asked_again_behind_their_end(x):
    first = iter([1, 2, 3, 4, 5])
    pairs = zip(first, iter([1]))
    out = [list(pairs), list(pairs), next(first)]
    for make in TURNS:
        iterator = make(InTurns(ends=(3, 5), errors=(2, 6)))
        for _ in range(7):
            try:
                out.append(next(iterator, "end"))
            except ValueError as error:
                out.append(str(error))
    return out, x + 1


@program
def iterators_returned_behind_an_error_or_their_end(x):
    out = []
    for make in (zip, enumerate, lambda i: map(str, i)):
        iterator = make(InTurns(ends=(2,), errors=(3,)))
        next(iterator), next(iterator, None)
        try:
            next(iterator)
        except ValueError:
            out.append(iterator)
    return [list(i) for i in out], out, x + 1


@program(breaks=True)
def counts_returned(x):
    counts = itertools.count(1, step=2), itertools.count(1e16), itertools.count(start=3)
    [[next(c), next(c)] for c in counts]
    return *map(next, counts), counts[0], counts[1], x + 1


@program
def enumerations_begin_at_integers(x):
    try:
        enumerate([x], 1.5)
    except TypeError as error:
        return list(enumerate([x], True)), str(error)


@program
def what_changed_is_complained_about_again(x):
    out, changed = [], ({1: 2}, {1}, collections.deque([1]))
    for one, its in zip(changed, [[iter(changed[0]), reversed(changed[0].items())], [iter(changed[1])], [iter(changed[2])]]):
        one.update({3: 4}) if type(one) is dict else one.add(3) if type(one) is set else one.append(3)
        for it in its * 2:
            try:
                next(it)
            except RuntimeError as error:
                out.append(str(error))
    return out, x + 1


@program
def exhausted_iterators_keep_their_class(x):
    deque, views = collections.deque([1]), [collections.OrderedDict(a=1).values(), collections.defaultdict(int, a=1).items()]
    its = [iter(c) for c in (deque, *views, "a", InTurns.__dict__)]
    its += reversed({1: 2}), reversed(InTurns.__dict__)
    return [(len(list(it)), type(it).__name__) for it in its], x + 1


@program
def iter_and_next(x):
    values = [3, 2, 1, 0]
    it = iter([1, 2])
    return (x + 1, list(iter(values.pop, 1)), next(it), next(it), next(it, "end"), next(iter([]), None), list(zip(*[iter("abcd")] * 2)),
            iter(it) is it, [a for a in iter({"k": 1})])


# Containers

@program
def list_methods(x):
    l = [3, 1, 2]
    l.append(4)
    l.extend((5, 6))
    l.insert(0, 0)
    l.remove(3)
    p = l.pop(), l.pop(0)
    l.sort(reverse=True)
    l += [9]
    l *= 2
    m = l.copy()
    m.reverse()
    m[1:3] = ["a", "b", "c"]
    m[::2] = [0] * len(m[::2])
    m.clear()
    return x * l[0], l, p, l.index(9), l.count(9), m, l[::-1], l[-3:-1], [1, 2] + [3], [0] * 3, 2 * [1], [1, [2]] == [1, [2]], [1, 2] < [1,
        3], \
        [1] != [1], sorted("bca", key=lambda c: -ord(c)), [[]] * 2


@program
def dict_methods(x):
    d = {"a": 1, "b": x}
    d.update({"c": 3}, e=5)
    d.update([("f", 6)])
    v = d.pop("a"), d.pop("zz", None), d.setdefault("g", []), d.get("nope"), d.get("c")
    d["g"].append(1)
    d |= {"h": 8}
    e = d | {"i": 9}
    n = dict.fromkeys("ab", 0)
    n[1, 2] = 3
    del n["a"]
    c = d.copy()
    last = c.popitem()
    c.clear()
    return (list(d), v, len(e), n, last, c, "b" in d, "c" not in d, dict(a=1) == {"a": 1}, dict([(1, 2)]), list(reversed({"a": 1, "b": 2})),
            {"a": 1}.items() == {"a": 1}.items(), sorted(d.keys() & {"b", "c"}), d["b"] + 1, {**n, "z": 1}, {1: "a", 1.0: "b", True: "c"})


@program
def dict_views_are_live(x):
    d = {"a": 1}
    k, v, i = d.keys(), d.values(), d.items()
    d["b"] = 2
    return x + 1, list(k), list(v), list(i), len(k), "b" in k, ("b", 2) in i, k | {"z"}, k - {"a"}, sorted(k ^ {"a", "q"}), k == {"a",
        "b"}, \
        k.isdisjoint({"zz"}), 2 in v, list(reversed(k)), k.mapping["a"]


class ComparesBadly:
    def __eq__(self, other):
        raise RuntimeError


@program
def dict_views_of_what_has_no_hash(x):
    few, more, bad, out = {1: [2]}, {1: [2], 3: x}, {1: ComparesBadly()}, []
    for one, other in ((few.items(), {1: [2]}.items()), (few.items(), more.items()), (few.items(), {1}), (few.items(), few.keys()),
                       ({(1, 2), 3}, few.keys()), (bad.items(), {1: ComparesBadly()}.items())):
        for compare in operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge, lambda a, b: a.isdisjoint(b):
            try:
                out.append(compare(one, other))
            except (RuntimeError, TypeError) as error:
                out.append(repr(error))
    return x + 1, out


@program(breaks=True)
def class_method_in_c_of_a_new_class(x):
    class Wrapping(dict):
        def __setitem__(self, key, value):
            super().__setitem__(key, (value,))
    return dict(Wrapping.fromkeys("ab", x + 1))


@program
def dict_changed_during_iteration(x):
    d = {"a": 1}
    try:
        for k in d:
            d[k + "x"] = 1
    except RuntimeError as e:
        return x + 1, str(e)


@program
def set_methods(x):
    s, t = {1, 2, 3}, frozenset([2, 3, 4])
    s.add(5)
    s.discard(9)
    s.remove(1)
    u = s | t
    s -= {5}
    s.update([7], [8])
    return (x + 1, sorted(s), sorted(u), sorted(s & t), sorted(s ^ t), s <= u, t.issubset(u), {1} < {1, 2}, s == {2, 3, 7, 8},
            sorted(s.union([1], [0])),
            len(s), 7 in s, {2} == frozenset([2]), hash(t) == hash(frozenset([2, 3, 4])), s.isdisjoint([100]), {(1, 2): 3}[1, 2],
            s.copy() is s)


@program(breaks=True)
def strings(x):
    s = "Hello, World"
    return (x + 1, s.upper(), s.lower().title(), s.split(", "), ", ".join(["a", "b"]), s.replace("l", "L", 1), s[1:4], s[::-1], s.find("W"),
            s.startswith(("He", "x")), s.strip("dH"), s * 2, "a" "b", s.partition(","), "%s-%d-%5.2f-%r" % ("a", 3, 2.5, "q"),
            "%(k)s" % {"k": 1},
            "{0}{k}{1:>4}{2!r}".format(1, 2, "z", k=3), f"{s!r:>20}{3.14159:.2f}{x.shape[0]:03d}{'n' + 'm'}{10:,}{1e10:e}{s=}", s.encode(),
            b"ab".decode() + "c", s.isdigit(), s.center(20, "*"), s.zfill(15), s.count("l"), s in "x", "W" in s, s.casefold(), s.swapcase(),
            "a,b,,c".rsplit(",", 1), "x\ny".splitlines(), "tab\t".expandtabs(4), s.translate(str.maketrans("l", "1")), "é".encode("utf8"),
            "abc" < "abd",
            s.removeprefix("He"), "{:{}}".format("a", 5), "{[a]} {.real}".format({"a": 1}, 3), s.format_map({}), ascii("é"), list(s[:2]),
            max(s), sorted("cab"),
            bytes([1, 2]), bytearray(b"ab")[0], b"abc"[1], b"a".hex(), bytes.fromhex("00ff"), "a".__add__("b"), str(1.5), repr("a"),
            str(b"a", "ascii"), "é".isalpha())


@program
def formatting_containers(x):
    d, l, t, s = {"a": [1, (2,)]}, [1, "b"], (1, None), {3}
    return x + 1, str(d), repr(l), f"{t}", "%s" % (s,
        ), "{}".format(l), str([Key("k")]), repr({Color.RED: Vec(1)}), str(range(3)), str(slice(1, 2)), f"{d!r}", \
        str(x.shape), str(x.dtype), f"{x.shape}", repr([x.dtype]), str(collections.OrderedDict(a=1)), str(Exception("e",
            1)), repr(type(d)), str(len), \
        str(collections.deque([1])), repr(collections.Counter("aab")), f"{(1, 2)}"


@program
def numbers_(x):
    i, f, c = 10, 2.5, 1 + 2j
    return (x * i, i // 3, -7 // 2, -7 % 3, i ** 2, 2 ** -1, i / 4, i & 6, i | 1, i ^ 3, i << 2, i >> 1, ~i, divmod(17, 5), pow(2, 10, 7),
            abs(-3.5), round(2.567, 2),
            f.is_integer(), f.as_integer_ratio(), (0.1).hex(), i.bit_length(), (255).to_bytes(2, "big"), int.from_bytes(b"\x01\x00", "big"),
            int("ff", 16), float("1e3"),
            c.conjugate(), abs(c), c.real, int(3.9), bool([]), float("inf") > 1, float("nan") == float("nan"), 1_000, 0b11, hex(255),
            bin(5), oct(8), ord("a"), chr(98),
            hash(3), min(3, 1, 2), max([1, 5], default=0), sum([1, 2], 10), sum([[1], [2]], []), complex(1, 2), 3 .real, (5).__add__(3),
            isinstance(True, int), 1 == 1.0 == True,
            i.numerator, True + True, -0.0, int.__mul__(3, 4), math.inf)


@program
def slices(x):
    s = slice(1, 10, 2)
    l = list(range(10))
    return x[slice(0, 1)], l[s], s.start, s.stop, s.step, s.indices(5), l[-1:], l[:-1], l[::-2], (1, 2,
        3)[1:], "abc"[s], slice(None) == slice(None), range(10)[2:5], range(5)[-1], \
        x[0:1, ...], x[None].shape, x[..., -1], len(range(0, 10, 3)), 3 in range(5), list(range(5, 0, -2)), range(3) == range(0, 3), l[True]


@program
def sorting(x):
    pairs = [("b", 2), ("a", 2), ("c", 1)]
    l = [Vec(2), Vec(1)]
    l.sort()
    return (x + 1, sorted(pairs), sorted(pairs, key=lambda p: (p[1], p[0])), sorted(pairs, key=operator.itemgetter(1), reverse=True),
            min(pairs, key=lambda p: p[1]),
            max(pairs, key=len), l, sorted([3, 1], key=functools.cmp_to_key(lambda a, b: b - a)), sorted({"b": 1, "a": 0}), sorted("ba"),
            min("abc"), max(2, 3.5),
            sorted([[2], [1, 5]], key=sum), list(reversed(sorted([1, 3, 2]))), min([], default="d"), sorted([x.shape, x.shape[:1]],
                key=len), max({"a": 1}))


@program
def ordered_dict(x):
    d = collections.OrderedDict([("a", 1), ("b", x)])
    d["c"] = 3
    d.move_to_end("a")
    d.move_to_end("c", last=False)
    e = d.popitem(last=False)
    return d, e, list(d.items())[0][0], d == collections.OrderedDict(b=1), list(reversed(d)), len(d), d.copy() is d


@program
def default_dict(x):
    d, c, n = collections.defaultdict(list), collections.defaultdict(int), collections.defaultdict(lambda: collections.defaultdict(int))
    for w in "abca":
        d[w].append(w)
        c[w] += 1
    n["a"]["b"] += 1
    return x + 1, d, c, n["a"], "z" in d, d.get("z"), len(d), dict(c), d.default_factory is list, d["new"], c == {"a": 2, "b": 1, "c": 1}


@program
def deques(x):
    d = collections.deque([1, 2, 3], maxlen=4)
    d.append(4)
    d.append(5)
    d.appendleft(0)
    d.rotate(1)
    a, b = d.pop(), d.popleft()
    d.extend([7])
    d.extendleft([8, 9])
    d[0] = x
    return d, a, b, len(d), d.maxlen, 7 in d, list(d)[1:], collections.deque("ab") == collections.deque("ab"), \
        d[-1], d.count(7), bool(collections.deque())


@program
def counters(x):
    c = collections.Counter("abracadabra")
    c.update("aab")
    c["z"] += 1
    d = collections.Counter(a=1, b=2)
    e = c + d
    c.subtract({"a": 1})
    return x + 1, c.most_common(2), c["nothing"], d, e["a"], sum(c.values()), \
        sorted(d.elements()), (d & collections.Counter(a=5)), (d - collections.Counter(a=1)), \
        c.total(), \
        dict(d), "q" in c, len(d), list(d.items()), d == {"a": 1, "b": 2}


@program
def chain_map(x):
    c = collections.ChainMap({"a": 1}, {"a": 2, "b": 3})
    c["n"] = 4
    child = c.new_child({"b": 0})
    return x + 1, c["a"], c["b"], c["n"], child["b"], sorted(c), len(c), "zz" in c, c.get("q", 1), dict(c)


@program
def itertools_all(x):
    t = itertools
    a, b = t.tee([1, 2, 3])
    return (x + 1, list(t.chain([1], [2])), list(t.chain.from_iterable([[1], [2]])), list(t.islice(t.count(2, 2), 3)),
            list(t.islice(t.cycle("ab"), 3)), list(t.repeat(1, 2)),
            list(t.accumulate([1, 2, 3])), list(t.accumulate([1, 2], operator.mul, initial=5)), list(t.compress("abc", [1, 0, 1])),
            list(t.dropwhile(lambda v: v < 2, [1, 2, 1])),
            list(t.takewhile(lambda v: v < 2, [1, 2, 1])), list(t.filterfalse(lambda v: v % 2, range(4))),
            [(k, list(g)) for k, g in t.groupby("aabb")],
            [(k, len(list(g))) for k, g in t.groupby([1, 3, 2], key=lambda v: v % 2)], list(t.pairwise("abc")),
            list(t.product("ab", repeat=2)), list(t.permutations("ab")),
            list(t.combinations("abc", 2)), list(t.combinations_with_replacement("ab", 2)), list(t.starmap(pow, [(2, 3)])),
            list(t.zip_longest("ab", "c", fillvalue=0)),
            next(a), list(b), list(a), list(t.islice("abcdef", 1, None, 2)), list(t.chain()), dict(t.zip_longest("a", [x]))["a"] + 1)


@program
def builtin_iterators(x):
    return (list(map(lambda a, b: a * b, [1, 2], [x, 3])), list(filter(None, [0, 1, ""])), list(filter(lambda v: v > 1, [1, 2])),
            list(enumerate("ab", 5)), list(enumerate("ab", start=2)),
            list(zip("ab", [1, 2, 3])), list(zip()), list(reversed(range(3))), all([]), any([0, 1]), sum(range(4)),
            list(map(str, range(2))), dict(zip("ab", [1, 2])), list(zip([1], strict=True)),
            tuple(map(len, ["a", "bb"])), set(map(abs, [-1, 1])), list(map(None.__class__, [])), [*map(operator.neg, [1])],
            max(map(len, ["a", "bcd"])), list(map(int, "12")))


@program
def zip_strict_error(x):
    try:
        list(zip([1, 2], [1], strict=True))
    except ValueError as e:
        return x + 1, str(e)


# functools

@functools.lru_cache(maxsize=None)
def cached(n):
    return n * 2


@functools.cache
def fibonacci(n):
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)


@functools.singledispatch
def dispatched(v):
    return "object"


@dispatched.register
def _(v: int):
    return "int"


@dispatched.register(list)
def _(v):
    return "list"


class Partials:
    def scale(self, x, k, plus=0):
        return x * k + plus

    double = functools.partialmethod(scale, k=2)

    @functools.cached_property
    def slow(self):
        self.calls = getattr(self, "calls", 0) + 1
        return 9

    @functools.singledispatchmethod
    def on(self, v):
        return "other"

    @on.register
    def _(self, v: int):
        return "int"


@program
def functools_all(x):
    p = functools.partial(max, 3)
    q = functools.partial(lambda a, b=1, **k: (a, b, k), b=5)

    def deco(f):
        @functools.wraps(f)
        def wrapper(*a, **k):
            "wrapper doc"
            return f(*a, **k) + 1
        return wrapper

    @deco
    def g(v, k=2):
        "g doc"
        return v * k
    m = Partials()
    return (g(x), g.__name__, g.__doc__, g.__wrapped__(2), p(1, 5), q(1, z=2), p.func is max, q.keywords, functools.reduce(operator.add,
        [1, 2], 10),
            functools.reduce(lambda a, b: a * b, [1, 2, 3]), cached(4), fibonacci(10), m.double(x), m.slow + m.slow, m.calls,
            functools.partial(q, 7)())


@program(breaks=True)
def single_dispatch(x):
    return x + 1, dispatched(1), dispatched([]), dispatched("a"), Partials().on(1), Partials().on("a")


@program
def lru_cache_inside(x):
    log = []

    @functools.lru_cache(maxsize=None)
    def f(n):
        log.append(n)
        return n + 1
    return x * f(1) + f(1) + f(2), log


# The standard library

@program
def operator_module(x):
    o = operator
    l = [1, 2]
    o.setitem(l, 0, 5)
    return (o.add(x, 1), o.mul(2, 3), o.getitem(l, 0), o.itemgetter(0, 1)(l), o.attrgetter("k")(Base(2)),
            o.attrgetter("__class__.__name__")(l), o.methodcaller("upper")("a"), o.truth([]),
            o.not_(1), o.is_(None, None), o.contains(l, 2), o.concat([1], [2]), o.index(3), o.xor(1, 3), o.eq(1, 1), o.lt(1, 2),
            o.iadd(1, 2), o.countOf(l, 2), o.indexOf(l, 2), o.length_hint(l),
            o.pow(2, 3), o.floordiv(7, 2), o.neg(1), o.inv(1), o.methodcaller("f", 1)(Base(1)), o.matmul(x, x.T))


@program
def math_module(x):
    m = math
    return (x + 1, m.sqrt(16), m.floor(2.7), m.ceil(2.1), m.log(8, 2), m.log2(8), m.exp(0), m.sin(0), m.pi, m.isnan(m.nan), m.gcd(12, 18),
            m.prod([1, 2, 3]), m.factorial(5), m.comb(5, 2), m.isclose(0.1 + 0.2, 0.3),
            m.fsum([0.1] * 3), m.copysign(1, -2), m.trunc(2.5), m.hypot(3, 4), m.isqrt(17), m.dist([0, 0], [1, 1]), m.inf, m.fmod(7, 3),
            m.modf(2.5), m.frexp(8), m.prod(x.shape), m.sqrt(x.shape[-1]))


@program
def regular_expressions(x):
    m = re.match(r"layer(\d+)\.(\w+)", "layer12.weight")
    return x * int(m.group(1)), m.groups(), re.sub("a", "b", "aba"), re.findall(r"\d",
        "1a2"), bool(re.compile("^x").search("yx")), re.split(",", "a,b"), re.fullmatch("a+", "aaa") is not None


MATCHES = re.compile("a")


@program(breaks=True)
def iterators_of_patterns(x):
    counts = [len([*MATCHES.finditer("aba")]), [m.start() for m in MATCHES.finditer("aaa")]]
    scanner = MATCHES.scanner("aa")
    return x + counts[0], counts, scanner.search().span(), scanner.search().span(), [v for v in struct.iter_unpack("<h", b"1234")]


@program
def pure_library(x):
    return (x + 1, bisect.bisect([1, 3, 5], 3), textwrap.dedent("  a"), string.ascii_lowercase[:3],
            fractions.Fraction(1, 2) + 1 == fractions.Fraction(3, 2), statistics.mean([1, 2, 3]), json.dumps({"a": [1, None]}),
            json.loads('{"a": 1}'))


@program
def heaps(x):
    h = []
    for v in (3, 1, 2):
        heapq.heappush(h, v)
    heapq.heapify(h)
    return x + 1, heapq.heappop(h), h, heapq.nsmallest(1, [2, 1])


@program(breaks=True)
def random_numbers(x):
    random.seed(0)
    a, b = random.random(), random.randint(0, 10)
    return x * a, b, random.choice([1, 2, 3])


@program(breaks=True)
def printing(x):
    print("before", x.shape, sep="|")
    y = x + 1
    print(f"sum {y.shape}", file=sys.stdout)
    sys.stdout.write("raw\n")
    return y


LOGGER = logging.getLogger("language")


@program
def logging_calls(x):
    LOGGER.debug("debug %s", 1)
    LOGGER.info("info")
    if LOGGER.isEnabledFor(logging.DEBUG):
        x = x + 1
    return x * 2


@program
def warnings_warn(x):
    warnings.warn("careful", UserWarning)
    return x + 1


LOCAL = threading.local()
LOCAL.value = 3
VARIABLE = contextvars.ContextVar("VARIABLE", default=4)
LOCK = threading.Lock()


@program
def thread_locals_and_context_variables(x):
    a = LOCAL.value
    return x * a + VARIABLE.get(), hasattr(LOCAL, "zz"), getattr(LOCAL, "zz", 1)


@program(breaks=True)
def context_variable_set(x):
    token = VARIABLE.set(9)
    a = VARIABLE.get()
    VARIABLE.reset(token)
    return x * a, VARIABLE.get()


@program(breaks=True)
def locks_and_time(x):
    with LOCK:
        y = x + 1
    t = time.perf_counter()
    return y * 2, t > 0


@program(breaks=True)
def introspection(x):
    def f(a, b=2, *args, c, **kw): ...
    s = inspect.signature(f)
    return x + 1, list(s.parameters), s.parameters["b"].default, callable(f), inspect.isfunction(f), inspect.ismethod(Base(1).f), \
        inspect.isclass(Base), \
        callable(3), \
        inspect.isgeneratorfunction(f), f.__code__.co_varnames[:2], inspect.getmro(Base)[0] is Base


@program(breaks=True)
def signature_bind(x):
    def f(a, b=2, *, c=3):
        return a
    bound = inspect.signature(f).bind(1, c=5)
    bound.apply_defaults()
    return x + 1, dict(bound.arguments)


@program
def identity_builtin(x):
    a, b = [1], [1]
    return x + 1, id(a) == id(a), id(a) == id(b), id(x) == id(x), len({id(a), id(b)}), {id(a): 1}.get(id(a))


@program(breaks=True)
def type_unions_and_aliases(x):
    return x + 1, isinstance(1, typing.Union[int, str]), isinstance([],
        typing.Sequence), list[int]([1]), int | None == typing.Optional[int], isinstance(1.0, typing.SupportsFloat)


# numpy

@program
def numpy_scalars(x):
    a, b = np.float32(2.5), np.int64(3)
    return x * float(a), x + int(b), a * 2, b + 1, bool(np.bool_(True)), a.item(), b == 3, np.pi, float(np.sqrt(4.0)), \
        a.dtype == np.float32, isinstance(b, np.integer)


@program(args=lambda: (np.float64(1.5), np.int32(4)))
def numpy_scalar_arguments(x, f, i):
    return x * f, x + float(f), [1] * int(i), f + i, x[: int(i)]


@program(breaks=True, args=lambda: (np.arange(4.0),))
def numpy_arrays(x, a):
    b = np.zeros(3) + a[:3]
    return x + torch.from_numpy(b).sum(), b, a.shape, a.mean(), np.concatenate([a, b]).tolist(), len(a), torch.tensor(a), a.tolist()


@program(breaks=True)
def numpy_of_tensor(x):
    return np.asarray(x.detach()).sum() * 0 + x, x.detach().numpy().shape


@program(breaks=True)
def numpy_generator(x):                        # its methods are Cython's, which are neither functions nor methods of C
    generator = np.random.default_rng(3)
    return x * generator.normal(), x + SEVENS.integers(7, 8)


SEVENS = np.random.default_rng(0)


@program(breaks=True)
def numpy_pure(x):
    return x * float(np.prod([2, 3])), int(np.cumsum([1, 2])[-1]), np.array([1, 2]).tolist(), float(np.linspace(0, 1, 3)[1])


@program(breaks=True, args=lambda: ([], [7]))
def grown_before_the_loop(x, empty, one):
    empty.append(1)
    one.extend([2, 3])
    found, rest = [], iter(one)
    first = next(rest), next(rest)
    for item in empty:
        found.append((item, x.sum().item() > 0))
    return x + 1, first, found, list(rest), empty, one


# Classes derived from containers, with methods of their own

class Items(tuple):
    def __new__(cls, *items):
        return super().__new__(cls, items)


class Pair(typing.NamedTuple):
    a: torch.Tensor
    b: int = 2


class Wide(Pair):
    __slots__ = ()

    def __getitem__(self, key):
        return getattr(self, key) if isinstance(key, str) else super().__getitem__(key)

    def __len__(self):
        return 7

    def __bool__(self):
        return self.b > 2

    def __reversed__(self):
        return iter("ba")


class Around(Pair):
    __slots__ = ()

    def __iter__(self):
        yield 5
        yield from super().__iter__()


@program(breaks=True, args=lambda: (Items(1, 2), Wide(torch.ones(2)), Around(torch.ones(2), 3)))
def tuples_of_their_own(x, items, wide, around):
    made = Items(x, *items)
    new, other = Wide(x, 3), Around(x)
    return made, made[0] + made[2], Items(*made), new["a"], len(new), wide["b"], len(wide), bool(wide), 1 if new else 2, \
        list(reversed(new)), [*around], list(other), [k for k in other], new[1:], type(new).__name__


class Doubled(collections.OrderedDict):
    def __setitem__(self, key, value):
        super().__setitem__(key, value * 2)


class Asked(collections.OrderedDict):
    asked = ()

    def __contains__(self, key):
        self.asked += (key,)
        return super().__contains__(key)

    def __iter__(self):
        self.asked += ("all",)
        return super().__iter__()


class Mapping(dict):
    def __iter__(self):
        return iter(("z",))


@program(breaks=True, args=lambda: (Doubled(a=1), Asked(a=1), Mapping(z=2), Asked()))
def dictionaries_of_their_own(x, doubled, asked, mapping, empty):
    made = Doubled(a=x)
    made.update(b=x)
    made.setdefault("c", 3)
    doubled.update(b=4)
    copied, plain = made.copy(), mapping.copy()
    known = "a" in asked, "b" in asked, list(asked), "a" in empty, list(empty), len(empty)
    return x + 1, made, doubled, copied, type(copied).__name__, plain, type(plain), known, asked.asked, \
        doubled.fromkeys("ab", 2), mapping.__ior__({"k": x})


# State that outlives the call

class History:
    def __init__(self):
        self.items, self.counts, self.total, self.seen = [], collections.Counter(), 0, set()


@program(args=lambda: (History(), {"k": [1, {"n": 1}]}, [3, 1, 2], {1, 2}, collections.deque([1], maxlen=2), collections.defaultdict(list)))
def mutation_of_arguments(x, h, d, l, s, q, dd):
    h.items.append(x + 1)
    h.counts["a"] += 1
    h.counts.update("bb")
    h.total += 2
    h.seen.add("s")
    d["k"][1]["n"] += 1
    d["new"] = h.items
    l.sort()
    l[1:2] = [7, 8]
    s |= {9}
    s.discard(1)
    q.append(5)
    q.append(6)
    dd["a"].append(l)
    del d["k"][0]
    return h.items[-1] * 2, d["k"], l


@program(breaks=True, args=lambda: ({"b": 1, "a": 2}, collections.OrderedDict(a=1, b=2)))
def reordering_of_arguments(x, d, o):
    v = d.pop("b")
    d["b"] = v
    o.move_to_end("a")
    o.move_to_end("b")
    o["c"] = 3
    o.move_to_end("c", last=False)
    return x * v, list(d), list(o)


@program(args=lambda: ([1, 2, 3], {"a": 1}))
def containers_aliased(x, l, d):
    m = l
    m.append(4)
    d["l"] = l
    d["me"] = {"inner": l}
    d["me"]["inner"].append(5)
    l = l + [6]
    return x + 1, l, m


@program(args=lambda: (Base(1),))
def object_attributes_written(x, b):
    b.k += 1
    b.cache = {"x": x * 2}
    b.cache["y"] = [b.k]
    b.k2, b.k = b.k, 10
    del b.k2
    b.__dict__["via_dict"] = 3
    return b.f(x), b.cache["y"], b.via_dict, sorted(vars(b))


def mutable_default(x, acc=[]):
    acc.append(1)
    return x * len(acc)


def counting(x, state={"n": 0}):
    state["n"] += 1
    return x * 1


@program
def argument_default_mutated(x):
    return counting(x)


def make_counter():
    n = 0

    def tick():
        nonlocal n
        n += 1
        return n
    return tick


@program(args=lambda: (make_counter(),))
def closure_state(x, tick):
    return x * tick(), tick()


@program(args=lambda: (iter([1, 2, 3, 4]),))
def iterator_argument(x, it):
    a = next(it)
    for b in it:
        break
    return x * a, b


@program(args=lambda: (itertools.count(3), zip([1, 2], [3, 4]), enumerate("ab"), map(str, [1, 2]), reversed([1, 2]), iter({"a": 1}),
                       iter((1, 2)), iter(range(3)), iter("ab")), breaks=True)
def iterator_arguments_of_all_kinds(x, *its):
    return x + 1, [next(i) for i in its], [next(i, "end") for i in its[1:]]


@program(args=lambda: ({"a": 1}.keys(), {"b": 2}.values(), {"c": 3}.items(), range(3), slice(1, 2), memoryview(b"ab"), bytearray(b"xy"),
                       types.MappingProxyType({"m": 1}), 2 + 1j, frozenset([1]), Ellipsis, NotImplemented),
         breaks=True)
def unusual_arguments(x, k, v, i, r, s, m, b, p, c, f, e, n):
    return x[s], list(k), list(v), list(i), list(r), m[0], b[0], p["m"], c.real, 1 in f, e is ..., n is NotImplemented


@program(args=lambda: (torch.Size([2, 3]), torch.float32, torch.device("cpu"), torch.contiguous_format))
def torch_constants(x, size, dtype, device, layout):
    return torch.zeros(size, dtype=dtype,
        device=device) + x.to(device), size.numel(), size[0], dtype.is_floating_point, device.type, str(device), size + (1,
            ), dtype == torch.float32, dtype.itemsize


@program(args=lambda: (3, [("a", 1)], iter([4, 5])), breaks=True)
def stars_of_what_cannot_be_spread(x, n, pairs, it):
    said = []
    for spread in (lambda: [0, *n], lambda: {0, *n}, lambda: {**n}, lambda: {**pairs}, lambda: len(*n), lambda: dict(b=1, **pairs)):
        try:
            said.append(spread())
        except TypeError as error:
            said.append(str(error))
    return x + 1, said, [*pairs, *it], {**{"a": x}, **dict(pairs)}, {*"ab", *pairs}


@program(args=lambda: ([("a", 1)],), breaks=True)
def pairs_as_keyword_arguments(x, pairs):
    try:
        return x + 1, dict(b=1, **pairs)
    except TypeError as error:
        return x + 1, str(error)


@program
def grad_modes_as_decorators_and_objects(x):
    def needs(y, k=2):
        return (y * k).requires_grad
    context, leaf = torch.no_grad(), x * torch.ones(3, requires_grad=True)
    with context:
        previous = context.prev
    return (torch.no_grad()(needs)(leaf), torch.enable_grad()(needs)(leaf, k=3), context.__class__ is torch.no_grad,
            isinstance(context, torch.no_grad),
            previous, torch.is_grad_enabled())


@program
def methods_by_their_names(x):
    a, s, it = [1, 2], {1, 2}, (n * x for n in (1, 2))
    a.__init__([3])
    s.clear()
    return a, a.__contains__(3), a.__eq__([3]), a.__len__(), s, it.__next__(), it.__iter__() is it, x.__len__(), \
        [row + 1 for row in x.__iter__()]


@program
def generators_misused(x):
    def echo():
        try:
            y = yield x
            yield y
        except ValueError as error:
            yield str(error)

    def stubborn():
        try:
            yield 1
        except GeneratorExit:
            yield 2

    def of_itself():
        try:
            next(own[0])
        except ValueError as error:
            yield str(error)

    own, said = [], []
    own.append(of_itself())
    said.append(next(own[0]))
    spent, fresh, unstarted, thrown, closed = echo(), echo(), echo(), echo(), stubborn()
    said += [next(spent), spent.send(3), next(thrown), thrown.throw(ValueError("v")), next(closed)]
    for action in (lambda: spent.send(1), lambda: fresh.send(1), lambda: unstarted.throw(KeyError("k")), closed.close):
        try:
            action()
        except (StopIteration, TypeError, KeyError, RuntimeError) as error:
            said.append(repr(error))
    return said, x + 1


@program(args=lambda: ({Key(1): 2, Key(3): 4},))
def keys_with_a_hash_of_their_own(x, d):
    d[Key(5)] = 6
    return d[Key(1)] * x, {Key(2): 1}[Key(2)], len(d), {frozenset([1, 2]): 1}[frozenset([2, 1])], {(1, Key(2)): 3}[1, Key(2)]


@program
def attributes_of_exceptions(x):
    class Code(Exception):
        code = 3

        @property
        def double(self):
            return self.args[0] * 2

    said = []
    for action in (lambda: {}.nothing, lambda: nothing_of_this_name, lambda: super(Code, Code(1)).nothing):
        try:
            action()
        except (AttributeError, NameError) as error:
            said += [error.name, str(error)]
    error = ImportError("a", path="p")
    try:
        raise Code(4) from ValueError
    except Code as caught:
        said += [caught.code, caught.double, caught.__class__.__name__, repr(caught.__cause__)]
    return said, error.name, error.path, AttributeError("a", name="n").name, x + 1


@program
def calls_that_python_refuses(x):
    class Plain:
        pass

    said = []
    for action in (lambda: Plain(1), lambda: ValueError(a=1), lambda: Plain()(), lambda: functools.reduce(max, []), lambda: reversed({1}),
                   lambda: reversed(3),
                   lambda: tuple("ab")["a"], lambda: 3 in 4, lambda: len(torch.tensor(1.0)), lambda: {}.popitem(), lambda: Vec(1).nothing):
        try:
            said.append(action())
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            said.append((type(error).__name__, str(error)))
    return said, x + 1


@program
def signatures(x):
    return list(inspect.signature(Vec(1).__add__).parameters), list(inspect.signature(torch.nn.functional.dropout).parameters), \
        inspect.isclass(Problem), x + 1


class Pair(collections.namedtuple("Pair", "a b")):
    __slots__ = ()

    @property
    def a(self):
        return super().a + 10


class Fixed(Pair):
    b = 7


@program
def fields_of_named_tuples_that_a_class_replaces(x):
    p, q = Pair(1, 2), Fixed(a=3, b=4)
    return p, p.a, p[0], p.b, q, q.a, q.b, q._replace(b=5)[1], p._asdict(), x * p.a


@program
def names_of_functions_and_fields_of_the_interpreter(x):
    return (torch.nn.functional.gelu.__name__, len.__name__, torch.relu.__name__, torch.add.__qualname__ is not None, [].append.__name__,
            sys.flags.optimize, sys.version_info.major, sys.version_info[:1], sys.float_info.max, x)


@program
def what_errors_of_the_library_know(x):
    known = []
    for wrong, function in (("{bad", json.loads), ("a(", re.compile)):
        try:
            function(wrong)
        except (ValueError, re.error) as error:
            known.append((error.msg, error.pos, error.lineno, error.colno, str(error), sorted(vars(error))))
    return x + 1, known


@program
def there_is_one_empty_tuple(x):
    empty, one = (), (x,)
    return x + 1, tuple([]) is empty, (1,)[1:] is empty, one is (x,)
