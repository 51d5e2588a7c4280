from minicompile.ch01_graphs.graph import together
from minicompile.ch05_autograd.cleanup import UNIQUE, _key, has_effect


def _merge(gm, *, key=_key, unique=UNIQUE, effect=has_effect, kwargs=True, origins=True, rewrite=True, repeat=False, lines=True):
    seen, gone = {}, []
    for node in list(gm.graph.nodes):
        if node.op != "call_function" or node.target in unique or effect(node):
            continue
        try:
            earlier = seen.setdefault((node.target, key(node.args), key(node.kwargs) if kwargs else None), node)
        except TypeError:
            continue
        if earlier is not node:
            if lines:
                earlier.meta["location"] = together([earlier.meta["location"], node.meta["location"]])
            joined = earlier.meta.get("origins", ()) + node.meta.get("origins", ())
            if origins:
                earlier.meta["origins"] = joined if repeat else tuple(dict.fromkeys(joined))
            if rewrite:
                node.replace_all_uses_with(earlier)
                gm.graph.erase_node(node)
            else:
                gone.append((node, earlier))
    for node, earlier in gone:
        node.replace_all_uses_with(earlier)
        gm.graph.erase_node(node)


def _loose(a):
    return tuple(_loose(x) for x in a) if isinstance(a, (list, tuple)) else tuple(a.items()) if isinstance(a, dict) else a


def wrong_one_is_true(gm):
    _merge(gm, key=_loose)


def wrong_merges_draws(gm):
    _merge(gm, effect=lambda node: False)


def wrong_merges_fresh_memory(gm):
    _merge(gm, unique=set())


def wrong_drops_origins(gm):
    _merge(gm, origins=False)


def wrong_keyword_arguments_do_not_count(gm):
    _merge(gm, kwargs=False)


def wrong_lines_lost(gm):
    _merge(gm, lines=False)


def wrong_repeats_origins(gm):
    _merge(gm, repeat=True)


def wrong_only_one_level(gm):
    _merge(gm, rewrite=False)


def wrong_ignores_arguments_after_the_first(gm):
    _merge(gm, key=lambda a: _key(a[:1]) if isinstance(a, tuple) else _key(a))


def right_by_name(gm):
    first = {}
    for node in list(gm.graph.nodes):
        if node.op == "call_function" and node.target not in UNIQUE and not has_effect(node):
            try:
                signature = hash((node.target, _key(node.args), _key(node.kwargs))), node.target, _key(node.args), _key(node.kwargs)
            except TypeError:
                continue
            if signature not in first:
                first[signature] = node
                continue
            kept = first[signature]
            both = [*kept.meta.get("origins", ()), *node.meta.get("origins", ())]
            kept.meta["origins"] = tuple(o for k, o in enumerate(both) if o not in both[:k])
            kept.meta["location"] = together([n.meta.get("location") for n in (kept, node)])
            for user in list(node.users):
                user.replace_input_with(node, kept)
            gm.graph.erase_node(node)
