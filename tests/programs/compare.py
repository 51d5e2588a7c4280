"""Runs a module twice from equal state, plain and compiled, and says what differed.

After each call everything that the program can see is photographed as plain data: what was returned or raised, what was printed,
the arguments, the module's globals. A tensor is photographed with its metadata, its gradient and *which other tensors share its memory*; an
object that is met again is recorded as "the one met before", so that aliasing is compared, too."""
from __future__ import annotations

import ast
import collections
import contextlib
import enum
import functools
import io
import marshal
import re
import signal
import sys
import types
import warnings

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

import minicompile
from minicompile import frames, logs, marks
from minicompile.ch01_graphs.graph import history_of
from minicompile.ch05_autograd import region
from minicompile.ch11_runtime import host

from .cuts import cutting
from .noise import Noise, Overlaps, Trimmed

SKIPPED = {"__builtins__", "__name__", "__doc__", "__package__", "__loader__", "__spec__", "__annotations__", "__warningregistry__",
           "entry", "drive"}
OPAQUE = (types.ModuleType, types.BuiltinFunctionType, types.GeneratorType, staticmethod, classmethod, property, functools.cached_property,
          types.MethodDescriptorType, types.WrapperDescriptorType, types.MemberDescriptorType, types.GetSetDescriptorType)
ATOMS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, range, type(Ellipsis))
UNBOUND = re.compile("cannot access (local|free) variable")
FRAMES = re.compile(r"\nException raised from .*|(?<=already been freed\)\.) .*", re.DOTALL)
ADDRESS = re.compile(r"0x[0-9a-f]+")
NODE = re.compile(r"grad_fn=<\w+>")            # one node of a compiled region stands for many
INVALID = re.compile(r"Function '?\w+'? returned (an invalid gradient|nan values).*", re.DOTALL)    # the same, nor are its inputs
NONDETERMINISTIC = "does not have a deterministic"
LATE_HOOK = re.compile(r"\w+\.register_hook\(lambda g: None if g is None else g \* 0\.5\) if \w+\.grad_fn is not None else None")
STRIDED = "must have contiguous last dimension"        # what attention on a GPU says of one column, which a graph may have copied
OVERWRITTEN = ("backward raised one of the variables needed for gradient computation has been",
               "backward raised Trying to use a saved tensor that has been detached in-place")
SAVED = "modified by an inplace operation", "already unpacked once"
TWICE = "one of its inputs was modified in place since"         # where a second derivative is asked for, with an error of ours
NAMED = re.compile(r"(?<=modified by an inplace operation: )\[torch.*", re.DOTALL)      # another tensor may be the first to be noticed
# What CPU kernels say of an index that is not there, or of a probability that is none.
OUTSIDE = ("out of", "valid range", "invalid max index", "Class values", "probability tensor", "p_in >= 0", "between 0 and 1")
OF_A_GRADIENT = "backward raised Tensor must have a last dimension with stride 1"         # eager's formula for `view_as_real`
OF_A_VIEW = re.compile(r"Can't detach views in-place|Output \d+ of \w+ is a view and its base or another")
NO_NODE = "out != nullptr INTERNAL ASSERT FAILED"
BEYOND = "setStorage: sizes"                    # what `as_strided` is told that asks for more memory than there is
OF_A_GPU = "not implemented for", "not correctly aligned"       # its kernels are not asked
JUDGING = 240.0         # seconds of processor time
REFUSED = *OUTSIDE, "ZeroDivision"             # on a GPU no kernel refuses a zero, so that is nothing to keep from one
PARTS = {"torch.complex64": "torch.float32", "torch.complex128": "torch.float64", "torch.complex32": "torch.float16"}
HOOKS = {"_backward_hooks", "_forward_hooks"}   # by the numbers of all hooks of the process, of which a capture registers some
INTERNAL = {*HOOKS, "_parameters", "_buffers", "_modules"}


class Photo:
    """One moment. seen: id -> number in order of discovery; owners: storage -> number. exact: note the strides of
    dims of size 1, too, which address nothing and which only capture preserves."""

    def __init__(self, module: str, exact: bool):
        self.module, self.exact, self.seen, self.storages, self.keep = module, exact, {}, {}, []

    def of(self, x, depth=0):
        kind = type(x)
        if kind in ATOMS:
            return kind.__name__, repr(x) if kind is not float else x
        if depth > 12 or isinstance(x, OPAQUE):
            return "opaque", kind.__name__
        if isinstance(x, enum.Enum):
            return "enum", str(x)
        if id(x) in self.seen:
            return "met before", self.seen[id(x)]
        if kind is not tuple:
            self.seen[id(x)] = len(self.seen)
            self.keep.append(x)
        down = depth + 1
        if isinstance(x, torch.Tensor):
            return self.tensor(x, down)
        if isinstance(x, type):
            if getattr(x, "__module__", None) != self.module:
                return "class", x.__name__
            return "class", x.__name__, {k: self.of(v, down) for k, v in list(vars(x).items())
                                         if not k.startswith("__") and k != "_abc_impl" and not isinstance(v, types.FunctionType)}
        if isinstance(x, types.FunctionType):
            x = marks.original(x)
            if x.__module__ != self.module:
                return "function", x.__name__
            cells = [self.of(c.cell_contents, down) if filled(c) else "empty" for c in x.__closure__ or ()]
            rest = self.of(x.__defaults__, down), self.of(x.__kwdefaults__, down), self.of(vars(x), down)
            return "function", x.__qualname__, dict(zip(x.__code__.co_freevars, cells)), rest
        if isinstance(x, types.MethodType):
            return "method", x.__func__.__name__, self.of(x.__self__, down)
        if isinstance(x, functools.partial):
            return "partial", self.of(x.func, down), self.of(x.args, down), self.of(x.keywords, down)
        if isinstance(x, BaseException):
            return "exception", kind.__name__, self.of(x.args, down), self.of(vars(x), down), type(x.__cause__).__name__
        content, module = None, getattr(kind, "__module__", "")
        if isinstance(x, dict):
            factory = getattr(x, "default_factory", None)
            content = [(self.of(k, down), self.of(v, down)) for k, v in x.items()], getattr(factory, "__name__", None)
        elif isinstance(x, (set, frozenset)):
            content = sorted(repr(self.of(v, down)) for v in x)
        elif isinstance(x, (list, tuple, collections.deque)):
            content = [self.of(v, down) for v in x], getattr(x, "maxlen", None)
        slots = [(s, self.of(getattr(x, s), down)) for c in kind.__mro__ for s in vars(c).get("__slots__", ())
                 if isinstance(s, str) and hasattr(x, s)] if module == self.module else []
        state = getattr(x, "__dict__", None) if module == self.module or module.startswith("torch.nn") else None
        if state is not None:
            state = {k: self.of(list(v.values()) if k in HOOKS and v else v, down) for k, v in state.items()
                     if not k.startswith("_") or k in INTERNAL}
        return kind.__name__, content, slots, state

    def tensor(self, t, depth):
        # where a tensor begins in memory that only it has tells nothing: offsets count from the first tensor seen there
        storage, first = self.storages.setdefault(t.untyped_storage()._cdata, (len(self.storages), t.storage_offset()))
        leaf, strides = is_leaf(t), tuple([s if n != 1 or self.exact else None for n, s in zip(t.shape, t.stride())])
        info = (str(t.dtype), tuple(t.shape), strides if t.numel() > 1 else (), t.storage_offset() - first,
                t.requires_grad, leaf, t.is_inference())
        plain = t.detach().clone() if t._is_zerotensor() else t.detach()       # autograd's zeros have no memory
        if t.is_complex() and not self.exact:       # a sum multiplies by 1 + 0j: NaN in one part comes to the other by the order of sums
            plain = torch.where(plain.isnan(), complex("nan+nanj"), plain)
        values = (torch.view_as_real(plain.resolve_conj()) if t.is_complex() else plain).flatten().tolist()
        return "tensor", type(t).__name__, storage, info, values, None if leaf is not True else self.of(t.grad, depth)


def is_leaf(t):
    """Autograd refuses to say so of a view that an in-place operation has invalidated."""
    try:
        return t.is_leaf
    except RuntimeError as error:
        return str(error)[:60]


def plain_words(argument):
    """A function that goes on after a graph break has its cells as free variables, and the words of an unbound one differ. Some errors of
    PyTorch list the C++ functions through which they came, and the advice about a graph that is used up says where it was used."""
    if type(argument) is not str:
        return argument
    return FRAMES.sub("", NAMED.sub("", UNBOUND.sub("cannot access variable", argument)).replace(" in enclosing scope", ""))


def filled(cell) -> bool:
    try:
        cell.cell_contents
    except ValueError:
        return False
    return True


def same_bytes(a, b) -> bool:
    """Whether two photographs are written alike. Nearly all are, and to look for a difference takes ten times as long."""
    try:
        return type(a) is type(b) and marshal.dumps(tuple(a), 2) == marshal.dumps(tuple(b), 2)     # later versions note what is one object
    except ValueError:
        return False


def difference(a, b, path="", others=()):
    """The place and the two values where two photographs differ, or None. others: photographs of runs that are as right as
    `a` is; what differs among these is not for `b` to agree with."""
    if not path and same_bytes(a, b):
        return None
    if any(type(o) is not type(a) for o in others):
        return None
    if type(a) is not type(b):
        return path, a, b
    if isinstance(a, dict):
        if any(list(o) != list(a) for o in others):
            return None
        if list(a) != list(b):
            return path + ".keys", list(a), list(b)
        return next(filter(None, (difference(a[k], b[k], f"{path}.{k}", [o[k] for o in others]) for k in a)), None)
    if isinstance(a, (list, tuple)):
        if any(len(o) != len(a) for o in others):
            return None
        if len(a) != len(b):
            return path + ".length", a, b
        if len(a) == 6 and a[0] == "tensor" and others and a[3] == b[3]:
            return numbers_differ(a[4], b[4], path, [o[4] for o in others], PARTS.get(a[3][0], a[3][0])) or \
                difference((*a[:4], a[5]), (*b[:4], b[5]), path, [(*o[:4], o[5]) for o in others])
        return next(filter(None, (difference(x, y, f"{path}[{i}]", [o[i] for o in others]) for i, (x, y) in enumerate(zip(a, b)))), None)
    if isinstance(a, float):
        return numbers_differ([a], [b], path, [[o] for o in others], "torch.float32")
    return None if a == b or any(o != a for o in others) else (path, a, b)


def numbers_differ(a, b, path, others, dtype: str):
    """The same for lists of numbers. Floats may be as far apart as four times the others are, plus a rounding error, and
    anything where the others are a tenth of the largest number apart, but for halves, of which a rounding alone may be as much."""
    if a == b:
        return None
    if not others or "float" not in dtype or len({len(a), len(b), *map(len, others)}) > 1:
        place = next((i for i, (x, y, *rest) in enumerate(zip(a, b, *others))
                      if (x != y and not (x != x and y != y)) and all(r == x for r in rest)), None)
        return None if place is None else (f"{path}[{place}]", a[place], b[place])
    a, b, others = (torch.tensor(v, dtype=torch.float64) for v in (a, b, others))
    kinds = a.isfinite(), a.isnan()
    decided = ((others.isfinite() == kinds[0]) & (others.isnan() == kinds[1]) & (kinds[0] | kinds[1] | (others == a))).all(0)
    both = a.isfinite() & b.isfinite()
    eps, scale = torch.finfo(getattr(torch, dtype.removeprefix("torch."))), a[a.isfinite()].abs().amax() if a.isfinite().any() else 0.0
    slack = (2.0 if eps.bits < 32 else 8.0) * eps.eps * (a.abs() + scale)
    slack += max(4 * eps.smallest_normal * eps.eps, 128 * torch.finfo(torch.float32).smallest_normal)   # a GPU has zeros below it
    spread = (others - a).abs().amax(0)
    near = both & ((a - b).abs() <= 4 * spread + slack)
    if eps.bits >= 32:
        near |= both & (spread >= 0.1 * max(scale, 0.1))        # a tenth of it all: roundings made it
    wrong = (decided & ~(near | (a == b) | (a.isnan() & b.isnan()))).nonzero().flatten().tolist()
    return (f"{path}[{wrong[0]}] and {len(wrong) - 1} more", a[wrong[0]].item(), b[wrong[0]].item()) if wrong else None


def tensors_in(x, found, depth=0):
    if isinstance(x, torch.Tensor):
        found.append(x)
    elif isinstance(x, (list, tuple)) and depth < 3:
        for item in x:
            tensors_in(item, found, depth + 1)
    elif type(x) is dict and depth < 3:
        tensors_in(list(x.values()), found, depth + 1)
    return found


def gradients_behind(tensors) -> list:
    """(leaf, its gradient, a copy of that) for each leaf that a backward from `tensors` reaches."""
    found, seen, pending = [], set(), [t.grad_fn for t in tensors]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        pending.extend(before for before, _ in node.next_functions)
        if hasattr(node, "variable"):
            gradient = node.variable.grad
            found.append((node.variable, gradient, None if gradient is None else gradient.clone()))
    return found


def ramp(t):
    """Weights for the elements of a result, so that its gradient is not the same everywhere."""
    return torch.linspace(0.5, 1.5, t.numel(), dtype=t.dtype, device=t.device).reshape(t.shape)


def real(z):
    return z.real + 2 * z.imag if z.is_complex() else z


class Shot(tuple):
    """The photographs after one call. error: what was raised, in full."""
    error = ""


def execute(code, compile_, *, words=True, around=contextlib.nullcontext, before_backward=lambda results, shown: None) -> list:
    """The photographs of one run of a module: one per call, and the last. words: compare the texts of exceptions, and
    the strides that address nothing. around: a context for what is called, and for its backward. before_backward: is told of
    what is differentiated, and of all that was photographed just before."""
    name = "random_program"
    module = sys.modules[name] = types.ModuleType(name)          # dataclasses look themselves up there
    space, shots, out = module.__dict__, [], io.StringIO()

    def printed(text):
        return ADDRESS.sub("", text) if words else NODE.sub("grad_fn", ADDRESS.sub("", text))

    def shoot(what, result, args, error=""):
        photo = Photo(name, words)
        state = {k: v for k, v in space.items() if k not in SKIPPED and not isinstance(v, types.ModuleType)}
        shots.append(Shot((what, photo.of(result), photo.of(list(args)), {k: photo.of(v) for k, v in state.items()},
                           printed(out.getvalue()), torch.is_grad_enabled(), type(sys.exc_info()[1]).__name__)))
        shots[-1].error = error
        return photo.keep

    def call(function, *args, **kwargs):
        result, said = None, ""
        try:
            with around():
                result = function(*args, **kwargs)
            what = "returned"
        except Exception as error:
            if isinstance(error, minicompile.MinicompileError) and TWICE not in str(error):
                raise
            chain = [type(error).__name__, *(type(e).__name__ for e in (error.__cause__, error.__context__)), error.__suppress_context__]
            said, result = str(error), {"args": [plain_words(a) for a in error.args] if words else None, "state": vars(error)}
            what = "raised " + " ".join(map(str, chain)).replace("UnboundLocalError", "NameError")
            if isinstance(error, AssertionError) and error.__traceback__ is None:
                raise
        shown = shoot(what, result, [*args, kwargs], said)
        if what == "returned" and torch.is_grad_enabled():
            wanted = [t for t in tensors_in(result, []) if t.requires_grad and is_leaf(t) is False][:8]
            turn = sum(shot[0] == "returned" for shot in shots) % 3         # of some results nobody asks for a gradient
            wanted = (wanted[2:], wanted, wanted[:1])[turn] or wanted
            if wanted:
                before = gradients_behind(wanted)
                before_backward(wanted, shown)
                try:
                    loss = sum(real((t * ramp(t)).sum()) for t in wanted)
                    with around():
                        loss.backward(retain_graph=True)
                    what = "backward"
                except (RuntimeError, IndexError, AssertionError) as error:      # a checkpoint asserts
                    what = "backward raised " + INVALID.sub(r"returned \1", str(error))[:70]
                    for leaf, gradient, copy in before:         # how far the engine had come is not for the program to know
                        leaf.grad = gradient if copy is None else gradient.copy_(copy)
                shoot(what, None, [*args, kwargs])
        return result

    def everywhere(function):
        """It may be called in a thread of the program, where the context of the caller is not."""
        @functools.wraps(function)
        def run(*args, **kwargs):
            with contextlib.nullcontext() if _get_current_dispatch_mode() else around():
                return function(*args, **kwargs)
        return run if isinstance(around(), TorchDispatchMode) else function

    torch.manual_seed(0)
    torch.utils.hooks.RemovableHandle.next_id = 0
    grad = torch.is_grad_enabled()
    with contextlib.redirect_stdout(out), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            exec(code, space)
            space["drive"](lambda f: everywhere(compile_(f)), call)
            shoot("end", None, [])
        except INTERNAL_ERRORS as error:
            raise Internal(error) from error
        finally:
            torch.set_grad_enabled(grad)
            torch.autograd.set_detect_anomaly(False)
    return shots


class Internal(Exception):
    """The compiled run failed outside of a call of the program."""


INTERNAL_ERRORS = (minicompile.MinicompileError,)


class TooLong(BaseException):
    """A program (made by the reducer, say) does not end."""


def ring(*_):
    raise TooLong


def check(text: str, backend="eager", statistics=None, seconds=60.0, **settings):
    """None, or (kind, explanation) of the first difference between the plain and the compiled run of a module, which may
    take so many seconds of processor time."""
    old = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        with cutting(text):
            return compare(text, backend, statistics, settings)
    except TooLong:
        return "too long", "it did not end"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, old)


def dirty(*args, **kwargs):
    """New memory that holds what no right program computes: NaN, or the largest integer."""
    out = torch.empty_strided(*args, **kwargs)
    if out.is_floating_point() or out.is_complex():
        return out.fill_(float("nan"))
    return out.fill_(True if out.dtype is torch.bool else torch.iinfo(out.dtype).max)


def compare(text, backend, statistics, settings):
    code = compile(text, "<random program>", "exec")
    try:
        plain = execute(code, lambda f: f, words=backend == "eager")
    except TooLong:                                     # there is nothing to compare with
        return None
    graphs, reasons, problems = [], [], []
    minicompile.reset()
    original = frames.compile_frame
    if backend not in ("eager", "aot_eager", "decomposed") and (options := re.search("^OPTIONS = ({.+})", text, re.M)):
        settings = {"options": ast.literal_eval(options[1]), **settings}        # that begin to matter where there are loops
    compiler = functools.partial(minicompile.compile, backend=backend, **settings)

    def compile_frame(state, function, args):
        from minicompile.errors import GraphBreakError, RecompileError, Unsupported
        try:
            return original(state, function, args)
        except (Unsupported, GraphBreakError, RecompileError):
            raise
        except Exception as error:
            problems.append(error)
            raise

    def observe(kind, captured=None, **data):
        if kind == "captured":
            graphs.append(captured.gm is not None)         # not `captured`: it holds what the program is to drop, as a generator
            reasons.extend(str(b.reason) for b in captured.breaks)

    logs.watchers.append(observe)
    frames.compile_frame, host.allocate = compile_frame, dirty
    try:
        with noticing_writes() as refused:
            compiled = execute(code, compiler, words=backend == "eager")
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, SystemExit, TooLong)):
            raise
        compiled = None
        problems.append(error)
    finally:
        logs.watchers.remove(observe)
        frames.compile_frame, host.allocate = original, torch.empty_strided
        minicompile.reset()
    if statistics is not None:
        statistics.update(graphs=sum(graphs), breaks=reasons, calls=sum(s[0] == "returned" for s in plain),
                          raised=sum(s[0].startswith("raised") for s in plain))
    if problems:
        error = problems[0]
        place = error.__traceback__
        while place.tb_next is not None:
            place = place.tb_next
        where = f"{place.tb_frame.f_code.co_filename.split('/')[-1]}:{place.tb_frame.f_code.co_name}:{place.tb_lineno}"
        return f"internal {type(error).__name__} at {where}", f"{type(error).__name__}: {error}"
    others, known = [], {}
    behind = ".data" in text and reasons                    # what it writes may belong to an earlier graph
    for number, (a, b) in enumerate(zip(plain, compiled)):
        endless = a[0].startswith("raised RecursionError")
        if backend != "eager" and a[0].startswith(OVERWRITTEN) and b[0] == "backward":
            return None                                      # a functional graph saves the value from before the write
        if b[0].startswith("raised OutOfRange ") and a[0].startswith(
                ("raised IndexError ", *["raised RuntimeError "] * any(words in a.error for words in OUTSIDE))):
            b = Shot((b[0].replace("OutOfRange", a[0].split()[1]), *b[1:]))         # it is both
        if refused and a[0] == "backward" and b[0].startswith(OVERWRITTEN):
            return None                                      # or a result that is written behind a break
        if (backend != "eager" or "checkpoint(" in text) and b[0] == "returned" and any(words in a.error for words in SAVED):
            return None                                      # the same where the program itself differentiates
        if TWICE in b.error and SAVED[0] in a.error:
            return None                                      # both have noticed a write
        if refused and a[0] == "returned" and SAVED[0] in b.error:
            return None                                      # or a parameter is, from which a second derivative is to be computed
        if backend != "eager" and reasons and OF_A_VIEW.match(a.error) and b[0] == "returned":
            return None                                      # a view of eager may be a tensor of its own, or not be read: see README
        if NO_NODE in b.error and "retain_grad()" in text and reasons:
            return None                                      # of a result other than a graph's first, which is written then: see README
        if "INTERNAL ASSERT FAILED" in a[0] and a[0].split()[:2] == b[0].split()[:2] == ["backward", "raised"]:
            return None                                      # a mistake of PyTorch's own, in a backward that compiled raises, too
        if BEYOND in b.error and any(BEYOND in shot.error for shot in execute(code, lambda f: f, words=False, around=Trimmed)):
            return None                                      # only eager's results have so much
        if NONDETERMINISTIC in a[0] or NONDETERMINISTIC in a.error or STRIDED in a.error:
            return None                                      # a compiled one may be
        found = difference(a[0].split()[:2], b[0].split()[:2], "[0]") if endless else difference(a, b)
        if found is not None and behind:
            copied = [execute(code, f, words=False)[number:] for f in (saving_copies, lambda f: saving_copies(compiler(f)))]
            if any(difference(a, x) or not difference(x, y, "", [x]) for x, y in zip(*(shots[:1] for shots in copied))):
                return None
        rounding = backend != "eager" and "EXACT = True" not in text
        if found is not None and rounding:                   # a rounding error or two are told without other runs
            found = difference(a, b, "", [a])
        for count in (4, 40, 240) if rounding else ():
            if found is None or endless:
                break
            signal.setitimer(signal.ITIMER_PROF, JUDGING)   # all of that is eager's
            others += [execute(code, lambda f: f, words=False, around=lambda: Noise(seed, known)) for seed in range(len(others), count)]
            found = difference(a, b, "", [o[number] if number < len(o) else None for o in others])
        if found is not None and "checkpoint(" in text and agrees_without_checkpoints(code, b, number, backend == "eager"):
            return None
        if found is not None and a[0] == "backward" and b[0].startswith("backward raised") and backend != "eager" and \
                raised_by_a_node_without_gradients(code, compiler, plain[:number + 1]):
            return None                                      # one node stands for many, and also goes on to where these do not: see README
        if found is not None and b[0] == "backward" and a[0].startswith("backward raised") and backend != "eager" and (
                raised_on_the_way_to_nothing(code, plain[:number + 1]) or
                a[0].startswith(OF_A_GRADIENT) and agrees_where_gradients_are_dense(code, b, number) or
                a[0].startswith("backward raised returned an invalid gradient")):       # eager's formula is wrong
            return None
        if found is not None and backend != "eager" and reasons and LATE_HOOK.search(text) and \
                compare(LATE_HOOK.sub("None", text), backend, None, settings) is None:
            return None                                      # behind a break it is on an output that was used before: see README
        if found is not None:
            if differs_from_itself(code, plain, backend == "eager") or ordered_by_chance(code):
                return None
            path, x, y = found
            early = backend != "eager" and (a[0].startswith("backward raised") or SAVED[0] in a.error)
            refusals = (*REFUSED, *OF_A_GPU) if "DEVICE = 'cuda'" in text else REFUSED
            if path[:3] in ("[2]", "[3]") and (early or any(words in a.error for words in refusals)):
                return None                                  # a kernel refused, or a backward raised in the middle: see README
            parts = "outcome", "result", "arguments", "globals", "output", "grad mode", "exception in handling"
            part = parts[int(path[1])] if path[:1] == "[" else path
            part = "exception" if part == "result" and a[0].startswith("raised") else part
            return f"difference in {part}", f"photograph {number}, {part} at {path}: plain {brief(x)}, compiled {brief(y)}; {a[0]}"
        if endless:                                          # how far the program had come is not for Python to say
            return None
    if len(plain) != len(compiled):
        return "difference in length", f"{len(plain)} photographs, {len(compiled)} compiled"
    return None


@contextlib.contextmanager
def noticing_writes():
    """A list of the errors of backward that README says eager does not have: a graph has saved one of its results or arguments, or would
    compute a second derivative from a parameter, and that was written since."""
    refused, forward, backward, derivative = [], region.run_forward, region.run_backward, region.Derivative

    def remember(ctx, tensors):
        ctx.known = [(t.detach(), t._version) for t in tensors]

    def noticed(ctx, run, *args):
        try:
            return run(*args)
        except RuntimeError as error:
            if SAVED[0] in str(error) and any(t._version != version for t, version in ctx.known):
                refused.append(error)
            raise

    def run_forward(of, ctx, *inputs):
        results = forward(of, ctx, *inputs)
        memory = {r.untyped_storage()._cdata for r in (*results, *inputs) if isinstance(r, torch.Tensor)}
        remember(ctx, [t for t in ctx.to_save or () if t.untyped_storage()._cdata in memory])
        return results

    class Derivative(derivative):
        @staticmethod
        def forward(ctx, derive, count, plain, *tensors):
            remember(ctx, [t for t in tensors[count:] if isinstance(t, torch.nn.Parameter)])
            return derivative.forward(ctx, derive, count, plain, *tensors)

        @staticmethod
        def backward(ctx, *seconds):
            return noticed(ctx, derivative.backward, ctx, *seconds)

    region.run_forward, region.Derivative = run_forward, Derivative
    region.run_backward = lambda of, ctx, *tangents: noticed(ctx, backward, of, ctx, *tangents)
    try:
        yield refused
    finally:
        region.run_forward, region.run_backward, region.Derivative = forward, backward, derivative


def raised_by_a_node_without_gradients(code, compiler, plain) -> bool:
    """Whether the last backward of these photographs ends, when the program is compiled, in a node that has been given no gradient."""
    called = []

    def watch(results, _):
        called.append([])
        for node in history_of(results):
            node.register_prehook(lambda gradients, seen=called[-1]: seen.append(all(g is None for g in gradients)))
    execute(code, compiler, words=False, before_backward=watch)
    return called[[s[0].split()[0] for s in plain].count("backward") - 1][-1:] == [True]


def raised_on_the_way_to_nothing(code, plain) -> bool:
    """Whether eager's last backward of these photographs ends in an operator that leads to no tensor that the program shows, but to
    a view that was taken under `no_grad`, say, which is a leaf of its own. A graph does not compute such a gradient: see README."""
    called = []

    def watch(results, shown):
        called.append(([], shown))
        for node in history_of(results):
            node.register_prehook(lambda _, node=node, seen=called[-1][0]: seen.append(node))
    execute(code, lambda f: f, words=False, before_backward=watch)
    seen, shown = called[[s[0].split()[0] for s in plain].count("backward") - 1]
    behind = gradients_behind([types.SimpleNamespace(grad_fn=seen[-1])]) if seen else [(shown[0],)]
    return not any(leaf is t for leaf, *_ in behind for t in shown)


def agrees_where_gradients_are_dense(code, b, number: int) -> bool:
    """Whether a photograph is one of eager where `view_as_real` is given its gradient row by row: of no elements it refuses a sum's."""
    view = torch.view_as_real

    def view_as_real(z):
        out = view(z)
        if out.requires_grad:
            out.register_hook(lambda gradient: gradient.new_empty(gradient.shape).copy_(gradient))
        return out
    torch.view_as_real = view_as_real
    try:
        a, *others = [execute(code, lambda f: f, words=False, around=around)[number] for around in (
            contextlib.nullcontext, *(functools.partial(Noise, seed) for seed in range(4)))]
    finally:
        torch.view_as_real = view
    return a[0] == "backward" and not difference(a, b, "", [a, *others])


def saving_copies(f):
    """Eager with gradients from what was saved, not from what was then written to its memory by way of `.data`, of which autograd does not
    know. Where these differ, it is for chance to say what a graph has saved, the memory that was written or something else. A graph may
    also have saved that memory where eager has saved what it computed from it: then the two agree where both save copies."""
    def run(*args):
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
            return f(*args)
    return run


def agrees_without_checkpoints(code, b, number: int, words: bool) -> bool:
    """Whether a photograph is one of eager without checkpoints. These run a function again with what was written since to its inputs, and
    autograd does not notice: neither the gradients are right then, nor is there an error. Without them there is one of the two."""
    def plainly(f, *args, use_reentrant=None, preserve_rng_state=True, context_fn=None, determinism_check="default", debug=False, **kwargs):
        return f(*args, **kwargs)
    plainly.__name__ = "checkpoint"                     # photographs show it
    checkpoint, torch.utils.checkpoint.checkpoint = torch.utils.checkpoint.checkpoint, plainly
    try:
        for change in (lambda f: f, saving_copies):
            runs = [execute(code, change, words=words, around=around) for around in (
                contextlib.nullcontext, *(functools.partial(Noise, seed) for seed in range(4)))]
            a, *others = [run[number] if number < len(run) else None for run in runs]
            if a is not None and not difference(a, b, "", [a, *others]):
                return True
    finally:
        torch.utils.checkpoint.checkpoint = checkpoint
    return False


def differs_from_itself(code, plain, words=True, deeper=20) -> bool:
    """Whether a program ends otherwise when it is called with more frames below it: it handles the RecursionError of a call that
    does not end, and how often it called is not for Python to say."""
    if deeper:
        return differs_from_itself(code, plain, words, deeper - 1)
    return any(difference(a, b, "") for a, b in zip(plain, execute(code, lambda f: f, words=words)))


def ordered_by_chance(code) -> bool:
    """Whether a program has an operator write to what it reads at another place, as `x[..., 1].mul_(x[0, 1])` does: PyTorch forbids it, and
    notices it in dense memory only. Elsewhere the order of its loop decides."""
    overlaps = Overlaps()
    execute(code, lambda f: f, words=False, around=lambda: overlaps)
    return overlaps.found


def brief(x) -> str:
    text = repr(x)
    return text if len(text) < 300 else text[:300] + "..."
