# %% [markdown]
# # Printing the dialect

# %%
from itertools import groupby

from . import PRIMITIVES, TABLE
from .primitives import CATEGORIES


def overview() -> str:
    """The primitives by category with their meanings, and how many ATen operators the table translates
    into them."""
    lines = []
    for category in CATEGORIES:
        members = [p for p in PRIMITIVES.values() if p.category == category]
        lines.append(f"\n{category} ({len(members)})")
        for meaning, alike in groupby(members, lambda p: p.meaning):
            lines.append(f"  {' '.join(str(p.op).removeprefix('aten.').removesuffix('.default') for p in alike)}: {meaning}")
    translated = [op for op in TABLE if op not in PRIMITIVES]
    packets = {str(op).split(".")[1] for op in translated}
    lines.append(f"\n{len(PRIMITIVES)} primitives; {len(translated)} ATen overloads of {len(packets)} "
                 f"operators are translated into them; {len(TABLE) - len(translated)} primitives are "
                 f"themselves made regular (promotion, dims, rounding)")
    return "\n".join(lines).lstrip("\n")


if __name__ == "__main__":
    print(overview())
