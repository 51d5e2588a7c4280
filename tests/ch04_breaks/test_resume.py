"""Resuming at any instruction gives what the whole function gives. Runs as a script where there is no pytest."""
import ctypes
import dis
import importlib.util
import pathlib
import sys
import types

if not importlib.util.find_spec("torch"):              # import the two modules without the package's __init__
    for name in ("minicompile", "minicompile.ch04_breaks"):
        stub = types.ModuleType(name)
        stub.__path__ = [str(pathlib.Path(__file__).resolve().parents[2].joinpath(*name.split(".")))]
        sys.modules[name] = stub

from minicompile.ch04_breaks import bytecode as bc, resume as rs
from minicompile.errors import Unsupported


class Stop(BaseException):
    pass


def stack_depths(code):
    """Offset -> depth of the interpreter's stack before the instruction, by following all paths."""
    instructions, handlers = bc.disassemble(code)
    index = {id(i): n for n, i in enumerate(instructions)}
    depth, work = {}, [(0, 0)] + [(index[id(h.target)], h.depth + h.lasti + 1) for h in handlers]
    while work:
        n, d = work.pop()
        if n in depth or n >= len(instructions):
            continue
        depth[n] = d
        i = instructions[n]
        argument = None if i.op < dis.HAVE_ARGUMENT else i.arg
        if i.target is not None:
            work.append((index[id(i.target)], d + dis.stack_effect(i.op, argument, jump=True)))
        if i.name not in ("RETURN_VALUE", "RETURN_CONST", "RERAISE", "RAISE_VARARGS", "JUMP_FORWARD", "JUMP_BACKWARD"):
            work.append((n + 1, d + dis.stack_effect(i.op, argument, jump=False)))
    return {instructions[n].offset: d for n, d in sorted(depth.items(), reverse=True)}       # of two with one offset, the first


def frame_slots(frame, depth):
    """(variables by name, stack) of a paused frame, as the interpreter holds them: cells as cells, NULL as rs.NULL."""
    internal = ctypes.c_void_p.from_address(id(frame) + 24).value
    names = bc.localsplus_names(frame.f_code)
    top = len(names) + depth
    if sys.version_info < (3, 12):                     # here dis.stack_effect counts PRECALL and CALL differently
        top = ctypes.c_int.from_address(internal + 64).value
    slots = [ctypes.c_void_p.from_address(internal + 72 + 8 * i).value for i in range(top)]
    values = [rs.NULL if not s else ctypes.cast(s, ctypes.py_object).value for s in slots]
    return {n: v for n, v in zip(names, values) if v is not rs.NULL}, values[len(names):]


def run_until(f, args, offset, visit):
    """Run f(*args); before the visit-th time the instruction at offset runs, stop: (locals, stack) or None."""
    state, count, depths = [], [0], stack_depths(f.__code__)

    def trace(frame, event, arg):
        if frame.f_code is not f.__code__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_lasti == offset:
            count[0] += 1
            if count[0] == visit and not state:
                state.append(frame_slots(frame, depths[offset]))
                raise Stop
        return trace

    def stopped():
        """A frame that stops inside its handler's cleanup leaves an exception that is "being handled": a generator keeps it to itself."""
        old = sys.gettrace()
        sys.settrace(trace)
        try:
            f(*args)
        except Stop:
            pass
        finally:
            sys.settrace(old)
        yield

    next(stopped())
    return state[0] if state else None


def resume_with(f, offset, local_values, stack):
    code = f.__code__
    own = [name for name in code.co_varnames if name in local_values and name not in code.co_cellvars]
    kinds = tuple(rs.NULL if v is rs.NULL else rs.VALUE for v in stack)
    point = rs.make_resume(code, offset, bc.live_locals(code, offset) & set(own), kinds)
    target = point.function(f.__globals__, *[local_values.get(n, types.CellType()) for n in point.cells])
    return target(*[local_values[n] for n in point.locals], *[v for v in stack if v is not rs.NULL])


def check_everywhere(f, make_args, visits=(1, 2)):
    """Stop at each instruction, resume there, compare with the whole run. Returns how many points were resumed."""
    expected, resumed = f(*make_args()), 0
    begin = next(i.offset for i in dis.get_instructions(f.__code__) if i.opname == "RESUME")
    for i in bc.disassemble(f.__code__)[0]:
        for visit in visits:
            if i.offset <= begin:
                continue
            state = run_until(f, make_args(), i.offset, visit)
            if state is None:
                continue
            assert resume_with(f, i.offset, *state) == expected, (f.__name__, i.offset, i.name, visit)
            resumed += 1
    return resumed


def straight(a, b):
    c = a * 2 + b
    d = [c, a, (b, c)]
    return max(d[0], len(d), abs(-a)) + sum(d[2])


def branches(a, b):
    if a > b:
        r = "more" if a % 2 else "even more"
    elif a == b and not b:
        r = "zero"
    else:
        r = f"{a!r:>5} less {b}"
    return r, a or b, a and b


def loops(n, m):
    total = 0
    for i in range(n):
        for j in range(m):
            if j == 3:
                continue
            if i * j > 6:
                break
            total += i * j
        else:
            total += 100
    while total > 10:
        total //= 2
    return total


def keywords(a, b, *rest, k=3, **kw):
    def inner(*p, **q):
        return p, sorted(q.items())
    return inner(a, *rest, b, k=k, **kw), inner(**{"z": a}), dict(x=a, **kw)


def closures(a, b):
    x = a

    def add(y):
        nonlocal x
        x += y
        return x

    first = add(b)
    fs = [lambda: x + i for i in range(3)]
    x = x * 2
    return first, add(1), x, [f() for f in fs]


def exceptions(a, b):
    log = []
    for i in (a, 0, b):
        try:
            log.append(10 // i)
            if i == b:
                raise KeyError(i)
        except ZeroDivisionError as error:
            log.append(str(error))
        except (KeyError, ValueError):
            log.append("key")
        else:
            log.append("fine")
    return log


def comprehensions(n, m):
    squares = [i * i for i in range(n) if i % 2]
    table = {i: [j + i for j in range(m)] for i in range(n)}
    return squares, table, {i % 3 for i in squares}, sum(x for x in squares), [y := n, y + 1]


def unpacking(a, b):
    (p, *q), r = ([a, b, a + b], {"k": b})
    p, r["k"] = r["k"], p
    q[0], q[-1] = q[-1], q[0]
    del p
    return q, r, [*q, a], {**r, "m": 1}, a < b < 10, q[0:1], not a, -b, a is b, a in q


def many_locals(a, b):
    c = d = e = g = h = i = j = k = l = m = n = o = p = q = r = s = t = u = a + b
    v, w = r + s, t + u
    for x in range(3):
        y = x + v
        w, v = y, w
    return c + d + e + g + h + i + j + k + l + m + n + o + p + q + r + s + t + u + v + w + y


def outer_function():
    z = 5

    def uses_free(a, b):
        def g(x):
            return x + z + a
        return g(b) + z, z * a
    return uses_free


class Base:
    def __init__(self, n):
        self.n = n

    def value(self, k):
        return self.n + k


class Derived(Base):
    def value(self, k):
        k = k * 2
        first = super().value(k)
        self.n = self.n
        return first, super().value(1), self.n

    def shared(self, k):
        get = lambda: self.n                                             # noqa: E731
        first, at = super().value(k), super()
        return first, at.value(get()), get(), sorted(locals())


FUNCTIONS = [straight, branches, loops, keywords, closures, exceptions, comprehensions, unpacking, many_locals,
             outer_function()]


def with_trace_support(test):
    return test


def test_resume_everywhere():
    total = 0
    for f in FUNCTIONS:
        for args in ((4, 5), (7, 2)):
            visits = (1, 2, 5) if f is loops else (1, 2)
            if f in (exceptions, comprehensions):      # inside a handler or a saved local: not a place to resume
                continue
            total += check_everywhere(f, lambda: args, visits)
    assert total > 700


def check_except(f, args, refused):
    """Like check_everywhere, where some points hold something on the stack that cannot be passed."""
    expected, done = f(*args), 0
    for i in bc.disassemble(f.__code__)[0][2:]:
        state = run_until(f, args, i.offset, 1)
        if state is None or refused(i, state):
            continue
        try:
            assert resume_with(f, i.offset, *state) == expected, (i.offset, i.name)
        except TypeError:
            raise
        done += 1
    return done


def test_resume_around_exceptions():
    """At the points outside of the handlers: try blocks keep their handlers after a resume."""
    inside = set()
    instructions, handlers = bc.disassemble(exceptions.__code__)
    first_handler = min(h.target.offset for h in handlers)
    last = max(h.last.offset for h in handlers)
    for i in instructions:
        if first_handler <= i.offset <= last:
            inside.add(i.offset)
    assert check_except(exceptions, (4, 5), lambda i, state: i.offset in inside) > 15


def test_resume_around_comprehensions():
    def refused(i, state):
        return False
    if sys.version_info >= (3, 12):                    # a local hidden by an inlined comprehension is f_locals' blind spot
        instructions, handlers = bc.disassemble(comprehensions.__code__)
        spans = []
        begin = None
        for i in instructions:
            if i.name == "LOAD_FAST_AND_CLEAR" and begin is None:
                begin = i.offset
            if i.name == "STORE_FAST" and begin is not None and i.arg not in ():
                spans.append((begin, i.offset))
            if i.name in ("RETURN_VALUE", "CALL") and begin is not None:
                begin = None
        refused = lambda i, state: any(a <= i.offset <= b + 4 for a, b in spans)
    assert check_except(comprehensions, (6, 3), refused) > 5


def test_methods_and_super():
    for f in (Derived.value, Derived.shared):
        assert check_everywhere(f, lambda: (Derived(10), 3), (1,)) > 10


class Manager:
    def __init__(self, log):
        self.log = log

    def __enter__(self):
        self.log.append("enter")
        return self

    def __exit__(self, kind, value, traceback):
        self.log.append("exit" if kind is None else kind.__name__)
        return kind is ZeroDivisionError


def test_active_context_is_entered_again():
    def f(m, x):
        before = x + 1
        with m:
            y = before * 2
            y = y // x
        return y, before

    def g(m, x):
        y = None
        with m:
            y = 1 // x
            y = 7
        return y, "survived"

    for function, x in ((f, 4), (g, 0), (g, 1)):
        code = function.__code__
        instructions, _ = bc.disassemble(code)
        loads = [n for n, i in enumerate(instructions) if i.name == "BEFORE_WITH"]
        at = instructions[loads[0] + 2]                # after POP_TOP: the first instruction of the block
        point = rs.make_resume(code, at.offset, {"x", "before", "y"} & set(code.co_varnames), (rs.CONTEXT,))
        values = {"x": x, "before": x + 1, "y": None}
        log = []
        result = point.function(globals())(*[values[n] for n in point.locals], Manager(log))
        plain = []
        assert result == function(Manager(plain), x) and log == plain and len(log) == 2


def test_resume_of_a_resume_uses_the_original():
    code = straight.__code__
    offsets = [i.offset for i in bc.disassemble(code)[0]]
    third = next(i.offset for i in dis.get_instructions(code) if i.opname == "STORE_FAST")
    point = rs.make_resume(code, third, {"a", "b"}, (rs.VALUE,))
    later = next(o for o in offsets if o > third)
    translated = next(k for k, v in rs.origin_of(point.code).offsets.items() if v == later)
    again = rs.make_resume(point.code, translated, {"a", "b", "c"}, ())
    assert again is rs.make_resume(code, later, {"a", "b", "c"}, ())
    assert again.function(globals())(4, 5, 13) == straight(4, 5)
    assert point.call_text("__resume_0", {"a": "x.a", "b": "3"}, ["t"], {}) == \
        f"__function(__resume_0, __G, {point.name!r}, None, ()), (x.a, 3, t, )"


def test_positions_are_kept():
    def f(a):
        b = a + 1
        c = b // 0
        return c

    offset = [i.offset for i in bc.disassemble(f.__code__)[0] if i.position[0] == f.__code__.co_firstlineno + 2][0]
    point = rs.make_resume(f.__code__, offset, {"b"}, ())
    try:
        point.function(globals())(3)
    except ZeroDivisionError as error:
        assert error.__traceback__.tb_next.tb_lineno == f.__code__.co_firstlineno + 2
    old = [p for p in f.__code__.co_positions()]
    assert set(old) - {(None,) * 4} >= {p for p in point.code.co_positions() if p[0]} - {(None,) * 4}


def test_decode_encode_is_the_identity():
    codes = [f.__code__ for f in FUNCTIONS] + [Derived.value.__code__, check_everywhere.__code__, dis.dis.__code__]
    big = "def big(x):\n" + "".join(f"    if x == {i}: x += {i}.5\n" for i in range(400)) + "    return x"
    scope = {}
    exec(big, scope)
    for code in codes + [scope["big"].__code__]:
        instructions, handlers = bc.disassemble(code)
        raw, table, lines = bc.encode(instructions, handlers, code.co_firstlineno)
        if any(i.offset % 2 for i in instructions):                        # 3.13's pairs are taken apart, for good
            again = code.replace(co_code=raw, co_exceptiontable=table, co_linetable=lines)
            assert bc.encode(*bc.disassemble(again), code.co_firstlineno) == (raw, table, lines)
            continue
        assert raw == code.co_code, code.co_name
        assert dis._parse_exception_table(code.replace(co_exceptiontable=table)) == dis._parse_exception_table(code)
        assert list(code.replace(co_linetable=lines).co_positions()) == list(code.co_positions())


def test_large_functions_need_extended_arguments():
    lines = "".join(f"    v{i} = a + {i}\n" for i in range(300))
    text = f"def f(a, n):\n{lines}    for i in range(n):\n" + "".join(
        f"        v{i} = v{i} + i\n" for i in range(300)) + "    return " + " + ".join(f"v{i}" for i in range(300))
    scope = {}
    exec(text, scope)
    f = scope["f"]
    instructions = bc.disassemble(f.__code__)[0]
    for n in range(10, len(instructions), len(instructions) // 12):
        state = run_until(f, (3, 2), instructions[n].offset, 1)
        if state:
            assert resume_with(f, instructions[n].offset, *state) == f(3, 2)


def test_liveness():
    def f(a, b):
        c = a + b
        if c > 0:
            d = b
        else:
            d = 1
        a = d
        return a

    def at(line):
        return min(i.offset for i in bc.disassemble(f.__code__)[0] if i.position[0] == f.__code__.co_firstlineno + line)

    assert bc.live_locals(f.__code__, at(1)) == {"a", "b"}
    assert bc.live_locals(f.__code__, at(2)) == {"b", "c"}
    assert bc.live_locals(f.__code__, at(6)) == {"d"}


def test_refusals():
    def g():
        yield 1
    for arguments in ((g.__code__, 4, set(), ()), (straight.__code__, 99998, set(), ()),
                      (straight.__code__, 4, set(), ("exception",))):
        try:
            rs.make_resume(*arguments)
        except Unsupported as error:
            assert error.reason
        else:
            raise AssertionError


if __name__ == "__main__":
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test()
            print("ok", name)
