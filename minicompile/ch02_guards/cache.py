# %% [markdown]
# # Several entries for one function
#
# A function called with two batch sizes, or in training and in evaluation, has several compiled entries,
# each with its own guards. They form a chain: an entry whose guards fail calls the next with the same
# arguments, and the last calls the *tail*, which compiles a new one. What the frame hook calls is always
# the head, so the common case costs one call.
#
# When the head misses two calls and another entry serves both, with no third entry between, that entry moves
# to the front: programs tend to stay in one phase for a while. Others change at each call: a step trains a network, and asks a copy of
# it, without gradients, for its targets. When the head has missed eight calls, it is no better than the others, and is asked like them
# (`note_miss`), until one entry serves `STAYS` calls in succession. Meanwhile programs do what they did before: tried first is the entry
# that served next when the two calls before were last served by the same two entries (`then`). And since every entry costs time at a
# miss, there is a limit, eight as in torch.compile. Beyond it, calls that no entry fits run eagerly, and the user learns which guard kept
# failing.
#
# A miss tells something: by which guards the entry and that call differ. They come first from then on, as the **question** that tells
# which entries are to be tried. Where the versions are for the numbers 1 to 8, a call with a 9 compares one number eight times, and does
# not ask for the state of the library and all that comes before a number among the guards, nor eight times for the list that the number
# is in.
#
# The blocks of a model share the code of their class, and where each is compiled by itself and has numbers of its own, each has its own
# entries: a hundred blocks would ask a hundred entries each. But a block that comes again is mostly served by one of the entries that
# have served it. So `latest` knows those for the first argument of the call, the last eight. They are only guesses, since an entry checks
# its guards as always; the address of the argument is therefore enough to find them. Of more than `FEW` entries, each has a question of
# its own, and the guesses come first.

# %%
import functools
import sys
import time
import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Callable

from .guards import GuardSet
from .identity import identified

# What an entry outside a search returns on a miss; the frame hook then evaluates the frame as it is
MISSED = object()


@dataclass(eq=False)
class Entry:
    """One compiled version. function(func, *frame_args) checks and runs; `next` is the cell it calls on a
    miss."""
    function: Callable
    next: list
    guards: GuardSet
    constants: tuple = ()
    model: Any = None                                # the module whose method this is, held weakly, or None
    kind: tuple = ()                                 # its class, weakly, and the name of that
    number: int = 0
    ahead: tuple = ()                                # how to do what its graph expects to be done (`Effects` in chapter 3)
    watches: list = field(default_factory=list)      # weak references whose death makes the entry useless
    telling: list = field(default_factory=list)      # guards that failed
    question: Callable | None = None                 # question(func, *frame_args): [True] where all of these hold, or []
    check: Callable | None = None                    # the same for all guards, where somebody has asked for it
    seconds: float = 0.0                             # what it took to make
    born: float = field(default_factory=time.monotonic)


@dataclass(eq=False)
class EntryCache:
    """The entries of one code object, most recently used first. `publish(head)` tells the frame hook whom
    to call."""
    name: str
    tail: Callable
    publish: Callable[[Any], None]
    entries: list = field(default_factory=list)
    # Explanation of a miss -> how often it caused a recompile
    failures: Counter = field(default_factory=Counter)
    created: int = 0
    candidate: Entry | None = None                       # served the last call that the head missed
    before: Entry | None = None                          # and the one before that
    stayed: int = 0                                      # how often in succession it was the same
    then: dict = field(default_factory=dict)             # (before, candidate) -> the entry that served next
    passed: int = 0                                      # calls that heads have missed, up to MOST_MISSES
    unserved: int = 0                                    # calls in succession that no entry has served
    gone: list = field(default_factory=list)             # (model, kind) of entries that lived too short to be worth their making
    latest: dict = field(default_factory=dict)           # id(first argument) -> the entries that `search` found for it
    ask: Callable | None = None                          # ask(entries, answers): makes their question; None: all are tried
    question: Callable | None = None                     # that of all, where they are few


# %% tags=["exercise:cache-bug"]
def link_entries(cache: EntryCache) -> None:
    """Connect head -> search -> tail after the list has changed."""
    entries = list(cache.entries)
    if not entries:
        cache.publish(cache.tail)
        return
    for entry in entries[1:]:
        entry.next[0] = missed
    number = entries[0].number
    entries[0].next[0] = cache.tail if len(entries) == 1 else lambda *args: search(cache, args, number)
    cache.publish(entries[0].function)


# %% [markdown]
# An entry that is not the head answers a miss with `MISSED`, and `search` goes on to the next. The hook calls `search` for the head's
# `next`, or, where the head is nothing special any more, instead of it.
#
# Other threads change the list at any time. So one of them may read it at any time: it is never without an entry that is only moved. Two
# that connect the chain at once may leave a part as either wants it, so whoever has connected it looks whether the list is still the
# same (`connect_all`). And an entry that is no longer the head does not search: it may itself be asked by a search, which would not end.

# %%
def connect_all(cache: EntryCache) -> None:
    linked = None
    while linked != (now := (list(cache.entries), cache.passed >= MOST_MISSES)):
        linked = now
        link_entries(cache)
        if all(now):
            now[0][0].next[0] = missed
            cache.publish(lambda *args: search(cache, args, 0))


def missed(*args):
    return MISSED


def search(cache: EntryCache, args, asked: int | None = None):
    """The head was asked in vain, an entry of that number; 0: none was. Try the others in order, then the tail."""
    if asked != 0:
        if asked is not None and [entry.number for entry in cache.entries[:1]] != [asked]:
            return MISSED
        note_miss(cache)
    who = id(args[1]) if len(args) > 1 else None
    for entry in order_of_search(cache, who, args, asked):
        result = entry.function(*args)
        if result is not MISSED:
            note_hit(cache, who, entry)
            return result
    cache.before, cache.candidate, cache.unserved = None, None, cache.unserved + 1      # of what no entry serves, nothing is guessed
    return cache.tail(*args)


# %% [markdown]
# Whom to try? Of few entries (as many as one function has of all patterns, by `limits.py`) one question names those that may fit. It is
# kept until there is another entry, or another guard has told a call and an entry apart, and made when it is next wanted. Writing it for
# hundreds of entries, anew with each of them, would take longer than it saves. Other threads add, drop and move entries meanwhile, so
# a question is only asked about as many as it was written for, and only kept if they are the same when it is.

# %%
FEW = 32                         # entries that share one question


def order_of_search(cache: EntryCache, who, args, asked: int | None = 0):
    """Yields the entries to be tried, what is guessed first; of many, then those that served that first argument, the last one first."""
    guess = cache.before and cache.then.get((cache.before, cache.candidate))
    if guess is not None and guess.number != asked:
        yield guess
    entries = list(cache.entries)
    if asked is None and entries:
        asked = entries[0].number
    if len(entries) <= FEW:
        yield from (entry for entry in answers(cache, cache, entries, args) if entry.number != asked and entry is not guess)
        return
    served = list(cache.latest.get(who, ()))
    for entry in (*served, *(entry for entry in entries if entry not in served)):
        if entry.number != asked and entry is not guess and answers(cache, entry, [entry], args):
            yield entry


def answers(cache: EntryCache, asked, entries: list, args):
    """Those of the entries that may fit, by the question that is kept in `asked`. (An entry must not hold itself: True stands for it.)"""
    question = asked.question
    if (question is None or question.entries != len(entries)) and cache.ask is not None:
        question = cache.ask(entries, [True] if asked is not cache else entries)
        if question is not None:
            question.entries = len(entries)
        asked.question = question                                       # complete: another thread may read it at once
        if asked is cache and cache.entries != entries:                 # another thread, or the collector, has changed them
            cache.question = None
    return entries if question is None else question(*args)


MOST_MISSES, STAYS = 8, 32


def note_hit(cache: EntryCache, who, entry: Entry) -> None:
    """An entry has served a call that the head missed: at the second in succession, later at the last of many, it becomes the head."""
    if entry not in cache.entries:                      # dropped meanwhile, maybe by that call
        return
    if len(cache.entries) > FEW:
        served = cache.latest.setdefault(who, [])
        if entry not in served[:1]:
            served[:] = [entry, *(other for other in served[:7] if other is not entry)]
    last, cache.candidate, cache.unserved = cache.candidate, entry, 0
    cache.then[cache.before, last], cache.before = entry, last
    cache.stayed = cache.stayed + 1 if last is entry else 0
    if cache.stayed and (cache.passed < MOST_MISSES or cache.stayed >= STAYS):
        move_to_front(cache, entry)
    if len(cache.then) + len(cache.latest) >= 1000:
        cache.then.clear()
        cache.latest.clear()


def move_to_front(cache: EntryCache, entry: Entry) -> None:
    if entry in (entries := list(cache.entries)):
        moved = [entry, *(other for other in entries if other is not entry)]
        if cache.entries == entries:                                    # one step, and nothing has changed since
            cache.entries[:] = moved
            if cache.passed >= MOST_MISSES:
                cache.passed = 0
            connect_all(cache)


def note_miss(cache: EntryCache) -> None:
    """The head has missed. From the eighth time on it is asked like the others."""
    cache.passed = passed = cache.passed + 1
    if passed == MOST_MISSES:
        connect_all(cache)


# %% [markdown]
# A subtle point: another thread may reorder the chain while the head is checking its guards. The former
# head then returns `MISSED` to the frame hook instead of to `search`. The hook treats that answer like "not
# compiled": the frame is evaluated as it is, which is always right.

# %%
def add_entry(cache: EntryCache, entry: Entry) -> None:
    cache.entries.insert(0, entry)
    cache.created += 1
    entry.number, cache.passed, cache.unserved, cache.question = cache.created, 0, 0, None
    watch(cache, entry)
    connect_all(cache)


def drop_entry(cache: EntryCache, entry: Entry) -> None:
    drop_entries(cache, [entry])


def drop_entries(cache: EntryCache, dropped: list[Entry]) -> None:
    if any(entry in dropped for entry in cache.entries):
        cache.entries[:] = [entry for entry in cache.entries if entry not in dropped]
        cache.latest.clear()
        cache.then.clear()
        cache.before = cache.candidate = cache.question = None
        connect_all(cache)


# %% [markdown]
# An entry that identifies an object is dropped as soon as the object is gone: no call can ever match it again. Where the program
# makes the object anew for each call, a class say, every call makes an entry that dies with it. Compiling was a loss if the entry
# did not live for ten times as long as it took to make, and so many losses are too many: `gone` has them for the recompile limit.

# %%
def watch(cache: EntryCache, entry: Entry) -> None:
    """Drop the entry as soon as an object that it identifies is gone."""
    seen = set()
    weak_cache, weak_entry = weakref.ref(cache), weakref.ref(entry)

    def died(kind, _, exiting=sys.is_finalizing):        # then there are no globals any more
        if not exiting() and weak_cache() is not None and weak_entry() is not None:
            lost(weak_cache(), weak_entry(), kind)

    for target in identified((*(guard.expected for guard in entry.guards), *entry.constants)):
        if id(target) not in seen:
            seen.add(id(target))
            entry.watches.append(weakref.ref(target, functools.partial(died, type(target).__name__)))


def lost(cache: EntryCache, entry: Entry, kind: str) -> None:
    """An object of this kind is gone."""
    if entry in cache.entries and time.monotonic() - entry.born < 10 * entry.seconds:
        cache.gone.append((entry.model, entry.kind))
        cache.failures[f"the {kind} that it was made for is gone"] += 1
    drop_entry(cache, entry)


def worst_guard(cache: EntryCache) -> str:
    """The explanation that was given most often, for the warning at the limit."""
    return cache.failures.most_common(1)[0][0] if cache.failures else "no guard failure was recorded"
