# %% [markdown]
# # The garbage collector, while something is compiled or recorded
#
# A compilation makes hundreds of thousands of small objects, most of which live until its end. Python's collector would
# walk through all of them again and again, and find nothing: a fifth of the time. So it waits, and what was made meanwhile
# is old when it goes on. It waits while a CUDA graph is recorded, too: freeing the graph of a forgotten function would end
# the recording.

# %%
import contextlib
import gc


@contextlib.contextmanager
def without_collection():
    """The collector waits, and does not walk through what was made meanwhile afterwards."""
    if not gc.isenabled():
        yield
        return
    gc.collect(1)                   # what is young here is the program's, and is not to wait for a full collection
    gc.disable()
    try:
        yield
        grow_old()
    finally:
        gc.enable()


MANY, MOST = 100_000, 1_000_000     # young objects
IMMORTAL = 1000                     # CPython 3.12 counts 400 of them as frozen; a program freezes all that there is, always thousands
aged = 0                            # since the last full collection of ours


def grow_old():
    """Many young objects grow old without being looked at: most that a large compilation leaves lives on. The rest, for the collector
    does not know of it, must not add up over many of them."""
    global aged
    young = gc.get_count()[0]
    if young < MANY or gc.get_freeze_count() > IMMORTAL:       # the program has frozen what it wants to be frozen
        return
    aged += young
    if aged > MOST:
        aged = 0
        gc.collect()
    gc.freeze()
    gc.unfreeze()
