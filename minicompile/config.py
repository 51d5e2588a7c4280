# %% [markdown]
# # Settings
#
# `minicompile.config.NAME = value` changes a setting, `with minicompile.config.patch(NAME=value):` for a while. A
# name in `OPTIONS` may also be given for one compilation: `minicompile.compile(f, options={"NAME": value})`. A mode is a name for
# several options.
#
# A rung of the ladder of backends that stops early has no use for what later stages are told: `backend="eager"` fuses nothing. So each
# option says on which rung it begins to matter, and `compile` warns where it does not.

# %%
import contextlib
import contextvars
import difflib
from dataclasses import dataclass, fields

from .errors import MinicompileError


@dataclass
class Config:
    # capture and guards
    recompile_limit: int = 8               # entries per function, then eager; unless set, of one pattern of flags
    raise_on_internal_error: bool = False  # raise errors of the compiler itself instead of running eagerly
    automatic_dynamic: bool = True         # a size that changed becomes a symbol in the next version
    # graphs
    check_passes: bool = False             # verify the stage's spec after every pass
    # loops and fusion
    split_reductions: bool = True
    emulate_precision_casts: bool = False  # round to half precision wherever eager would
    # run time
    cudagraphs: bool = False
    max_autotune: bool = False             # not yet: a warning says so


# Options of one compilation -> the first rung of the ladder of backends on which they change something
OPTIONS = {"cudagraphs": "aot_eager", "max_autotune": "aot_eager", "split_reductions": "loops",
           "emulate_precision_casts": "loops", "check_passes": "loops"}
ALIASES = {"triton.cudagraphs": "cudagraphs"}        # torch.compile's name for it
MODES = {
    "default": {},
    "reduce-overhead": {"cudagraphs": True},
    "max-autotune": {"max_autotune": True, "cudagraphs": True},
    "max-autotune-no-cudagraphs": {"max_autotune": True},
}

# %% [markdown]
# The stages read `config.NAME`, and do not ask whether the value is everybody's or that of the compilation in progress. `Settings` answers:
# what `options` has put into a context variable comes first. Such a variable has another value in each thread, so one thread can compile
# with options while others do not.
#
# A misspelt name would be a new attribute of any other Python object, and nothing would happen. Here it is an error that names the nearest
# setting, and so is a value of another type than that of the default.

# %%
_overrides = contextvars.ContextVar("minicompile options", default=None)


class Settings(Config):
    """The one instance. Unknown names are errors; options of the compilation in progress take precedence."""

    def __getattribute__(self, name):
        overrides = _overrides.get()
        if overrides is not None and name in overrides:
            return overrides[name]
        return object.__getattribute__(self, name)

    def __setattr__(self, name, value):
        if name not in NAMES:
            raise MinicompileError(f"minicompile.config has no setting {name!r}.{did_you_mean(name, NAMES)}")
        if type(value) is not type(getattr(Config, name)):
            raise MinicompileError(f"minicompile.config.{name} must be a {type(getattr(Config, name)).__name__}, "
                                   f"not {value!r}.")
        if name == "recompile_limit" and value < 1:
            raise MinicompileError(f"minicompile.config.recompile_limit must be at least 1, not {value}.")
        object.__setattr__(self, name, value)

    @contextlib.contextmanager
    def patch(self, **values):
        """Change settings for the duration of a `with` block."""
        old = {name: object.__getattribute__(self, name) for name in values if name in NAMES}
        try:
            for name, value in values.items():
                setattr(self, name, value)
            yield self
        finally:
            for name, value in old.items():
                setattr(self, name, value)

    @contextlib.contextmanager
    def options(self, values: dict):
        """The options of one compilation, seen only by the thread that compiles."""
        token = _overrides.set(dict(values))
        try:
            yield self
        finally:
            _overrides.reset(token)


# %%
def did_you_mean(name, known) -> str:
    close = difflib.get_close_matches(str(name), list(known), 1)
    return f" Did you mean {close[0]!r}?" if close else f" Known: {', '.join(sorted(known))}."


def resolve_options(mode, options) -> dict:
    """Mode and options of `compile` as one dict of settings. Raises MinicompileError on unknown names."""
    if mode is not None and options is not None:
        raise MinicompileError("compile takes either mode or options, not both: a mode is a set of options.")
    if mode is not None and mode not in MODES:
        raise MinicompileError(f"Unknown mode {mode!r}.{did_you_mean(mode, MODES)}")
    result = dict(MODES[mode or "default"])
    if options is not None and not isinstance(options, dict):
        raise MinicompileError(f"options must be a dict of settings, not {type(options).__name__}.")
    for name, value in (options or {}).items():
        key = ALIASES.get(name, name)
        if key not in OPTIONS:
            raise MinicompileError(f"Unknown option {name!r}.{did_you_mean(name, [*OPTIONS, *ALIASES])}")
        default = getattr(Config, key)
        if type(value) is not type(default):
            raise MinicompileError(f"Option {name!r} must be a {type(default).__name__}, not {value!r}.")
        result[key] = value
    return result


NAMES = {f.name for f in fields(Config)}
config = Settings()
