from chapters.tiny import as_node, on_meta, operator, tree_map, wrap


def _record(recorder, op, args, kwargs, *, node_of=as_node, keywords=True, pieces=True, kind=None, first=0):
    result, device = on_meta(op, args, kwargs)
    node = recorder.note(op, *tree_map(node_of, (args, kwargs if keywords else {})))
    if isinstance(result, (tuple, list)):
        node.fake = result
        made = [wrap(r, device, recorder.note(operator.getitem, (node, k + first)) if pieces else node) for k, r in enumerate(result)]
        return (kind or type(result))(made)
    return wrap(result, device, node)


def wrong_no_pieces(recorder, op, args, kwargs):
    return _record(recorder, op, args, kwargs, pieces=False)


def wrong_keywords_lost(recorder, op, args, kwargs):
    return _record(recorder, op, args, kwargs, keywords=False)


def wrong_arguments_are_fakes(recorder, op, args, kwargs):
    return _record(recorder, op, args, kwargs, node_of=lambda x: x)


def wrong_counted_from_one(recorder, op, args, kwargs):
    return _record(recorder, op, args, kwargs, first=1)


def wrong_meta_tensors(recorder, op, args, kwargs):
    result, device = on_meta(op, args, kwargs)
    recorder.note(op, *tree_map(as_node, (args, kwargs)))
    return result


def wrong_always_the_first(recorder, op, args, kwargs):
    result, device = on_meta(op, args, kwargs)
    node = recorder.note(op, *tree_map(as_node, (args, kwargs)))
    return wrap(result[0] if isinstance(result, (tuple, list)) else result, device, node)


def right_step_by_step(recorder, op, args, kwargs):
    result, device = on_meta(op, args, kwargs)
    node = recorder.note(op, tuple(tree_map(as_node, list(args))), {k: tree_map(as_node, v) for k, v in kwargs.items()})
    if not isinstance(result, (tuple, list)):
        return wrap(result, device, node)
    node.fake, found = result, []
    for k in range(len(result)):
        found.append(wrap(result[k], device, recorder.note(operator.getitem, (node, k))))
    return tuple(found) if isinstance(result, tuple) else found
