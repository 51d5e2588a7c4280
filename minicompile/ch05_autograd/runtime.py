# %% [markdown]
# # The stage
#
# `compile_training` is what the driver calls. It needs no flag that says whether this is training: if no
# output depends on an input that requires a gradient, there is no backward, and the compiled forward is
# called directly.
#
# The function reads from top to bottom as the chapter does: record the joint graph, run the decompositions on it,
# cut it in two, compile both halves, make one node of the engine of them. `backward_versions` compiles the
# backward half for a set of tangents that are absent when it is first needed, and the call after it does so for
# the set that is expected. Inputs whose gradient is known to be absent (`apart`) are detached, so that the engine
# does not walk on from them.
#
# With `compile_aten` any function that gives a callable for a graph will do; the simplest runs the graph node by node:
#
#     run = compile_training(gm, fakes, lambda gm, is_backward: lambda args: gm(*args))
#
# For `relu(x - x.mean(1, keepdim=True))` and an `x` that requires a gradient, `run.joint` is the graph of both passes and
# `run.partition` has the two halves. The results of `run(x)` have a `grad_fn`, the node that calls the backward half. For an
# `x` that requires none, `run.partition` is None, and so is that `grad_fn`: this is the case of `_direct`, at the
# end.

# %%
import functools
from typing import Callable, Sequence

import torch
from torch import fx, is_grad_enabled, is_inference_mode_enabled

from .callables import Compile, call_compiled, changing, data_of, with_grad_mode, without_history
from .joint import Joint, simplify, trace_joint
from .outputs import as_new, build_finish, complex_results, only_results, without_gradients
from .partition import compare_operands, partition
from .region import backward_versions, build_function, expected_absent, hooks_see
from .second import Again


def compile_training(gm: fx.GraphModule, fakes: Sequence, compile_aten: Compile,
                     prepare: Callable | None = None, last: bool = False) -> Callable:
    """Compile a captured graph with its gradient: `f(*inputs) -> tuple of outputs`. Raises Unsupported.

    fakes: one per placeholder, with `requires_grad` as the real inputs have it.
    compile_aten(gm, is_backward=...): compiles a functional ATen graph to a callable from a list of
    inputs to a list of outputs.
    prepare: a pass on the joint graph before it is partitioned.
    last: whether all inputs are kept alive, in case that a derivative is wanted which needs more of them than backward does."""
    lower = without_history(compile_aten)
    joint = trace_joint(gm, fakes)
    if prepare is not None:
        simplify(joint, prepare)
        compare_operands(joint.gm)
    if not joint.gradients:
        return _direct(joint, lower)
    halves = partition(joint)
    forward = changing(lower(halves.forward, is_backward=False), joint.hidden, data_of)
    backward = backward_versions(halves, lower)
    backward(expected_absent(joint))
    placeholders = gm.graph.find_nodes(op="placeholder")
    parameters = {i for i in joint.gradients if placeholders[i].meta.get("parameter")}
    gradients = joint.gm.graph.output_node().args[0][-len(joint.gradients):]
    # No gradient flows back to these, so that backward must not go on from them, into what may be gone
    apart = [i for i, gradient in zip(joint.gradients, gradients) if gradient is None]
    apart = apart if len(apart) < len(joint.gradients) else []
    nodes, detached = parameters - {*apart}, parameters & {*apart}
    second = Again(gm, fakes, joint, compile_training, compile_aten, prepare, nodes, detached, last)
    function = build_function(joint, halves, forward, backward, second)
    apply = super(torch.autograd.Function, function).apply      # without the questions of `Function.apply`, which guards have asked
    finish = build_finish(joint)
    needs_enabling = not is_grad_enabled()        # the program itself enables gradients somewhere

    def call(*inputs):
        given = list(inputs)
        for i in apart:
            given[i] = given[i].detach()
        return finish(apply(*given), inputs)

    def run(*inputs):
        if second.ahead and not hooks_see():            # a checkpoint that runs it again compares what is saved
            return second.as_captured(*inputs)
        second.calls += 1
        inference = is_inference_mode_enabled()       # no gradients then, whatever the program says
        if needs_enabling or inference:
            return with_grad_mode(not inference, call, *inputs)
        return call(*inputs) if apart else finish(apply(*inputs), inputs)

    run.joint, run.partition, run.second = joint, halves, second
    return run


# %% [markdown]
# Without a backward there is no node, and with it goes what a node sees to: that nothing inside is recorded. Host programs see to it
# themselves; other callables, which may run operators one by one (`leaves_history`), run with gradients switched off. A graph that only
# takes views of its inputs has nothing to run, and the views are made by `finish`.
#
# A program of kernels alone asks no operator of PyTorch, so that autocast and what operators raise do not concern it (`calls_library`). Its
# function is called without more, and if its results are the outputs, nothing stands around it (`spread`): while the frame hook is
# installed, each call of a Python function costs a tenth of a microsecond, and eager adds two small tensors in two.

# %%
def _direct(joint: Joint, compile_aten: Compile) -> Callable:
    compiled = changing(compile_aten(joint.gm, is_backward=False), joint.hidden, data_of)
    leaves_history = getattr(compiled, "leaves_history", True)
    off = not is_grad_enabled() and (bool(joint.written) or without_gradients(joint))
    finish, complex_ones = build_finish(joint, off), complex_results(joint)
    nothing_computed = not joint.results and all(node.op != "call_function" for node in joint.gm.graph.nodes)
    as_computed = only_results(joint)
    if not (is_grad_enabled() or off or as_computed):         # the program itself enables gradients for a view
        finish = functools.partial(with_grad_mode, True, finish)

    def run(*inputs):
        if nothing_computed:                                # only views of inputs
            return finish((), inputs)
        results = with_grad_mode(False, call_compiled, compiled, [*inputs]) if leaves_history else call_compiled(compiled, [*inputs])
        return finish(as_new(results, complex_ones) if leaves_history or complex_ones else results, inputs)

    def run_kernels(*inputs):
        return finish(compiled.run([*inputs]) if compiled.resolved else compiled([*inputs]), inputs)

    if not (getattr(compiled, "calls_library", True) or nothing_computed or complex_ones):
        run = as_computed and compiled.spread() or run_kernels
    run.joint, run.partition, run.second = joint, None, None
    return run
