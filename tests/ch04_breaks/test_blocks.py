"""A break inside blocks, in all combinations: two blocks around a statement whose callable is an argument, what that callable gives or
raises, and how the statement goes on. Results, the order of side effects and the modes that each sees are those of eager."""
import contextlib
import itertools
import random

import pytest
import torch

import minicompile

pytestmark = pytest.mark.usefixtures("fresh")

LOG = []


def note(word, value=None):
    LOG.append((word, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
    return value


class Note:
    """A context manager of the program, which swallows what it is told to."""
    def __init__(self, swallows=()):
        self.swallows = swallows

    def __enter__(self):
        note("enter")
        return self

    def __exit__(self, kind, error, trace):
        note(f"exit {kind and kind.__name__}")
        return kind is not None and issubclass(kind, self.swallows)


@contextlib.contextmanager
def generated():
    note("begin")
    try:
        yield 2
    finally:
        note("end")


BLOCKS = {
    "grad": ["with torch.no_grad():", "    {}"],
    "autocast": ["with torch.autocast('cpu', torch.bfloat16):", "    {}"],
    "two": ["with torch.no_grad(), torch.enable_grad() as m:", "    {}"],
    "note": ["with Note() as m:", "    {}"],
    "swallow": ["with Note(ValueError):", "    {}"],
    "generated": ["with generated() as m:", "    {}"],
    "mixed": ["with torch.no_grad(), Note():", "    {}"],
    "finally": ["try:", "    {}", "finally:", "    note('finally')", "    y = y + 1"],
    "except": ["try:", "    {}", "except ValueError as e:", "    note(f'caught {e}')", "    y = y * 3"],
    "handler": ["try:", "    raise KeyError('first')", "except KeyError as e:", "    {}", "    note(f'after {e}')"],
    "last": ["try:", "    note('try')", "finally:", "    {}"],
    "else": ["try:", "    note('try')", "except ValueError:", "    pass", "else:", "    {}"],
    "for": ["for i in range(3):", "    {}", "    y = y + i"],
    "items": ["for k, v in {'a': 1, 'b': 2}.items():", "    {}", "    y = y * v"],
    "while": ["n = 0", "while n < 2:", "    n += 1", "    {}"],
    "plain": ["y = y.sin()", "{}"],
}
STATEMENTS = {
    "return": ["return f(y)"],
    "return_star": ["return f(*args)"],
    "return_keyword": ["return f(y, scale=2)"],
    "return_part": ["return (y.sin(), f(y), n)"],
    "return_of_two": ["return y + as_tensor(f(y)) * as_tensor(f(x))"],
    "return_none": ["f(y)", "return"],
    "assign": ["y = y + as_tensor(f(y))"],
    "unpack": ["y, n = y.cos(), f(*args, **named)"],
    "again": ["y = as_tensor(f(as_tensor(f(y)).sin()))"],
    "test": ["if bool(as_tensor(f(y)).sum() > 0):", "    return y * 2", "y = y - 1"],
    "raise": ["f(y)", "raise ValueError('mine')"],
    "closure": ["y = (lambda: y * 2 + as_tensor(f(y)))()"],
    "comprehension": ["y = sum([as_tensor(f(y)) * k for k in range(2)])"],
    "inner": ["y = inner(f, y)"],
}
IN_LOOPS = {
    "break": ["if f(y) is not None:", "    break"],
    "continue": ["f(y)", "continue"],
    "return_in_with": ["with torch.no_grad():", "    with Note():", "        return f(y)"],
}
LOOPS = ("for", "items", "while")


def inner(f, y):
    with torch.no_grad():
        return as_tensor(f(y)) + y


def as_tensor(value):
    return value if isinstance(value, torch.Tensor) else torch.ones(2, 2)


@minicompile.disable
def gives_tensor(y, scale=1):
    return note("called", y * scale)


@minicompile.disable
def gives_none(y, scale=1):
    note("called")


@minicompile.disable
def gives_object(y, scale=1):
    return note("called", [scale, "text"])


@minicompile.disable
def raises_value(y, scale=1):
    note("called")
    raise ValueError("theirs")


@minicompile.disable
def raises_second(y, scale=1):
    note("called")
    if sum(word == "called" for word, *_ in LOG) > 1:
        raise IndexError("second")
    return y


@minicompile.disable
def gives_view(y, scale=1):
    """A lazily negated view, which breaks whatever compiled code it enters."""
    return note("called", torch.complex(y, y * scale).conj().imag)


CALLABLES = {"view": gives_view, "tensor": gives_tensor, "none": gives_none, "object": gives_object, "raises": raises_value,
             "second": raises_second, "traced": lambda y, scale=1: y.t() * scale, "builtin": lambda y, scale=1: print(end="") or y}


def nested(outer, inner):
    """The lines of `outer`, with those of `inner` in its place."""
    for line in outer:
        if line.endswith("{}"):
            yield from (line[:-2] + more for more in inner)
        else:
            yield line


def source(blocks, statement) -> str:
    lines = {**STATEMENTS, **IN_LOOPS}[statement]
    for block in reversed(blocks):
        lines = list(nested(BLOCKS[block], lines))
    return "\n".join(["def program(f, x, args, named):", "    y, n = x * 2, None", *("    " + line for line in lines), "    return y, n"])


def programs():
    for blocks in itertools.product(BLOCKS, BLOCKS):
        for statement in (*STATEMENTS, *(IN_LOOPS if set(blocks) & set(LOOPS) else ())):
            yield blocks, statement


def outcome(function, f, x):
    LOG.clear()
    try:
        result = function(f, x, (x,), {"scale": 3})
    except Exception as error:
        result = type(error), str(error), repr(error.__context__)
    shown = [(v.tolist(), v.requires_grad, v.dtype) if isinstance(v, torch.Tensor) else v
             for v in (result if isinstance(result, tuple) else (result,))]
    return shown, list(LOG), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")


def check(blocks, statement, kinds):
    text = source(blocks, statement)
    namespace = dict(globals())
    exec(compile(text, f"<{statement} in {' in '.join(blocks)}>", "exec"), namespace)
    program = namespace["program"]
    compiled = minicompile.compile(program, backend="eager")
    for kind in kinds:
        for x in (torch.ones(2, 2), -torch.ones(2, 2, requires_grad=True)):
            assert outcome(compiled, CALLABLES[kind], x) == outcome(program, CALLABLES[kind], x), f"{kind}:\n{text}"


@pytest.mark.parametrize("part", range(6))
def test_a_break_inside_blocks(part):
    """A sample of the search; `python tests/ch04_breaks/test_blocks.py` makes the whole one."""
    rng = random.Random(part)
    for blocks, statement in rng.sample(list(programs()), 7):
        check(blocks, statement, ["view", *rng.sample(list(CALLABLES)[1:], 2)])


if __name__ == "__main__":
    import sys
    minicompile.config.raise_on_internal_error = True
    part, parts = (int(v) for v in sys.argv[1:] or (0, 1))
    failed = 0
    for n, (blocks, statement) in enumerate(programs()):
        if n % parts == part:
            try:
                check(blocks, statement, CALLABLES)
            except Exception as error:
                failed += 1
                print(blocks, statement, type(error).__name__, str(error)[:1500], flush=True)
            if n % 100 == 0:
                minicompile.reset()
    print(n + 1, "programs,", failed, "differ")
