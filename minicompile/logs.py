# %% [markdown]
# # Logs
#
# A compiler decides much that nobody sees. `MINICOMPILE_LOGS=graph_breaks,recompiles python script.py`, or `set_logs("code")`, shows
# decisions of one topic. Each topic is an ordinary logger, `minicompile.NAME`, so a program can send it where its own logs go.

# %%
import functools
import logging
import os
import sys
import warnings

from .errors import MinicompileError

ARTIFACTS = {
    "graph_breaks": "why and where a function could not be captured in one graph, and what to do about it",
    "recompiles": "which guard failed when a function was compiled again, and what to do about it",
    "guards": "the guards of every entry, in words and as the generated function that checks them",
    "graph": "captured graphs as Python",
    "aot": "forward and backward graphs after differentiation",
    "loops": "the loop IR",
    "fusion": "fusion decisions and their reasons",
    "code": "generated kernels and host programs",
    "perf_hints": "missed optimisations",
    "bytecode": "the bytecode of captured frames and resume functions, and the entry generated for each",
}
_warned: set = set()


@functools.cache          # `getLogger` takes a lock, which an interrupt inside it would leave taken for ever
def get(name: str) -> logging.Logger:
    return logging.getLogger("minicompile." + name)


def on(name: str) -> bool:
    return get(name).isEnabledFor(logging.DEBUG)


def log(name: str, message: str, *args) -> None:
    get(name).debug(message, *args)


def set_logs(*names: str) -> None:
    """Switch on exactly these topics: names, or texts of names with commas ("all": every one). Without names,
    switch all off. Raises MinicompileError on unknown names."""
    wanted = [n.strip() for text in names for n in str(text).split(",") if n.strip()]
    unknown = [n for n in wanted if n not in ARTIFACTS and n != "all"]
    if unknown:
        raise MinicompileError(f"Unknown log {unknown[0]!r}. "
                               f"MINICOMPILE_LOGS takes: {', '.join(ARTIFACTS)}, all.")
    root = logging.getLogger("minicompile")
    if wanted and not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("[%(name)s] %(message)s"))
        root.addHandler(handler)
        root.propagate = False
    for name in ARTIFACTS:
        get(name).setLevel(logging.DEBUG if name in wanted or "all" in wanted else logging.NOTSET)


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun if number == 1 else noun + 's'}"


# %% [markdown]
# ## Events
#
# The stages do not write texts. They `tell` what they do, as a kind of event with its data: `tell("recompile", state=..., version=2,
# why=...)`. Two sorts of listeners hear it. A topic has registered a function that makes texts of the data (`writes`; the functions
# stand in `topics.py`), and that is called only if the topic is switched on, so nobody prints a graph that nobody reads. A watcher gets
# the data as they are: that is how `explain`, the explorer and the chapters of this book see what was compiled.

# %%
watchers: list = []          # called as watch(kind, **data) with what the stages do; `explain` listens
_writers: dict = {}          # kind of event -> (topic, function(**data) -> texts) of the topics that speak of it


def writes(topic: str, kind: str):
    """Register what a topic says about a kind of event."""
    def register(function):
        _writers.setdefault(kind, []).append((topic, function))
        return function
    return register


def tell(kind: str, **data) -> None:
    """Report an event: again, captured, entry, graph, stage (a graph between capture and lowering, which `origins` of the next one
    name), cut, schedule, fallback, as_captured, internal_error, recompile, specialized or skipped."""
    for topic, texts in _writers.get(kind, ()):
        if on(topic):
            for text in texts(**data):
                log(topic, "%s", text)
    for watch in list(watchers):
        watch(kind, **data)


# %% [markdown]
# What a user should know without having asked for a log is a warning, and each only once.

# %%
def warn_once(key, message: str, seen: set = _warned) -> None:
    """A RuntimeWarning, the first time this key is seen; `seen` remembers it."""
    if key not in seen:
        seen.add(key)
        warnings.warn(message, RuntimeWarning, stacklevel=2)


def set_from_environment() -> None:
    if names := os.environ.get("MINICOMPILE_LOGS"):
        try:
            set_logs(names)
        except MinicompileError as error:
            warnings.warn(str(error), RuntimeWarning, stacklevel=2)


set_from_environment()
