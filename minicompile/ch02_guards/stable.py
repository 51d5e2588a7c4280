# %% [markdown]
# # Not looking twice
#
# Most guards of a model are about things that never change: the class of a block, the names of its children,
# that nobody registered a hook, the identity of its parameters. Checking them one by one costs a fraction of a
# microsecond each, and a 12-layer GPT has 600. But all of them are read through a few hundred dictionaries,
# starting from one object, and CPython keeps a number in each dictionary that changes with every write. If
# the object is the same and the numbers are the same, every guard that was true is true.
#
# So the guards are divided. **Stable** guards depend only on what can be looked at in this way, such as dictionaries,
# classes and the metadata of tensors. They are evaluated in full once; a `Memo` (`unchanged.c`) then remembers the numbers and answers
# the next calls, in one C call, with the tuple of parameters that the graph wants. When something differs it
# answers None, the guards are evaluated in full again, and if they hold the memo learns the new numbers.
# Nothing is believed that a full check has not confirmed, so the memo needs no opinion on *what* changed.
#
# | per call, CPython 3.11 | minicompile | torch.compile |
# |---|---|---|
# | two lines | 0.6 us | 6.3 us |
# | GPT, 12 layers | 5.9 us | 30.7 us |
# | ResNet-50 | 11.7 us | 88.1 us |
#
# `python -m minicompile.bench.overhead` measures it (`results/cpu-overhead.json`). Without the extension, where every guard is asked,
# the GPT takes more than twenty times as long. What is left are the numbers of the dictionaries, the calls, and the tensors, which
# must be looked at because `parameter.data = other` changes no number.
#
# (torch.compile does the same for modules, with its dictionary tags, inside a C++ tree of guard managers.)

# %%
import collections
import ctypes
import functools
import itertools
import struct
import types
import weakref
from dataclasses import dataclass, field
from typing import Callable

import torch

from .guards import ALL, BARE, CLASS, DICT, FUNCTION, GUARD_KINDS, HELD, HOOKS, KEYS, LIST, OBJECT, OF_CLASSES, SAME, TENSOR, TUPLE, WATCHED
from .identity import strongly
from .sources import (
    ConstantSource,
    DictGetSource,
    FieldSource,
    HooksSource,
    InstanceDictSource,
    ItemSource,
    ListItemSource,
    LocalSource,
    ModuleAttrSource,
    Source,
    TupleItemSource,
)
from .torch_guards import PLAIN_TYPES, USUAL

try:
    from . import unchanged
    if getattr(unchanged, "INTERFACE", 1) != 7:
        raise ImportError("the extension was built from other sources")
except ImportError:                          # no extension, or an old one: every check is a full one
    unchanged = None

    class Memo:
        def __init__(self, *plan):
            pass

        def __call__(self, *arguments):
            return None

        def record(self, *arguments) -> bool:
            return False
else:
    Memo = unchanged.Memo


# %% [markdown]
# ## What is a tensor, for C?
#
# Asking 160 parameters for seven facts through Python's methods costs more than everything else in a call.
# `is_neg()` looks for modes, gives up the GIL and takes it again. So the memo asks through PyTorch's C
# interface, whose functions are found by name in the library that is loaded anyway and do nothing but read.
# The place of the tensor in its Python object, and that of the dispatch keys in the tensor, have no function;
# `unchanged.c` looks for them in examples. If these do not agree, no memo knows any tensor and every check is
# a full one.

# %%
QUESTIONS = (*(f"aoti_torch_get_{fact}" for fact in (
    "dim", "sizes", "strides", "dtype", "device_type", "device_index", "layout", "data_ptr")),
    "_ZNK3c1010TensorImpl13requires_gradEv",                       # c10::TensorImpl::requires_grad() const
    "_ZN5torch8autograd4impl12bump_versionERKN2at6TensorE",        # torch::autograd::impl::bump_version(const at::Tensor&)
    "_ZNK3c1010TensorImpl4gradEv")                                 # c10::TensorImpl::grad() const
# Tensors made in inference mode have neither this key nor a version
HAS_VERSION = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView).raw_repr()


def examples() -> list[torch.Tensor]:
    """Tensors with different dispatch keys and classes. The first has hooks of both kinds, and no gradient."""
    z = torch.zeros(2, dtype=torch.complex64, device="cpu")
    x = torch.zeros(2, 2, device="cpu")
    hooked = torch.zeros(1, device="cpu", requires_grad=True)
    hooked.register_hook(print)
    hooked.register_post_accumulate_grad_hook(print)
    with torch.inference_mode():
        inference = torch.zeros(1, device="cpu")
    return [hooked, x, x.to_sparse(), x.to("meta"), z, z.conj(), z.conj().imag, torch.nn.Parameter(x), inference]


def find_tensors() -> bool:
    """Tell the memos what a tensor is; False when that cannot be found out."""
    try:
        library = ctypes.CDLL(torch._C.__file__)           # the search goes on in the libraries that it needs
        addresses = tuple(ctypes.cast(library[name], ctypes.c_void_p).value for name in QUESTIONS)
    except (OSError, AttributeError):
        return False
    tensors = examples()
    return unchanged.setup(PLAIN_TYPES, addresses, HAS_VERSION, [
        (t, t._cdata, torch._C._dispatch_keys(t).raw_repr()) for t in tensors],
        (tensors[0]._backward_hooks, tensors[0]._post_accumulate_grad_hooks))


if unchanged is not None:
    find_tensors()


# %% [markdown]
# ## What state is the library in, for C?
#
# Whether gradients are recorded, what autocast does, which modes see operations: six guards of every version, and the functions that Python
# asks for them take a quarter of a microsecond together, a third of what a call of one small kernel costs beside the kernel. So a
# `State` remembers the state that they held in, and compares it, in 20 nanoseconds. It knows which states are on and how many modes
# there are, but not which modes, nor the dtypes of autocast: of these it vouches for none (`is_usual`).
#
# Most of it is what functions of PyTorch's library answer. Autocast, transforms and batching are bits of two words that a thread has, of
# the dispatch keys that each operator has there in addition and that it has not. Python can read them, too, so `find_state` compares them,
# in two states. A library that has other names is asked one by one, as before.
#
# Between these two states lie the bits of autograd. So the extension can set and clear them, which costs Python a quarter of a microsecond
# (`below_autograd`, for the programs of chapter 11 that call operators).

# %%
STATES = ("_ZN3c108GradMode10is_enabledEv", "_ZN3c1013InferenceMode10is_enabledEv",          # c10::GradMode::is_enabled() ...
          "_ZN3c1031get_default_dtype_as_scalartypeEv", "_ZN2at13globalContextEv", "_ZNK2at7Context23deterministicAlgorithmsEv",
          "_ZN2at4impl22PythonTorchFunctionTLS18get_disabled_stateEv", "_ZN2at4impl22PythonTorchFunctionTLS9stack_lenEv",
          "_ZN3c104impl20TorchDispatchModeTLS9stack_lenEv")


def find_state() -> bool:
    """Tell the extension who knows the state of the library; False when that cannot be found out."""
    try:
        library = ctypes.CDLL(torch._C.__file__)
        unchanged.setup_state(library._handle, tuple(ctypes.cast(library[name], ctypes.c_void_p).value for name in STATES))
    except (OSError, AttributeError):
        return False

    def words() -> tuple[int, int]:
        return struct.unpack_from("QQ", unchanged.State()())

    def difference() -> list[int]:
        """What is always in the words as Python tells them and not in the memory, or the other way round."""
        told = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
        return [a ^ b.raw_repr() for a, b in zip(words(), told)]

    with torch.inference_mode(False):                      # the program may import us inside of one, where autograd is off already
        usual, outside = difference(), words()
        with torch._C._AutoDispatchBelowAutograd():
            if difference() == usual and (inside := words())[0] == outside[0]:
                unchanged.setup_below(inside[1] & ~outside[1])
                return True
    unchanged.setup_state(0, (0,) * len(STATES))
    return False


has_state = unchanged is not None and find_state()
below_autograd = unchanged.below_autograd if has_state else torch._C._AutoDispatchBelowAutograd


def is_usual(guard) -> bool:
    """Whether a `State` can vouch for this guard of the library's state."""
    return has_state and (guard.kind in ("GRAD_MODE", "INFERENCE_MODE", "DEFAULT_DTYPE", "DETERMINISTIC") or
                          guard.kind in USUAL and guard.expected == USUAL[guard.kind])


# %% [markdown]
# ## Which sources are stable
#
# Those that lead from an object through instance dictionaries: `self.blocks[2].norm.weight` is ten
# dictionary reads from `self`. The object they start from is the **root**; it is read at each call and
# compared by identity. Each step is a *place*, where something is held: a key of an object's `__dict__`, a
# key of one of a module's dictionaries, an index of a tuple.

# %%
def place(source: Source) -> tuple | None:
    """(kind of thing, source of the thing that holds `source`, at which key or index), or None for a root."""
    if isinstance(source, ModuleAttrSource):
        return DICT, ItemSource(InstanceDictSource(source.base), source.kind), source.attribute
    if isinstance(source, TupleItemSource):
        return (TUPLE, source.base, source.key) if place(source.base) is not None else None
    if isinstance(source, ItemSource) and isinstance(source.base, InstanceDictSource) \
            and type(source.key) is str:
        return OBJECT, source.base.base, source.key
    return None


# %% [markdown]
# An optimizer is reached in other ways. Its groups lie in a list, its state in a dictionary whose keys are parameters,
# and each parameter may have hooks. A training step has guards about all of them. A list carries no number, but it takes
# little to see that it is the same list and holds the same objects.
#
# These guards get a memo of their own. Lists and plain objects are also what programs hand from call to call, a batch
# with its lengths, a configuration made anew, and for a root that is another object in each call a memo can never
# vouch. That must not cost a module the answer about its hundreds of guards. So a **scope** is what
# one memo covers. That of the second memo begins where the first ends: what the first answers may be roots of the
# second.

# %%
def further_place(source: Source) -> tuple | None:
    """`place` in the second scope. What an argument contains is left out: it is likely to be made for the call."""
    if isinstance(source, (ItemSource, DictGetSource)) and isinstance(source.base, LocalSource):
        return None
    if isinstance(source, TupleItemSource):
        return TUPLE, source.base, source.key
    if isinstance(source, FieldSource):
        return OBJECT, source.base, source.attribute
    if isinstance(source, ListItemSource):
        return LIST, source.base, source.key
    if isinstance(source, HooksSource):
        return HOOKS, source.base, HOOKS_OF_TENSOR.index(source.attribute)
    if isinstance(source, DictGetSource) and isinstance(source.key, ConstantSource):
        return None if source.key.is_weak else (ALL, source.base, source.key.value)
    if isinstance(source, DictGetSource):
        return DICT if type(source.key) is str else ALL, source.base, source.key
    return place(source)


HOOKS_OF_TENSOR = ("_backward_hooks", "_post_accumulate_grad_hooks")
FURTHER_LOOKS = (LIST, KEYS, BARE)          # of what only the second scope may look at
ENOUGH = 12                                 # guards for which a second memo is faster


def attribute(source: Source) -> tuple:
    """(object, name) of the attribute, or child of a module, that a stable source is or lies in."""
    if isinstance(source, ModuleAttrSource):
        return source.base, source.attribute
    kind, holder, key = further_place(source)
    return attribute(holder) if kind == TUPLE and further_place(holder) is not None else (holder, key)


@dataclass(eq=False)
class Scope:
    """The guards for which one memo can vouch. place: where a source is held; varying: attributes, as `attribute` gives them, that
    every call finds written; loose: what every call may make anew, so that nothing is held by it; before: the scope of the memo that
    is asked first."""
    place: Callable
    varying: frozenset = frozenset()
    loose: frozenset = frozenset()
    before: "Scope | None" = None
    known: dict = field(default_factory=dict)
    starts: dict = field(default_factory=dict)

    def __post_init__(self):
        self.place = functools.cache(functools.partial(self.held_fast, self.place))             # many guards are about one thing

    def held_fast(self, place, source: Source) -> tuple | None:
        found = place(source)
        return None if found is None or found[1] in self.loose else found

    def is_stable(self, source: Source) -> bool:
        """Whether `source` is a chain of places from a root that no other such chain leads to."""
        if source not in self.known:
            self.known[source] = self.is_chain(source)
        return self.known[source]

    def is_chain(self, source: Source) -> bool:
        found = self.place(source)
        if self.begins_at(source) or found is None or attribute(source) in self.varying:
            return False
        if isinstance(found[2], Source) and not (self.is_stable(found[2]) or self.begins_at(found[2])):
            return False
        above = holder = found[1]
        if self.begins_at(holder) or self.place(holder) is not None:
            return self.begins_at(holder) or self.is_stable(holder)
        while above is not None and self.place(above) is None:
            above, _ = above.parts()
        return above is None or self.begins_at(above)

    def begins_at(self, source: Source) -> bool:
        """Whether the memo before answers with it."""
        return self.before is not None and self.before.is_stable(source)

    def start_of(self, source: Source) -> Source:
        """Where the chain of places begins; a source that is not stable is its own root."""
        if source not in self.starts:
            found = None if self.begins_at(source) else self.place(source)
            self.starts[source] = source if found is None else self.start_of(found[1])
        return self.starts[source]

    def looks_of(self, guard) -> list[tuple] | None:
        """What a memo must look at (`Kind.looks`). None for a guard that is not stable."""
        looks = GUARD_KINDS[guard.kind].looks(guard)
        return looks if looks and all(what in OF_CLASSES or self.can_look(what, at) for what, at in looks) else None

    def can_look(self, what, at: Source) -> bool:
        if self.before is None and what in FURTHER_LOOKS:
            return False
        return self.is_stable(at) or self.begins_at(at) and what != SAME


# %% [markdown]
# ## The plan of a memo
#
# A memo is told all this when it is made: the things, in an order in which each comes after the one that
# holds it, and the places of each. It reads the places by itself, from the roots down, and proves in the same
# order. The order matters because a memo keeps no object alive and remembers addresses. A program may
# make its configuration, its cache or the output of a layer anew for each call, and a new object often gets
# the address of the one before. So nothing is read through an address until its holder was found alive, and
# either untouched, by its number, or holding that same address now. `unchanged.c` begins with the whole
# argument.
#
# Why does the compiler say what kind a thing is, when the memo could look? A `class Out(OrderedDict)` with
# attributes is an object with a `__dict__` and a dictionary with items, and a memo that watches the one knows
# nothing of the other.

# %%
@dataclass
class Plan:
    """The things that a memo looks at, and its places: a number for each argument, and for each key at which a thing is read."""
    scope: Scope
    arguments: dict                          # source -> its place
    keys: dict = field(default_factory=dict)            # (kind of thing, source) -> {key: None}
    places: dict = field(default_factory=dict)          # (kind of thing, source), key -> its place

    def add(self, kind, source) -> dict:
        if (kind, source) not in self.keys:
            self.hold(source)
            self.keys[kind, source] = {}
        return self.keys[kind, source]

    def hold(self, source):
        if source not in self.arguments:
            kind, holder, key = self.held_at(source)
            if isinstance(key, Source):
                self.hold(key)
            self.add(kind, holder)[key] = None

    def held_at(self, source):
        kind, holder, key = self.scope.place(source)
        return (DICT if kind == ALL else kind), holder, key

    def number_from(self, start):
        for thing, keys in self.keys.items():
            for key in keys:
                self.places[thing, key] = start
                start += 1

    def number(self, source) -> int:
        if source in self.arguments:
            return self.arguments[source]
        kind, holder, key = self.held_at(source)
        return self.places[(kind, holder), key]


# %% [markdown]
# `add` puts a thing behind the one that holds it, which makes the order. `make_memo` adds all that guards look at and all that is to be
# answered, and then numbers the places: arguments first, then classes and functions, then what lies in things.
#
# It does so in this order. What is looked at and what is to be answered goes into the plan, each thing behind its holder. An
# object that is looked at as a dictionary or list anyway needs no look of its own. Then all places have numbers, and the things
# are written down with them. `same` are places that must hold the same object as at the last full check, `tensors` those of tensors
# whose metadata is asked, and at those that are `movable` another object will do (next section). A size that varies is no reason to check
# all again, as for each token of a sequence that grows: where the strides follow from the sizes, any above 1 will do (`free_dims`).
# An item of a dictionary may lie at a key that is itself read from somewhere, as the state of a parameter does (`found_by`); that is
# then read before it.
# `watch_thing` takes a function apart: its code, its defaults and its keyword defaults can be exchanged, so each is a place.

# %%
def make_memo(scope: Scope, roots, looks, outputs, free):
    """A memo with the arguments `roots` (sources), which answers the values of `outputs`. looks: as `looks_of`
    gives them. free: source of a tensor -> its `free_dims`. The places of the classes and functions among them follow the arguments."""
    plan = Plan(scope, {source: number for number, source in enumerate(roots)})
    keys, number = plan.keys, plan.number
    watched, members = watched_among(looks)
    looks = [(ALL if what == KEYS else what, at) for what, at in looks if what not in OF_CLASSES]
    looks.sort(key=lambda look: look[0] == ALL)          # what is asked for in a dictionary comes before it
    whole = {source for what, source in looks if what == ALL}
    for what, source in (*looks, *((HELD, source) for source in outputs)):
        plan.add(DICT if what == ALL else what, source) if type(what) is int else plan.hold(source)
    whole |= {source for (kind, source), k in keys.items() if kind == DICT and any(type(key) is not str for key in k)}
    for kind, source in [thing for thing, k in keys.items() if not k]:
        if kind == OBJECT and any((other, source) in keys for other in (DICT, TUPLE, LIST)):
            del keys[OBJECT, source]         # a class is looked at once
    watch = len(plan.arguments) + len(watched)
    plan.number_from(watch)
    things = [(ALL if source in whole else kind, number(source), tuple(k)) for (kind, source), k in keys.items()]
    found_by = [(plan.places[thing, key], number(key)) for thing, k in keys.items() for key in k if isinstance(key, Source)]
    same, tensors, bare = ([number(source) for fact, source in dict.fromkeys(looks) if fact == what]
                           for what in (SAME, TENSOR, BARE))
    fixed = {number(at) for what, at in looks if what in (SAME, HELD)} | {by for _, by in found_by}
    fixed |= {number(at) for (kind, at), k in keys.items() if k and kind == OBJECT or kind not in (OBJECT, TUPLE, LIST)}
    movable = {number(at) for at in (*(at for _, at in looks), *outputs) if at not in plan.arguments} - fixed
    free_place = watch + sum(len(k) for *_, k in things)
    for target, at in zip(watched, itertools.count(len(plan.arguments))):
        parts, place_of_part = watch_thing(target, members[id(target)], at, free_place)
        free_place += sum(len(k) for *_, k in parts)
        things += parts
        same += place_of_part
    return Memo(len(plan.arguments), tuple(map(weakref.ref, watched)), tuple(things), tuple(same), tuple(tensors),
                tuple(map(number, outputs)), tuple(bare), tuple(movable),
                tuple(free[source] for fact, source in dict.fromkeys(looks) if fact == TENSOR), tuple(sum(found_by, ())))


def watched_among(looks) -> tuple[list, dict]:
    """The classes and functions that are looked at, and of each class, by `id`, what in it; nothing of one that has to be as it is."""
    watched, members = {}, {}
    for what, at in looks:
        if what in OF_CLASSES:
            target = strongly(at if what == WATCHED else at[0])
            watched[id(target)] = target
            members.setdefault(id(target), {})[None if what == WATCHED else at[1]] = None
    return list(watched.values()), {key: () if None in names else tuple(names) for key, names in members.items()}


def watch_thing(target, members: tuple, at: int, first: int) -> tuple[list, list]:
    """Things for a class or function at place `at`, and the places among theirs, from `first` on, that are SAME."""
    if not isinstance(target, types.FunctionType):
        return [(CLASS, at, members)], [*range(first, first + len(members))]
    things, count = [(FUNCTION, at, (0, 1, 2))], len(target.__defaults__ or ())
    if target.__defaults__ is not None:
        things.append((TUPLE, first + 1, tuple(range(count))))
    if target.__kwdefaults__ is not None:
        things.append((ALL, first + 2, ()))
    return things, [first, *range(first + 3, first + 3 + count)]


# %% [markdown]
# ## Objects that are written to
#
# `self.step += 1` in a model, or `model.epoch = 3` around it, changes the number of a dictionary through
# which every parameter is read. If that alone were a change, the memo would never answer, and a GPT that
# counts its calls would pay the price of every guard, each time. So when the number differs, what lies at the
# places in that dictionary is compared, a lookup each, and if it is the same, the new number is learned.
# (`model.train()` writes to all modules, once; and so does, on CPython 3.12, whoever *watches* a dictionary,
# as torch.compile does: the number holds a bit for each watcher.)
#
# Where such a dictionary holds another object than before, of which guards know only what is compared anyway (the class, a length, the
# metadata of a tensor), that object will do: a model that begins each call with `self.losses = []` gives another list each time.
#
# `type(self).calls += 1` gives the class another version, and with it all objects of the class. Then what guards know of the class is
# compared: what a search for each name finds there (`MEMBER`), or, for data such as that counter, of which type it is. A method is the
# same if a weak reference says so. A property takes none, and its functions lead to the class, so a class in which guards have found
# one (`WATCHED`) has to keep its version.
#
# The written attribute itself has no place in a memo, if the function reads it: its value is new each time.
# Such **varying** attributes are numbers that became inputs of the graph, what the function only hands on, and what it writes itself.

# %%
def varying_attributes(guards, written) -> frozenset:
    """Attributes that differ from call to call. written: those that the function writes, (object, name)."""
    numbers = (guard.source for guard in guards
               if guard.kind == "TYPE_MATCH" and strongly(guard.expected) in (int, float, str, bytes))
    return frozenset(written).union(attribute(source) for source in numbers if further_place(source) is not None)


# %% [markdown]
# ## Objects that are made for the call
#
# `model(batch)` may be given another object each time, of which the function calls a method: `batch.tokens()` asks whether the
# object has an attribute of that name in its own `__dict__`. With `batch` as a root, no memo would ever vouch for the model. So a few
# guards about an argument that is no module, and about objects in it, are left to Python; a module that lies there is a root of its own.
# Where there are many, as of an object with a configuration, it is likely to be the same one.

# %%
def made_for_the_call(guards) -> frozenset:
    """Arguments that are no modules and have few guards, and the objects in these on the way to what guards look at."""
    modules = {guard.source for guard in guards if guard.kind == "MODULE_STRUCTURE"}
    through, counts = {}, collections.Counter()

    @functools.cache
    def way_to(source: Source) -> tuple[list, bool]:
        """What holds it, from the argument or global to the first module; whether there is one."""
        found = place(source)
        above = source.parts()[0] if found is None else found[1]
        holders, ends = ([], False) if above is None else way_to(above)
        ends = ends or above in modules
        return holders if ends or above is None else [*holders, above], ends

    for guard in guards:
        looks = [(HELD, guard.source)] if guard.source in modules else GUARD_KINDS[guard.kind].looks(guard) or ()
        for what, at in looks:
            holders, ends = ([], True) if what in OF_CLASSES else way_to(at)
            if holders and type(holders[0]) is LocalSource:
                through.setdefault(holders[0], set()).update(holders)
                counts[holders[0]] += not ends
    return frozenset().union(*(holders for argument, holders in through.items() if counts[argument] < ENOUGH))


# %% [markdown]
# ## The full check, and learning from it
#
# What guards know of classes and functions holds for every object. So it has a memo of its own inside of the full check, which then asks
# only for the object: of a small model that is made for the call, most guards are about classes.
#
# What is learned must be true of the state that was checked. Another thread may write between the check and
# the reading of a number, so the numbers are read first: check, record, check again.

# %%
def refresh(memo, full, arguments: tuple) -> tuple:
    """Evaluate the guards in full and let the memo answer next time. full(*arguments) -> outputs; it raises when a guard
    fails. Returns the outputs."""
    outputs = full(*arguments)
    if not memo.record(*arguments):
        return outputs
    try:
        return full(*arguments)
    except Exception:
        memo.forget()
        raise
