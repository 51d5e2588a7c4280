import torch

wrong_nothing_detached = [("t if alias else t.detach()", "t")]
wrong_views_detached = [("t if alias else t.detach()", "t.detach()")]
wrong_all_hang_on_ctx = [("ctx.save_for_backward(*[t for t, n in zip(kept, order) if spec.sources[n][1]])", "ctx.save_for_backward()"),
                         ("ctx.kept = [None if spec.sources[n][1] else t for t, n in zip(kept, order)]", "ctx.kept = kept"),
                         ("next(saved) if spec.sources[n][1] else t", "t")]
wrong_all_saved = [("ctx.save_for_backward(*[t for t, n in zip(kept, order) if spec.sources[n][1]])", "ctx.save_for_backward(*kept)"),
                   ("next(saved) if spec.sources[n][1] else t", "next(saved)")]
wrong_all_differentiable = [("ctx.mark_non_differentiable(*[t for t, frozen in zip(outputs, spec.frozen) if frozen])", "pass")]
wrong_always_materialized = [("ctx.set_materialize_grads(spec.materialize)", "pass")]
wrong_gradients_of_outputs = [("return (None,) * (1 + count) + gradients", "return (None,) + gradients + (None,) * count")]
wrong_inputs_not_outputs = [("pool = [*outputs, *operands[count:], *others]", "pool = [*operands, *others]")]
wrong_first_case = [("spec.graphs[present]", "next(iter(spec.graphs.values()))")]


def right_fills_places(spec):
    def forward(ctx, *operands):
        ctx.places, made = len(operands), []
        for k in range(spec.outputs):
            made.append(operands[k] if spec.aliases[k] else operands[k].detach())
        known = made + list(operands[spec.outputs:])
        watched, ctx.own = [], {}
        for value, (place, saved) in spec.sources.items():
            if saved:
                watched.append(known[place])
            else:
                ctx.own[value] = known[place]
        ctx.save_for_backward(*watched)
        ctx.mark_non_differentiable(*(t for k, t in enumerate(made) if spec.frozen[k]))
        ctx.set_materialize_grads(spec.materialize)
        return tuple(made)

    def backward(ctx, *tangents):
        if all(t is None for t in tangents):
            return (None,) * ctx.places
        values = dict(ctx.own)
        values.update(zip([v for v, (_, saved) in spec.sources.items() if saved], ctx.saved_tensors))
        graph, read = spec.graphs[tuple(t is not None for t in tangents)]
        found = [None] * ctx.places
        found[spec.outputs:spec.outputs + spec.inputs] = graph(*(values[v] for v in read), *tangents)
        return tuple(found)

    cls = type(spec.name, (torch.autograd.Function,), dict(forward=staticmethod(forward), backward=staticmethod(backward)))

    def region(*operands):
        return cls.apply(*operands)

    region.__name__ = region.__qualname__ = spec.name
    region.joined = spec
    return region
