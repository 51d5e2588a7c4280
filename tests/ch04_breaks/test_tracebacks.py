"""An exception that the trace has raised leaves it with the traceback that CPython would have collected."""
import contextlib
import gc
import sys
import traceback
import weakref

import pytest
import torch

import minicompile

pytestmark = pytest.mark.usefixtures("fresh")


class Refused(Exception):
    pass


def refuse(x, reason="no"):
    if x.shape[0] == 3:
        raise Refused(
            reason, x.shape[0])
    return x


def text_is_asked_for(x):
    try:
        refuse(x)
    except Refused:
        return x + 1, traceback.format_exc()


def leaves_in_the_result(x):
    try:
        refuse(x, "longer"), 1
    except Refused as error:
        found = error
    return x * 2, found


def leaves_by_an_attribute(x, kept=[]):  # noqa: B006
    try:
        {}[x.shape]
    except KeyError as error:
        kept.append(error)
    return x * 2, kept.pop()


def is_raised_again(x):
    try:
        try:
            refuse(x)
        except Refused:
            x = x + 1
            raise
    except Refused as error:
        print(end="")
        return x, error


def is_raised_by_name(x):
    try:
        try:
            refuse(x)
        except Refused as error:
            raise error
    except Refused as error:
        return x * 2, error


def has_a_cause(x):
    try:
        try:
            refuse(x)
        except Refused as error:
            raise ValueError("outer") from error
    except ValueError as error:
        return x * 2, error


def has_a_context(x):
    try:
        try:
            [][x.shape[0]]
        finally:
            int("many")
    except ValueError as error:
        return x * 2, error


def comes_through_closures(x):
    def inner(y):
        return refuse(x + y)
    try:
        return [inner(a) for a in (x, x)]
    except Refused as error:
        return x * 2, error


def comes_through_a_generator(x):
    def parts():
        try:
            yield x
            yield refuse(x)
        finally:
            x.shape
    try:
        for part in parts():
            x = x + part
    except Refused as error:
        return x * 2, error


def is_thrown_into_a_generator(x):
    def parts():
        yield x
    running = parts()
    try:
        next(running)
        running.throw(Refused("thrown"))
    except Refused as error:
        return x * 2, error


@contextlib.contextmanager
def translated():
    try:
        yield
    except KeyError as error:
        raise ValueError("translated") from error


def comes_through_a_context(x):
    try:
        with contextlib.ExitStack() as stack, translated():
            stack.enter_context(translated())
            raise Refused(1, 2)
    except Refused as error:
        return x * 2, error, error.args


def is_translated_by_a_context(x):
    try:
        with translated():
            raise KeyError(x.shape[0])
    except ValueError as error:
        return x * 2, error, error.__cause__.args


def is_thrown_with_its_class(x):
    def parts():
        yield x
    try:
        parts().throw(KeyError, KeyError("own"), None)
    except KeyError as error:
        return x * 2, error, error.args


def comes_after_a_break(x):
    print(end="")
    try:
        with contextlib.nullcontext():
            refuse(x)
    except Refused as error:
        print(end="")
        return x * 2, error, sys.exc_info()[2] is error.__traceback__


def loses_it(x):
    try:
        refuse(x)
    except Refused as error:
        return x * 2, error.with_traceback(None), KeyError(1).with_traceback(None)


def was_never_raised(x):
    return x * 2, Refused("kept")


PROGRAMS = [text_is_asked_for, leaves_in_the_result, leaves_by_an_attribute, is_raised_again, is_raised_by_name, has_a_cause, has_a_context,
            comes_through_closures, comes_through_a_generator, is_thrown_into_a_generator, comes_through_a_context,
            is_translated_by_a_context, is_thrown_with_its_class, comes_after_a_break, loses_it, was_never_raised]


def told(error) -> str:
    return "".join(traceback.format_exception(error)) if isinstance(error, BaseException) else str(error)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda f: f.__name__)
def test_traceback(program):
    compiled = minicompile.compile(program)
    for x in (torch.ones(3), torch.zeros(3)):
        result, *others = program(x)
        got, *found = compiled(x)
        assert torch.equal(got, result) and list(map(told, found)) == list(map(told, others))


def test_what_frames_of_a_traceback_hold():
    """Debuggers and reporters look at them; no locals are in them, and no callers."""
    def program(x):
        def inner():
            return refuse(x)
        try:
            inner()
        except Refused as error:
            return x * 2, error

    x = torch.ones(3)
    _, error = minicompile.compile(program)(x)
    gone = weakref.ref(x)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    assert [f.f_code.co_name for f in frames] == ["program", "inner", "refuse"] and frames[2].f_code is refuse.__code__
    for frame in frames:
        assert frame.f_globals is globals() and dict(frame.f_locals) == {} and frame.f_back is None
        frame.clear()
    "".join(traceback.TracebackException.from_exception(error, capture_locals=True).format())
    del x, _
    assert gone() is None
    del error, frames, frame
    gc.collect()
