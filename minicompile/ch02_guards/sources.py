# %% [markdown]
# # Sources: where a value came from
#
# A compiled graph is correct only for the world it was traced in: this dtype, that attribute, those two
# lists of equal length. To check tomorrow what was true today, the compiler must remember *how it reached*
# each value. That access path is a **source**. `self.norm1.bias` is
#
#     ModuleAttrSource(ModuleAttrSource(LocalSource("self"), "_modules", "norm1"), "_parameters", "bias")
#
# A source does one thing: it writes itself as Python text. For this one that is
#
#     self.__dict__['_modules']['norm1'].__dict__['_parameters']['bias']
#
# More of them, as the user would write them and as they are read. The function is `forward(self, x, sizes)`; `__K` has objects that text
# cannot spell, here two modules of Python:
#
#     ModuleAttrSource      self.layers[0]                self.__dict__['_modules']['layers'].__dict__['_modules']['0']
#     ItemSource            self.scale                    self.__dict__['scale']
#     DictGetSource         self.scale['in']              __dict_getitem(self.__dict__['scale'], 'in')
#     ListItemSource        sizes[1]                      sizes[1]
#     GlobalStateSource     grad mode                     __grad_mode()
#     ItemSource            torch.nn.functional.linear    __K[0].__dict__['linear']
#
# The text is valid inside a generated function whose parameters are the frame's own arguments. So a source
# serves twice: a guard reads the value again to compare it, and the compiled function reads it again to feed
# it to the graph.
#
# The real torch.compile has the same idea with more than fifty source classes. Some twenty are enough here, because
# every class only has to say what its base is and what is appended to the base's text.

# %%
from __future__ import annotations

import builtins
import keyword
import weakref
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Callable

from ..ch01_graphs.floats import float_text
from .identity import held, module_name, strongly


class Source:
    """An access path. Hashable, compared by value, so that two reads of one thing are one source."""

    def __init_subclass__(cls):
        """Each class is a dataclass that keeps its hash: a path is a key in many tables, and its hash asks all of its bases."""
        compute = dataclass(frozen=True)(cls).__hash__

        def kept_hash(self):
            try:
                return self.hash
            except AttributeError:
                self.__dict__["hash"] = compute(self)
                return self.hash
        cls.__hash__ = kept_hash

    def parts(self) -> tuple[Source | None, str]:
        """(base, template): the text is the template with `{}` replaced by the base's text."""
        raise NotImplementedError(type(self).__name__)

    def spelled(self, read: Callable[[Source], str]) -> str:
        """The expression, with what `read` says for the sources in it."""
        base, template = self.parts()
        return template if base is None else template.replace("{}", read(base), 1)

    def text(self) -> str:
        """The Python expression that reads the value inside a generated function."""
        return self.spelled(Source.text)

    def name(self) -> str:
        """The expression as the user would write it; only for messages."""
        return self.spelled(str)

    def __str__(self) -> str:
        return self.name()


def path_of(source: Source | None):
    """The source, its base, and so on to the root."""
    while source is not None:
        yield source
        source = source.parts()[0]


def is_plain(name: str) -> bool:
    """Whether a name means itself in source text. `setattr` takes any text, such as `lambda`, `layer-1`, or what Python would normalize."""
    return name.isascii() and name.isidentifier() and not keyword.iskeyword(name)


def parameter_name(local_name: str) -> str:
    """What an argument is called in generated functions, which call builtins (`type`) and have names of their own (`__v0`). Python's
    hidden locals (`.0`, the iterator of a comprehension) are not identifiers, nor are those of rewritten code (`@py_assert1`)."""
    own = local_name.startswith("__") and not local_name.startswith("__stack")          # of resume functions
    if is_plain(local_name) and not (own or hasattr(builtins, local_name)):
        return local_name
    return "__argument_" + "".join(c if c.isascii() and (c.isalnum() or c == "_") else f"_{ord(c)}_" for c in local_name.lstrip("."))


# %% [markdown]
# ## Roots
#
# A path has to begin somewhere the generated function can see. There are only a few such places: the
# arguments, the function being called `__F` (it carries the closure cells and the globals `__G`), constants
# of the compiled entry `__K`, and the state of the torch library itself.
#
# `__F` is a parameter of the generated function, not a global of it. Two closures made by the same `def`
# share their code and therefore their compiled entries, but not their cells.

# %%
class LocalSource(Source):
    local: str

    def parts(self):
        return None, parameter_name(self.local)

    def name(self):
        slot = self.local.removeprefix("__stack")
        return f"(pending value {slot})" if slot != self.local else slot


class GlobalsSource(Source):
    """The globals of the function being called."""

    def parts(self):
        return None, "__G"

    def name(self):
        return "globals()"


class ClosureCellSource(Source):
    """The cell itself, for code that hands it on."""
    index: int
    variable: str

    def parts(self):
        return None, f"__F.__closure__[{self.index}]"


# %% [markdown]
# A constant has no path. It is an object that the trace has met or made, such as the module that holds a
# function's globals, and that the entry keeps in its tuple `__K`, mostly weakly.

# %%
class ConstantSource(Source):
    """An object that the entry knows: it cannot become another one, so it needs no guard. Another trace may
    give the same object another index in `__K`, so what counts is the object. value: as `held` gives it."""
    index: int
    value: Any
    number: int                                      # its id

    @staticmethod
    def of(index: int, real) -> "ConstantSource":
        return ConstantSource(index, held(real), id(real))

    @property
    def is_weak(self) -> bool:
        return isinstance(self.value, weakref.ref)

    def parts(self):
        return None, f"__K[{self.index}]" + "()" * self.is_weak

    def name(self):
        real = strongly(self.value)
        if isinstance(real, ModuleType):
            return module_name(vars(real))
        if type(real) is dict and module_name(real):
            return f"globals() of {module_name(real)}"
        return super().name()

    def __eq__(self, other):
        return self is other or type(other) is ConstantSource and self.number == other.number \
            and strongly(self.value) is strongly(other.value) is not None

    def __hash__(self):
        return self.number


class GlobalStateSource(Source):
    """State of the torch library that a trace depends on and that no user variable holds."""
    kind: str

    def parts(self):
        return None, f"__{self.kind.lower()}()"

    def name(self):
        return self.kind.lower().replace("_", " ")


# %% [markdown]
# ## Steps
#
# From a root, each step appends one access. `ModuleAttrSource` is the step that pays for itself.
# `module.weight` on an `nn.Module` first fails the ordinary lookup, then runs a Python `__getattr__` that
# searches three dictionaries: about half a microsecond, for every parameter, on every call. Reading
# `module.__dict__['_parameters']['weight']` says the same and takes a tenth of it, because the first two
# steps are shared by all parameters of the module (see `codegen.py`, which reads every common prefix once).
#
# Each class has `parts`, the source before it and a text with `{}` in its place, and `name`, what a person would write. The
# classes that add nothing to their parent differ in what may be concluded: an item of a tuple stays what it is while the tuple
# does, an item of a list does not, and a memo (`stable.py`) looks at each in another way.

# %%
def readable(value) -> str:
    """The text of a constant, as `repr` gives it: of a long number Python writes, and reads, hexadecimal digits only."""
    return hex(value) if type(value) is int and value.bit_length() > 2000 else repr(value)


def key_text(key, read=Source.text) -> str:
    """A subscript as text: another source, or a constant whose repr reads back as itself."""
    return read(key) if isinstance(key, Source) else readable(key)


class AttrSource(Source):
    base: Source
    attribute: str

    def parts(self):
        return self.base, "{}." + self.attribute if is_plain(self.attribute) else f"getattr({{}}, {self.attribute!r})"

    def name(self):
        return self.base.variable if isinstance(self.base, ClosureCellSource) else super().name()


class FieldSource(AttrSource):
    """An attribute that lies in the object's own `__dict__`, where no descriptor of its class hides it."""


class LookupSource(AttrSource):
    """What a function that guards may name finds for this attribute, where `obj.name` might run code or find something else."""
    function = None

    def parts(self):
        return self.base, self.function + "({}, " + repr(self.attribute) + ")"

    def name(self):
        return f"{self.base.name()}.{self.attribute}"


class SlotSource(LookupSource):
    """What a slot of the object holds, where `obj.name` may run code of its class."""
    function = "__slot"


class ClassAttrSource(LookupSource):
    """What lies under a name in the first class of `__mro__` that has it, today: a class before it may get one of its own."""
    function = "__in_class"


class HooksSource(AttrSource):
    """`_backward_hooks` or `_post_accumulate_grad_hooks` of a tensor: a dict or None."""


class ItemSource(Source):
    """base[key]; key is a constant with a readable repr, or a Source."""
    base: Source
    key: Any

    def parts(self):
        return self.base, "{}[" + key_text(self.key) + "]"

    def name(self):
        if isinstance(self.base, InstanceDictSource):
            return f"{self.base.base.name()}.{self.key}"
        return str(self.key) if isinstance(self.base, GlobalsSource) else super().name()


class TupleItemSource(ItemSource):
    """An item of a tuple: as long as the tuple is the same object, so is the item."""


class ListItemSource(ItemSource):
    """An item of a list, not of a class derived from it."""


class BaseItemSource(ItemSource):
    """An item of an object whose class derives from list and may have a `__getitem__` of its own."""

    def parts(self):
        return self.base, "__list_getitem({}, " + repr(self.key) + ")"


class VaryingItemSource(Source):
    """An item of a sequence at a place that differs from call to call, an expression. symbols: (name in it, source)."""
    base: Source
    place: Any
    symbols: tuple

    def parts(self):
        return self.base, "{}[" + self.place_text(Source.text) + "]"

    def name(self):
        return f"{self.base.name()}[{self.place_text(Source.name)}]"

    def place_text(self, read):
        return float_text(self.place, {name: read(at) for name, at in self.symbols}.__getitem__)


class DictGetSource(Source):
    """The value of a *real* dict at a key, never a subclass's `__getitem__` or `__missing__`."""
    base: Source
    key: Any

    def parts(self):
        return self.base, "__dict_getitem({}, " + key_text(self.key) + ")"

    def spelled(self, read):
        return f"__dict_getitem({read(self.base)}, {key_text(self.key, read)})"

    def name(self):
        return f"{self.base.name()}[{key_text(self.key, str)}]"


# %% [markdown]
# A dictionary may also be read by the order of its items. The hooks of a module lie in one under numbers that are never given twice: a
# program that registers the same hook for each step finds it at the same place, under another number.

# %%
class NthSource(Source):
    """The key or the value (what: "keys" or "values") that comes at a place in the order of a dict."""
    base: Source
    what: str
    place: int

    def parts(self):
        return self.base, f"[*{{}}.{self.what}()][{self.place}]"

# %% [markdown]
# Behind a graph break a loop's iterator is one of Python, which has begun. What it has still to give is asked without taking it: the
# iterators of lists, tuples and dictionaries tell, and so do `enumerate` and `zip` over these. (An iterator that a `zip` has twice gives
# its items in turns.) Of a dictionary that has changed its size meanwhile, the next turn raises. Whoever unrolls the turns that are left
# (chapter 3) reads their items from this list.

# %%
OVER_DICTS = (type(iter({})), type(iter({}.values())), type(iter({}.items())))
OVER_SEQUENCES = (type(iter([])), type(iter(())))


def sources_of_loop(iterator) -> list:
    """The iterators of containers from which an iterator takes; itself, if it is one, and if it is of another kind."""
    if type(iterator) not in (enumerate, zip):
        return [iterator]
    inner = iterator.__reduce__()[1]
    return [source for part in (inner[:1] if type(iterator) is enumerate else inner) for source in sources_of_loop(part)]


def rest_of_loop(iterator) -> list | None:
    """What an iterator would still give, or None where that is not known."""
    kind, sources = type(iterator), sources_of_loop(iterator)
    if len(set(map(id, sources))) < len(sources) or any(type(source) not in (*OVER_DICTS, *OVER_SEQUENCES) for source in sources):
        return None
    if kind in OVER_DICTS:
        try:
            return iterator.__reduce__()[1][0]
        except RuntimeError:
            return None
    _, inner, *state = iterator.__reduce__()
    if kind in OVER_SEQUENCES:
        base = list if kind is OVER_SEQUENCES[0] else tuple
        return list(base.__getitem__(inner[0], slice(*state, None)))
    rests = list(map(rest_of_loop, inner if kind is zip else inner[:1]))
    if state or None in rests:
        return None
    return list(zip(*rests)) if kind is zip else list(enumerate(*rests, inner[1]))


class RestSource(Source):
    """What a loop's iterator has still to give (`rest_of_loop`): a list, made for the question."""
    base: Source

    def parts(self):
        return self.base, "__rest({})"

    def name(self):
        return f"the rest of {self.base.name()}"


class TurnSource(Source):
    """What comes at one of the turns that are left, or a part of that, in what was made for the question: the object that holds it is
    another one at each call, so no memo looks at it."""
    base: Source
    turn: int

    def parts(self):
        return self.base, f"{{}}[{self.turn}]"


class InstanceDictSource(Source):
    base: Source

    def parts(self):
        return self.base, "{}.__dict__"


class HiddenDictSource(InstanceDictSource):
    """The same of an object whose class has a `__getattribute__` that would be asked for it."""

    def parts(self):
        return self.base, "__find_plainly({}, '__dict__')"


class ModuleAttrSource(Source):
    """What `nn.Module.__getattr__` would find; kind is `_parameters`, `_buffers` or `_modules`."""
    base: Source
    kind: str
    attribute: str

    def parts(self):
        return ItemSource(InstanceDictSource(self.base), self.kind), "{}[" + repr(self.attribute) + "]"

    def name(self):
        base = self.base.name()
        return f"{base}[{self.attribute}]" if self.attribute.isdigit() else f"{base}.{self.attribute}"


# %% [markdown]
# The last sources call something. `CallSource` is a method without side effects, `x.stride(0)`. `SizeSource` is a size that varies, for
# which the extension has a function (`memory.py`) that takes a third of the time. `ComputedSource` is a function of Python on numbers
# that vary, `int(n * 0.5)`: several sources go into it, so its text is the whole call, with nothing before it that could be shared.

# %%
class CallSource(Source):
    """base.method(*args) with constant args; only for calls without side effects, such as `stride(0)`."""
    base: Source
    method: str
    args: tuple = ()

    def parts(self):
        return self.base, "{}." + self.method + "(" + ", ".join(map(key_text, self.args)) + ")"


class SizeSource(Source):
    """A size of a tensor that has this dim."""
    base: Source
    dim: int

    def parts(self):
        return self.base, f"__size({{}}, {self.dim})"

    def name(self):
        return f"{self.base.name()}.size({self.dim})"


class ComputedSource(Source):
    """What a function of Python makes of numbers found elsewhere, `int(n * 0.5)`. function: its text or its source; operands: the
    arguments, each a text, a source, or an expression of sizes or floats; named: (name, operand); symbols: (name in them, source)."""
    function: str | Source
    operands: tuple
    named: tuple
    symbols: tuple

    def parts(self):
        return None, self.call_text(Source.text)

    def name(self):
        return self.call_text(Source.name).replace("__math", "math")

    def call_text(self, read):
        reads = {name: read(at) for name, at in self.symbols}

        def text(x):
            return x if type(x) is str else read(x) if isinstance(x, Source) else float_text(x, reads.__getitem__)
        arguments = [*map(text, self.operands), *(f"{name}={text(x)}" for name, x in self.named)]
        return f"{text(self.function)}({', '.join(arguments)})"
