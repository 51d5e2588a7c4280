"""Methods and operators of containers while tracing: same results as eager, in one graph."""
import bisect
import collections
import functools
import heapq
import itertools
import operator
import warnings

import pytest
import torch

import minicompile
from minicompile.ch03_capture import comparisons

pytestmark = pytest.mark.usefixtures("fresh")
PROGRAMS = []


def program(function):
    PROGRAMS.append(function)
    return function


@program
def list_methods(x):
    a = [x, x + 1]
    a.insert(1, x * 2)
    a.extend((x, x - 1))
    a += [x * 3]
    a *= 2
    last = a.pop()
    first = a.pop(0)
    a.reverse()
    n = [3, 1, 2]
    n.remove(1)
    n.sort(reverse=True)
    return a, last, first, n, n.index(2), n.count(3), [x] * 2, 2 * (1, x), [1, 2] == [1, 2], (1, 2) < (1, 3)


@program
def operators_by_name(x):
    a, d = [x, x + 1], {"k": x, "l": x * 2}
    a.__setitem__(0, x * 3)
    d.__delitem__("k")
    return (list(a.__reversed__()), list(d.__reversed__()), a.__len__(), "abc".__len__(), x.__len__(),
            d.__contains__("l"), (1, 2).__contains__(2), x.__getitem__(0), next(a.__iter__()), {1, 2}.__contains__(3))


@program
def bounded_deque(x):
    d = collections.deque([x, x + 1, x + 2], maxlen=3)
    d.append(x * 2)
    d.appendleft(x * 3)
    d.rotate(1)
    d.extendleft([x * 4])
    left = d.popleft()
    e = d.copy()
    e.append(x)
    e.append(x)
    return d, left, e, len(d), d[0] is d[-2]


def raises_after(*items):
    yield from items
    raise ValueError("no more")


@program
def filled_until_an_error(x):
    filled = {"list": [], "deque": collections.deque([9], maxlen=3), "set": {7}, "dict": {}, "ordered": collections.OrderedDict(),
              "less": {1, 2, 3}, "left": collections.deque([1])}
    pairs = raises_after(("a", x), ("b", x + 1))
    for fill in (lambda: filled["list"].extend(raises_after(x, 2)), lambda: filled["deque"].extend(raises_after(1, 2, 3)),
                 lambda: filled["set"].update((4,), raises_after(5)), lambda: filled["dict"].update(pairs),
                 lambda: filled["ordered"].update((k, 1) for k in raises_after("c")),
                 lambda: filled["less"].difference_update(raises_after(2)),
                 lambda: filled["left"].extendleft(raises_after(2, 3)), lambda: filled["list"].__iadd__(raises_after(3))):
        try:
            fill()
        except ValueError as error:
            filled[len(filled)] = str(error)
    return x + 1, filled


@program
def filled_by_who_looks(x):
    a = [1, 2, 3]

    def look():
        for v in a[:2]:
            yield v
            a.append(len(a))
    a.extend(look())
    return x + 1, a


@program
def backwards_while_it_changes(x):
    a, d, q, seen = [1, 2, 3], {1: 2, 3: 4}, collections.deque([1, 2, 3]), []
    for v in reversed(a):
        a[0] = 7
        seen.append(v)
        if len(a) > 2:
            a.pop()
    for container in (d, d.values(), q, collections.OrderedDict(d)):
        try:
            for v in reversed(container):
                seen.append(v)
                d[len(d) + 5] = 0
                q.append(0)
        except RuntimeError as error:
            seen.append(str(error))
    return x + 1, a, seen, reversed(x), [*reversed({1: 2, 3: 4}.items())]


@program
def no_item_before_it_is_wanted(x):
    seen = []

    def items():
        for i in range(3):
            seen.append(("made", i))
            yield i

    def key(v):
        seen.append(("key", v))
        return -v
    seen.extend(itertools.islice(itertools.cycle(items()), 7))
    for pair in itertools.pairwise(items()):
        seen.append(pair)
    return x + 1, seen, max(items(), key=key), min(items(), key=key, default=None)


@program
def python_below_c(x):
    class Late:
        def __init__(self, n):
            self.n = n

        def __lt__(self, other):
            return self.n > other.n

    a, rows, late = [1, 3, 5], [(2, "b"), (1, "a")], [Late(1), Late(3), Late(2)]
    bisect.insort(a, 2)
    bisect.insort_left(a, 4)
    operator.iconcat(a, [9])
    heapq.heapify(late)
    rows.sort(key=operator.itemgetter(1))
    first = heapq.heappop(late).n
    cut = bisect.bisect_left([Late(3), Late(2), Late(1)], Late(2))
    try:
        functools.reduce(operator.add, [])
    except TypeError as error:
        text = str(error)
    counts = collections.Counter("abca")
    total = functools.reduce(operator.mul, x.shape, 1)
    pair = operator.itemgetter(1, 0)(rows), operator.attrgetter("n", "n")(Late(7)), operator.methodcaller("index", 3)(a)
    return a, rows, first, cut, text, dict(counts), x * total, pair, operator.indexOf(a, 4), operator.countOf(a, 9)


@program
def set_methods(x):
    a, b = {1, 2, 3}, frozenset((3, 4))
    c = a | b
    d = set(a)
    d ^= {1, 9}
    d.difference_update({2})
    d.update([7], (8,))
    e = a.copy()
    e.intersection_update([1, 2])
    e &= {2, 5}
    e.discard(100)
    return (x * len(c), c, type(b | a) is frozenset, a - b, a & b, a ^ b, a.isdisjoint({7}), a.issubset(c), c.issuperset(a),
            sorted(d), e, {1: 2}.keys() & {1, 5}, a.symmetric_difference([1, 5]), 3 in a)


@program
def order_of_sets(x):
    """Python gives the items of a set in an order that depends on its history."""
    a, b = set(), frozenset([38, 50, 13, 30])
    for n in (9, 1, 16, 40):
        a.add(n)
    c = a | b
    orders = [list(a), list(b), list(c), list(c - a), list(b ^ a), [*{8, 0, 16}], repr(c), [n for n in {n % 8 for n in b}]]
    d = set(c)
    first = d.pop()
    return x + len(d), orders, a, b, c, first, list(d), {1} & {True}


@program
def changed_while_iterated(x):
    found = []
    for container, change in (
            (collections.deque([1, 2]), lambda c: c.append(3)), (collections.deque([1, 2]), lambda c: c.rotate(1)),
            (collections.deque([1, 2]), lambda c: c.reverse()), ({1: 2, 3: 4}, lambda c: c.pop(3)),
            ({1: 2, 3: 4}, lambda c: c.setdefault(5, 6)), ({1: 2, 3: 4}, lambda c: c.update({1: c.pop(1)})),
            (collections.OrderedDict({1: 2}), lambda c: c.setdefault(5, 6)), ({1, 2}, lambda c: c.add(3)),
            (collections.OrderedDict({1: 2, 3: 4}), lambda c: c.setdefault(5, 6)), ([1, 2], lambda c: len(c) > 3 or c.append(3))):
        seen = []
        try:
            for item in container:
                seen.append(item)
                change(container)
        except RuntimeError as error:
            seen.append(str(error))
        found.append(seen)
    return x + 1, found


@program
def exhausted_iterators(x):
    iterators = [iter([]), iter([1]), iter((1,)), iter({1: 2}), iter({1: 2}.items()), iter("k")]
    for it in iterators:
        for item in it:
            pass
    return x + 1, [type(it).__name__ for it in iterators], [next(it, "end") for it in iterators]


@program
def dict_methods(x):
    d = {"a": x, "b": x + 1}
    e = d | {"b": x + 2, "c": x}
    d |= {"z": 1}
    f = collections.defaultdict(list)
    f["k"].append(x)
    missing = f.pop("none", 5)
    try:
        f.pop("none")
    except KeyError:
        missing += 1
    g = collections.OrderedDict(d)
    g.move_to_end("a")
    item = g.popitem()
    return (d, e, dict(f), missing, list(g), item, d.setdefault("q", 3), d.get("w"), dict.fromkeys(["u", "v"], 1),
            {"a": 1, "b": [2]} == {"b": [2], "a": 1}, {"a": 1} != {"a": 2})


@program
def iterators(x):
    out = [p for p in zip([1, 2, 3], itertools.count(5), strict=False)]
    out += itertools.accumulate([1, 2, 3], operator.mul)
    out += itertools.starmap(pow, [(2, 3), (3, 2)])
    out += itertools.zip_longest([1], [2, 3], fillvalue=0)
    out += itertools.combinations([1, 2, 3], 2)
    out += map(lambda a, b: a + b, [1, 2], [3, 4])
    out += filter(None, [0, 1, 2])
    out += enumerate("ab", 1)
    out += reversed([1, 2])
    out += itertools.islice(itertools.cycle([7, 8]), 1, 4)
    return x + 1, out, sum([1, 2], 5), max([3, 1], key=lambda v: -v), min((), default=4), next(iter(()), 0), divmod(7, 2)


class Vector:
    def __init__(self, *items):
        self.items = list(items)

    def __add__(self, other):
        return Vector(*(a + b for a, b in zip(self.items, other.items)))

    def __radd__(self, other):
        return self if other == 0 else NotImplemented

    def __iadd__(self, other):
        self.items = [a + b for a, b in zip(self.items, other.items)]
        return self

    def __neg__(self):
        return Vector(*(-a for a in self.items))

    def __abs__(self):
        return Vector(*(abs(a) for a in self.items))

    def __eq__(self, other):
        return isinstance(other, Vector) and self.items == other.items

    def __lt__(self, other):
        return self.items < other.items

    def __getitem__(self, index):
        return self.items[index]

    def __setitem__(self, index, value):
        self.items[index] = value

    def __delitem__(self, index):
        del self.items[index]

    def __len__(self):
        return len(self.items)

    def __contains__(self, item):
        return item in self.items

    def __index__(self):
        return self.items[0]

    def __format__(self, spec):
        return f"<{len(self)}{spec}>"

    def __str__(self):
        return "V"


@program
def operators(x):
    v, w = Vector(1, 2), Vector(3, -4)
    s = sum([v, w])
    v += w
    v[0] = 10
    n = -w
    del n[1]
    t = Vector(x, x + 1) + Vector(x, x)
    return (t.items, s.items, v.items, n.items, abs(w).items, v == w, v != w, v < w, v > w, len(v), 10 in v, [*v],
            bool(n), [5, 6, 7, 8][Vector(2)], f"{v:!}{v}", str(w), list(reversed(v)), operator.iadd([1], [2]),
            operator.and_(6, 3), operator.itemgetter(0, 1)(v), operator.attrgetter("items")(w))


class Failure(Exception):
    def __init__(self, code):
        super().__init__(f"code {code}")
        self.code = code


@program
def errors(x):
    found = []
    for action in (lambda: [].pop(), lambda: [1][3], lambda: {}["k"], lambda: {1}.remove(2), lambda: next(iter([])),
                   lambda: (1, 2).index(5), lambda: [1] < ["a"], lambda: int("a"), lambda: sorted([1, "a"])):
        try:
            action()
        except Exception as error:
            found.append(type(error))
    try:
        [1].__setitem__(4, 2)
    except IndexError as error:
        found.append(str(error))
    return x, found


LINEAR = torch.nn.Linear(3, 3)


@program
def hashes_of_objects(x):
    seen = {hash(LINEAR): 1, hash(x): 2}
    return (x * seen[hash(LINEAR)], seen[hash(x)], hash(x) == id(x), hash(LINEAR) == id(LINEAR), hash(LINEAR.weight) == hash(x),
            hash(compare) == hash(compare), hash(LINEAR), hash(id(LINEAR)) == id(LINEAR))


@program
def sizes_of_what_is_no_size(x):
    found = []
    for items in (x, [1.5], [1, "a"], [None], 5, [True, 2], torch.ones(2), range(2), {3: 1}):
        try:
            size = torch.Size(items)
            found.append((size, type(size), [type(n) for n in size]))
        except TypeError as error:
            found.append(str(error))
    return x, found


@pytest.mark.parametrize("function", PROGRAMS, ids=lambda f: f.__name__)
def test_containers(function):
    x = torch.randn(3)
    expected = function(x)
    result = minicompile.compile(function, backend="eager", fullgraph=True)(x)
    compare(result, expected)


def compare(result, expected):
    assert type(result) is type(expected)
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(result, expected)
    elif isinstance(expected, (list, tuple, collections.deque)):
        assert len(result) == len(expected)
        for a, b in zip(result, expected):
            compare(a, b)
        assert getattr(result, "maxlen", None) == getattr(expected, "maxlen", None)
    elif isinstance(expected, dict):
        compare(list(result), list(expected))
        compare(list(result.values()), list(expected.values()))
    else:
        assert result == expected


def test_attribute_of_a_users_exception():
    """`__init__` of an exception is not traced, so its attributes are not known: a break, not an AttributeError."""
    def function(x):
        try:
            raise Failure(3)
        except Failure as error:
            return x + error.code
    x = torch.ones(2)
    torch.testing.assert_close(minicompile.compile(function, backend="eager")(x), x + 3)


def test_warning_with_a_category():
    def function(x):
        warnings.warn("careful", category=DeprecationWarning)
        return x + 1
    with pytest.warns(DeprecationWarning, match="careful"):
        minicompile.compile(function, backend="eager", fullgraph=True)(torch.ones(2))


# ---- id()

class Thing:
    pass


THINGS = [Thing() for _ in range(4)]
STORE = {id(o): i for i, o in enumerate(THINGS[:3])}
SEEN = {id(o) for o in THINGS[:3]}
PAIRS = {(id(o), 1): i for i, o in enumerate(THINGS[:3])}
NUMBERS = [id(o) for o in THINGS[:3]]


def id_looked_up(x, o):
    return (x + 1, id(o) in STORE, id(o) in SEEN, STORE.get(id(o), 7), PAIRS.get((id(o), 1)), id(o) in NUMBERS, id(o) == NUMBERS[0],
            id(o) == 5, id(o) is None, id(o) in {1: 2}, id(o) in (1, 2))


def id_found_in_a_table(x, o):
    def look(o):
        if id(o) in STORE:
            return STORE[id(o)]
        elif isinstance(o, (list, tuple)):
            return [look(part) for part in o]
        raise KeyError(f"no {o} here")
    return x + 1, look(o), look([o, o])


def id_added(x, o):
    SEEN.add(id(o))
    STORE[id(o)] = 9
    y = x + 1
    n = len(SEEN)
    SEEN.discard(id(THINGS[3]))
    return y, n, len(SEEN), sorted(STORE) == sorted(set(STORE)), STORE.pop(id(o)), STORE.setdefault(id(o), 3)


@pytest.mark.parametrize("program", (id_looked_up, id_found_in_a_table, id_added))
def test_ids_of_objects_that_are_in_containers_from_outside(program, fresh):
    def results(f):
        found = []
        for o in THINGS:
            try:
                found.append(repr(f(torch.ones(2), o)))
            except KeyError as error:
                found.append(repr(error))
        return found, list(STORE.values()), len(SEEN)
    saved = dict(STORE), set(SEEN)
    seen = []
    for f in (program, minicompile.compile(program, backend="eager")):
        STORE.clear(), SEEN.clear(), STORE.update(saved[0]), SEEN.update(saved[1])
        seen.append(results(f))
    assert seen[0] == seen[1]


class Filling(dict):
    def __missing__(self, key):
        self[key] = 0
        return 0


@pytest.mark.parametrize("make", [lambda: collections.defaultdict(int), Filling])
def test_guards_do_not_ask_for_missing_items(make):
    """The first version's guards read the item."""
    def f(x, table, on):
        return x + table["n"] if on else x
    compiled, x = minicompile.compile(f), torch.ones(2)
    table = make()
    table["n"] = 3
    assert compiled(x, table, True).tolist() == [4, 4]
    table.clear()
    assert compiled(x, table, False) is x and not table
    assert compiled(x, table, False) is x and not table


def test_what_the_interpreter_raises_is_not_the_programs(monkeypatch):
    """Python's own `sorted` calls the interpreter back; an error of that does not pass for one that the program may catch."""
    def sorts(x):
        try:
            return x + len(sorted([x, x]))
        except LookupError:
            return x

    def broken(*args):
        raise LookupError("ours")

    monkeypatch.setattr(comparisons, "compare", broken)
    with pytest.raises(LookupError, match="ours"):
        minicompile.compile(sorts, backend="eager")(torch.ones(3))


KEYS = [b"a", 1.5, 1j, torch.float32, torch.device("cpu"), (b"a", 1), len, object(), torch.nn.ReLU()]


@pytest.mark.parametrize("key", KEYS, ids=lambda key: type(key).__name__)
@pytest.mark.parametrize("copied", [lambda d: d.copy(), lambda d: d | {"new": 1}, lambda d: {**d}, lambda d: list(d.items())],
                         ids=["copy", "or", "unpacked", "items"])
@pytest.mark.usefixtures("fresh")
def test_items_are_handed_on_that_nobody_has_looked_at(copied, key):
    """At keys that cannot be written down in the code of an entry."""
    fast = minicompile.compile(lambda x, d: (x + 1, copied(d)), backend="eager", fullgraph=True)
    for value in (object(), [1], None):
        made = fast(torch.ones(1), {key: value})[1]
        assert made == copied({key: value})


class Equal:
    def __init__(self, value):
        self.value = value

    def __hash__(self):
        return hash(self.value)

    def __eq__(self, other):
        return isinstance(other, Equal) and self.value == other.value


def test_a_set_leaves_with_objects_of_one_hash():
    def f(x, first, *objects):
        kept = {first, *objects}
        kept.discard(first)
        return x + 1, kept, frozenset({*objects, objects[0].value})
    compiled = minicompile.compile(f, backend="eager", fullgraph=True)
    for values in ((1, 1, 9), (8, 16, 24, 0), (1, 2, 2)):
        inputs = torch.ones(1), *map(Equal, values)
        assert [*map(list, compiled(*inputs)[1:])] == [*map(list, f(*inputs)[1:])]


class Chain(list):
    def __init__(self, *items):
        super().__init__(items)
        self.total = 0

    def __call__(self, x):
        for item in self:
            x = x * item
        return x


class Reckoning(Chain):
    """Its own methods answer something else than what the list holds."""
    def __len__(self):
        return 7

    def __getitem__(self, place):
        found = super().__getitem__(place)
        return found if type(place) is slice else 100 + found

    def __iter__(self):
        return iter([9, *super().__iter__()])

    def append(self, item):
        self.total += 1
        super().append(item * 10)


def reads_items(x, items):
    first, *rest = items
    return (items(x), x * items[0], items[1:], type(items[1:]), len(items), bool(items), [*items], items + [1], items * 2, first, rest,
            items == [2, 3], items < [9], 3 in items, items.index(3), sorted(items), list(reversed(items)), max(items))


def writes_items(x, items):
    items.append(4)
    items.extend([5, 6])
    items.total = len(items)
    return x * items[-1]


def writes_slices(x, items):
    items[0] = items.pop() + 1
    items[1:2] = [7, 8]
    items.insert(0, 5)
    items.sort()
    items += [items[0]]
    return x * items[0]


def is_interrupted(x, items):
    for item in items:
        x = x * item
        print(end="")
    items.append(2)
    print(end="")
    items[0] = 3
    return items(x)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("cls", [Chain, Reckoning])
@pytest.mark.parametrize("f", [reads_items, writes_items, writes_slices, is_interrupted])
def test_a_list_of_a_derived_class_is_one_of_items(f, cls):
    fast = minicompile.compile(f, backend="eager", fullgraph=f is not is_interrupted)
    for items in ((2, 3), (2, 3), (4, 3), (1, 3, 4), (2, 3)):
        one, other, x = cls(*items), cls(*items), torch.ones(2)
        assert str(fast(x, one)) == str(f(x, other))
        assert [*list.__iter__(one)] == [*list.__iter__(other)] and one.total == other.total


@pytest.mark.usefixtures("fresh")
def test_what_is_appended_to_a_list_of_a_derived_class_is_one_version():
    fast = minicompile.compile(lambda x, items: items.append(x.sum()), backend="eager", fullgraph=True)
    kept = Chain()
    fast(torch.zeros(2), kept)
    with minicompile.set_stance("fail_on_recompile"):
        for n in range(1, 5):
            fast(torch.full((2,), float(n)), kept)
    assert kept == [0, 2, 4, 6, 8]


def test_tensors_in_a_list_of_a_derived_class_are_stacked():
    fast = minicompile.compile(lambda items: torch.stack(items) + items[0], backend="eager", fullgraph=True)
    items = Chain(torch.ones(2), torch.zeros(2))
    assert torch.equal(fast(items), torch.tensor([[2., 2.], [1., 1.]]))


class Table(dict):
    pass


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("make, write, read", [
    (lambda: Table(a=1), lambda d: d.update(a=2), lambda d: d["a"]), (lambda: Table(a=1), lambda d: d.update(b=2), len),
    (lambda: Chain(1), lambda c: c.append(2), len), (lambda: Chain(1), lambda c: c.__setitem__(0, 2), lambda c: c[0])])
def test_two_objects_of_a_derived_class_may_be_one_at_another_call(make, write, read):
    def f(x, a, b):
        write(a)
        return x + read(b)
    fast = minicompile.compile(f, backend="eager")
    one, x = make(), torch.zeros(1)
    assert fast(x, make(), make()) == f(x, make(), make())
    assert fast(x, one, one) == 2


@pytest.mark.parametrize("function", [
    lambda d, x: [list(key) for key in d], lambda d, x: d.get(frozenset([8, 0])), lambda d, x: frozenset([1, "a"]) in d,
    lambda d, x: (d.pop(frozenset([1]), None), len(d)), lambda d, x: d.setdefault(frozenset(["a", 1]), x), lambda d, x: dict(d) | {1: 2},
    lambda d, x: d.update({frozenset([1]): x + 1}), lambda d, x: list(d.items())])
def test_frozen_sets_are_keys(function):
    """In any order of their items, and another dictionary is another version."""
    compiled, x = minicompile.compile(function, backend="eager", fullgraph=True), torch.ones(2)
    keys = frozenset([0, 8]), frozenset([8, 0]), frozenset([1, "a"]), frozenset([1]), frozenset(), (frozenset([1]), 2)
    for chosen in ([0], [1], [2], [3], [0, 3], [4, 2], [5, 3]):
        a, b = ({keys[i]: x * i for i in chosen} for _ in range(2))
        assert repr((compiled(a, x), a)) == repr((function(b, x), b))
