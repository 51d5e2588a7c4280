from minicompile.ch08_fusion.iteration import apply
from minicompile.ch08_fusion.legality import _is_wide, disjoint

wrong_one_direction = [("for x, y, map_x, map_y in ((a, b, alignment.a, alignment.b), (b, a, alignment.b, alignment.a)):",
                        "for x, y, map_x, map_y in ((a, b, alignment.a, alignment.b),):")]
wrong_names_are_memory = [("if f.root[other] != root:", "if other != name:")]
wrong_computed_positions = [("if name in x.scattered or other in y.guarded:", "if False:")]
wrong_walked_once = [("if reduces and other != name and", "if False and")]
wrong_walks_forbidden = [("if reduces and other != name and (other in y.wide_reads or _is_wide(y, x)):", "if reduces:")]
wrong_no_writes = [("for other, target in y.writes.items():", "for other, target in ():")]
wrong_all_writes_meet = [("(other in y.scattered or name in x.scattered or not disjoint(\n"
                          "                        apply(index, map_x), apply(target, map_y)))", "True")]
wrong_any_index = [("if any(apply(e, map_y) != at for e in indices):", "if False:")]
wrong_own_variables = [("at = apply(index, map_x)", "at = index"), ("if any(apply(e, map_y) != at for e in indices):",
                                                                   "if any(e != at for e in indices):")]


def right_reads_then_writes(f, a, b, alignment):
    for x, y, map_x, map_y in ((a, b, alignment.a, alignment.b), (b, a, alignment.b, alignment.a)):
        for name, index in x.writes.items():
            memory, at = f.root[name], apply(index, map_x)
            if memory not in f.aliased:
                continue
            for other in y.reads:
                same = f.root[other] == memory
                if same and (other in y.guarded or name in x.scattered or {apply(e, map_y) for e in y.reads[other]} != {at}):
                    return "read elsewhere"
                if same and other != name and (x.reduces or y.reduces) and (_is_wide(y, x) or other in y.wide_reads):
                    return "read twice"
            for other in y.writes:
                if f.root[other] == memory and (name in x.scattered or other in y.scattered
                                                or not disjoint(at, apply(y.writes[other], map_y))):
                    return "written twice"
    return None


# The first is a short cut. Two writes are looked at twice, once from each side. Without a reduction nothing is wide.
SAME = [
    "- if f.aliased.isdisjoint((f.root[n] for n in (*a.writes, *b.writes))):\n- return None\n"
        "+ if True:\n+ pass",
    "- if f.root[other] == root and (other in y.scattered or name in x.scattered or (not disjoint(apply(index, "
        "map_x), apply(target, map_y)))):\n"
        "+ if f.root[other] == root and (name in x.scattered or not disjoint(apply(index, map_x), apply(target, map_y))):",
    "- if f.root[other] == root and (other in y.scattered or name in x.scattered or (not disjoint(apply(index, "
        "map_x), apply(target, map_y)))):\n"
        "+ if f.root[other] == root and (other in y.scattered or not disjoint(apply(index, map_x), apply(target, map_y))):",
    "- if reduces and other != name and (other in y.wide_reads or _is_wide(y, x)):\n"
        "+ if other != name and (other in y.wide_reads or _is_wide(y, x)):",
]
