# %% [markdown]
# # Chapter 7: Loops
#
# A graph of primitives says which operators to run. This chapter says how each of them visits its elements,
# for only then can a later stage see that two of them visit the same ones. `lower(graph)` gives a `Program`
# of loops and library calls; `run_program` runs it, slowly and strictly.
#
# Read `ir` for the language, `builder` for how a body is written, and `lazy` for the one idea behind the
# rest: a tensor is a function from an index to an element until somebody needs it in memory. `pointwise`, `reductions`
# and `views` have what the lowerings of a family share, `updates` what is written in place, `externs` what stays a library
# call. `table` has the lowerings of single operators, which are in `rules`, by subject. `lower` walks the graph, `reference` executes
# loops, `verify` checks and prints them.
