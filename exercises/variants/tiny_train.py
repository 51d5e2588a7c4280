import torch


def _operation(forward, backward, differentiable, wanted, *, mark=True, every=False, nothing=False, kept=True, kind=tuple, turned=False):
    class One(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            results = forward(*inputs)
            outputs, saved = results[:len(differentiable)], results[len(differentiable):]
            ctx.save_for_backward(*(saved if kept else saved[:-1]))
            if mark:
                ctx.mark_non_differentiable(*[x for x, d in zip(outputs, differentiable) if not d])
            return kind(outputs)

        @staticmethod
        def backward(ctx, *tangents):
            given = tangents if every else [t for t, d in zip(tangents, differentiable) if d]
            gradients = list(backward(*ctx.saved_tensors, *given))
            gradients = gradients[::-1] if turned else gradients
            return tuple((None if nothing else gradients.pop(0)) if w else None for w in wanted)
    return One.apply


def wrong_nothing_marked(forward, backward, differentiable, wanted):
    return _operation(forward, backward, differentiable, wanted, mark=False)


def wrong_every_tangent(forward, backward, differentiable, wanted):
    return _operation(forward, backward, differentiable, wanted, every=True)


def wrong_no_gradients(forward, backward, differentiable, wanted):
    return _operation(forward, backward, differentiable, wanted, nothing=True)


def wrong_last_not_saved(forward, backward, differentiable, wanted):
    return _operation(forward, backward, differentiable, wanted, kept=False)


def wrong_gradients_turned(forward, backward, differentiable, wanted):
    return _operation(forward, backward, differentiable, wanted, turned=True)


def wrong_only_forward(forward, backward, differentiable, wanted):
    return lambda *inputs: tuple(forward(*inputs)[:len(differentiable)])


def right_attributes(forward, backward, differentiable, wanted):
    count = len(differentiable)

    class Whole(torch.autograd.Function):
        def forward(ctx, *inputs):
            made = forward(*inputs)
            ctx.save_for_backward(*made[count:])
            ctx.mark_non_differentiable(*(made[k] for k in range(count) if not differentiable[k]))
            return tuple(made[:count])

        def backward(ctx, *tangents):
            found = backward(*ctx.saved_tensors, *(tangents[k] for k in range(count) if differentiable[k]))
            answer = [None] * len(wanted)
            for place, gradient in zip([k for k, w in enumerate(wanted) if w], found):
                answer[place] = gradient
            return tuple(answer)
    Whole.forward, Whole.backward = staticmethod(Whole.forward), staticmethod(Whole.backward)
    return Whole.apply
