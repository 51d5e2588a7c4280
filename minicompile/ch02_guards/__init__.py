# %% [markdown]
# # Chapter 2: guards
#
# A graph is right for the call that it was recorded from. The next call may bring a tensor of another dtype or shape, or come under
# `no_grad`, and Python says so nowhere: the same bytecode then does something else. A compiled function is a bet that the next
# call looks like the one that was traced. This chapter is about checking the bet, at every call, for less than the call is worth.
#
# What the trace of `centred` (chapter 1) took for granted, when it was called with `torch.ones(64, 256)`:
#
#     gradients are recorded
#     inference mode is off
#     default dtype is torch.float32
#     deterministic algorithms are off
#     autocast is off
#     no mode sees operations
#     the methods of tensors are PyTorch's
#     x is a float32 tensor [64, 256] on cpu, contiguous
#
# Each of these is a *guard*. All guards of one version are one Python function, whose text is generated. (The compiler's own names
# begin with two underscores.)
#
#     def __compiled_centred(__F, x):
#         try:
#             __s = __state()
#             if __s is not None or __forward_ad._current_level >= 0:
#                 if not (__grad_mode() is True): raise __Miss
#                 if not (__inference_mode() is False): raise __Miss
#                 if not (__default_dtype() is __s0): raise __Miss
#                 if not (__deterministic() is False): raise __Miss
#                 if not (not __any_autocast()): raise __Miss
#                 if not (__overrides()
#                         and not (__function_modes()
#                                 or __dispatch_modes()
#                                 or __transforms()
#                                 or __included(__batching)
#                                 or __forward_ad._current_level >= 0)): raise __Miss
#                 __state(__s)
#             __w = __stable()
#             if __w is None: __w = __refresh(__stable, __stable_full, ())
#             __t = __tensors(x)
#             if __t is None: __t = __refresh(__tensors, __tensors_full, (x, ))
#         except __Miss:
#             pass
#         except __Exception as __error:
#             if __interrupts(__error): raise
#         else:
#             __inputs = (x, )
#             try:
#                 __out = __graph(*__inputs)
#             except BaseException:
#                 if __refused(*__inputs):
#                     return __EVALUATE
#                 raise
#             return __out[0]
#         return __next[0](__F, x)
#
# The `try` block is the check. Its guards are behind *memos*, which remember that they held and notice when something has changed:
# `__state` answers for six states of the library, `__stable` for the methods of tensors, `__tensors` for
# what `x` is. Where the state is another one than remembered, the six are asked one by one. Each other memo answers None when it has to
# look again, by `__refresh`. Where all hold, `__graph` runs; where one does not,
# `__next` is the next version, and behind the last one the compiler. A guard that raises does not hold, as when an attribute is gone;
# what a handler of signals raises meanwhile is for the program (`__interrupts`). (`__EVALUATE` leaves the call to CPython, for an error
# that the program's own line is to raise.)
#
# At the end of the chapter you can read such a text line by line, say what a guard costs, add a kind of guard, and tell from the words of
# a recompilation what changed.
#
# What it leaves: who asks these questions. Chapter 3 runs the program and finds out what it looks at.
#
# Sources: L. P. Deutsch, A. M. Schiffman, *Efficient Implementation of the Smalltalk-80 System* (1984), and U. Hölzle and others,
# *Polymorphic Inline Caches* (1991), for a check in front of code that is kept; PEP 509, for the numbers of dictionaries.
#
# In reading order:
#
# 1. `sources.py`: how a value was reached, from an argument or a global to an attribute of an item;
# 2. `guards.py` and `torch_guards.py`: what was assumed about it; `identity.py`: whom an entry keeps alive;
# 3. `stable.py`: the assumptions that need no second look as long as nothing was written, `memory.py`: what its extension in C
#    asks of many tensors at once;
# 4. `codegen.py`: from all assumptions of an entry to one function;
# 5. `cache.py`: several entries for one function, and when to give up.
