import torch

from chapters.tiny import Joint, finish


def _joint(recorder, outputs, *, given=True, of_all=False, unused=True, first=False, counted=None, wanted=None):
    differentiable = [x for x in outputs if x.requires_grad or of_all]
    wanted = [n.fake for n in recorder.inputs if n.fake.requires_grad][:wanted]
    if not differentiable:
        return Joint(finish(recorder, outputs), 0, len(outputs))
    with recorder, torch.autograd.set_multithreading_enabled(False):
        tangents = [recorder.input(x, requires_grad=False) if given else torch.ones_like(x) for x in differentiable]
        gradients = torch.autograd.grad(differentiable, wanted, tangents, allow_unused=unused)
    made = [*gradients, *outputs] if first else [*outputs, *gradients]
    return Joint(finish(recorder, made), len(tangents), len(outputs) if counted is None else counted)


def wrong_ones_for_tangents(recorder, outputs):
    return _joint(recorder, outputs, given=False)


def wrong_tangents_for_all(recorder, outputs):
    return _joint(recorder, outputs, of_all=True)


def wrong_all_inputs_are_used(recorder, outputs):
    return _joint(recorder, outputs, unused=False)


def wrong_gradients_first(recorder, outputs):
    return _joint(recorder, outputs, first=True)


def wrong_first_gradient_only(recorder, outputs):
    return _joint(recorder, outputs, wanted=1)


def wrong_count_of_outputs(recorder, outputs):
    return _joint(recorder, outputs, counted=0)


def wrong_only_forward(recorder, outputs):
    return Joint(finish(recorder, outputs), 0, len(outputs))


def right_zeros_left_out(recorder, outputs):
    tangents, sources = [], [x for x in outputs if x.requires_grad]
    if sources == []:
        return Joint(finish(recorder, list(outputs)), 0, len(outputs))
    fakes = [node.fake for node in recorder.inputs]
    with recorder:
        for x in sources:
            tangents.append(recorder.input(x.detach(), False))
        with torch.autograd.set_multithreading_enabled(False):
            found = torch.autograd.grad(sources, [f for f in fakes if f.requires_grad], tangents, allow_unused=True)
    return Joint(finish(recorder, list(outputs) + list(found)), len(sources), len(outputs))


# On a CPU the engine runs in the calling thread in any case, and nobody asks whether a tangent requires a gradient.
SAME = [
    "- with recorder, torch.autograd.set_multithreading_enabled(False):\n"
        "+ with recorder, torch.autograd.set_multithreading_enabled(True):",
    "- tangents = [recorder.input(x, requires_grad=False) for x in differentiable]\n"
        "+ tangents = [recorder.input(x) for x in differentiable]",
    "- tangents = [recorder.input(x, requires_grad=False) for x in differentiable]\n"
        "+ tangents = [recorder.input(x, requires_grad=True) for x in differentiable]",
]
