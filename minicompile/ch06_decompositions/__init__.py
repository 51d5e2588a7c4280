# %% [markdown]
# # Chapter 6: Decompositions
#
# The graph that comes out of differentiation speaks ATen, a language of three thousand operators. This
# chapter translates it into a dialect of about 150. Read `primitives` for the target language, `table` for
# how a translation is written; `decompose` runs the table over a graph. The translations themselves are in
# `rules`, by subject. `python -m minicompile.ch06_decompositions` prints the dialect.

# %%
from . import rules  # noqa: F401
from .decompose import Decomposed, decompose, violations
from .primitives import PRIMITIVES, is_primitive
from .table import TABLE, decomposition

__all__ = ["PRIMITIVES", "TABLE", "Decomposed", "decompose", "decomposition", "is_primitive", "violations"]
