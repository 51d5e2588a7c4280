from minicompile.ch01_graphs.graph import call_node, interpret


def _run(recorder, gm, inputs, call=None, *, location=True, origin=True, mark=True, remember=True, other=True, late=False):
    def on_node(node, args, kwargs):
        stamp = (node.meta.get("location") if location else None), ((node.name,) if origin else ())
        if not late:
            recorder.provenance = stamp
        recorder.recompute = node.meta.get("recompute", 0) if mark else 0
        out = call(node, args, kwargs) if call and other else call_node(gm, node, args, kwargs)
        recorder.provenance = stamp
        if remember:
            recorder.remember_grad_fns(out)
        return out
    return interpret(gm, inputs, on_node)


def wrong_no_location(recorder, gm, inputs, call=None):
    return _run(recorder, gm, inputs, call, location=False)


def wrong_no_origin(recorder, gm, inputs, call=None):
    return _run(recorder, gm, inputs, call, origin=False)


def wrong_no_marks(recorder, gm, inputs, call=None):
    return _run(recorder, gm, inputs, call, mark=False)


def wrong_backward_forgotten(recorder, gm, inputs, call=None):
    return _run(recorder, gm, inputs, call, remember=False)


def wrong_one_node_late(recorder, gm, inputs, call=None):
    return _run(recorder, gm, inputs, call, late=True)


def wrong_only_one_way(recorder, gm, inputs, call=None):
    return _run(recorder, gm, inputs, call, other=False)


def wrong_only_run(recorder, gm, inputs, call=None):
    return interpret(gm, inputs)


def right_two_functions(recorder, gm, inputs, call=None):
    compute = call or (lambda node, args, kwargs: call_node(gm, node, args, kwargs))

    def stamped(node, args, kwargs):
        meta = node.meta
        recorder.provenance, recorder.recompute = (meta.get("location"), (node.name,)), meta.get("recompute") or 0
        result = compute(node, args, kwargs)
        recorder.remember_grad_fns(result)
        return result
    return interpret(gm, inputs, on_node=stamped)
