"""The cut saves what it should: little, nothing random twice, nothing expensive twice."""
import itertools
import random
import time
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers import compile_function, run_and_grads

from minicompile.ch05_autograd.callables import interpret_aten
from minicompile.ch05_autograd.cleanup import is_random
from minicompile.ch05_autograd.maxflow import Network, add_edge, add_vertex, maximum_flow, sink_side
from minicompile.ch05_autograd.runtime import compile_training
from minicompile.ch06_decompositions.decompose import decompose

aten = torch.ops.aten


def rand(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def saved_targets(compiled):
    joint = {n.name: n for n in compiled.joint.gm.graph.nodes}
    return [getattr(joint[name], "target", None) for name, i in zip(compiled.partition.saved, compiled.partition.saved_inputs) if i is None]


def backward_targets(compiled):
    return [n.target for n in compiled.partition.backward.graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize("prepare", (None, decompose))
def test_what_the_engine_calls_runs_in_backward(prepare):
    """Also where it is given zeros, the gradient of `ceil`, which depend on no tangent."""
    compiled = compile_function(lambda x, w: F.conv1d(x.sin(), w).ceil() + F.conv1d(x, w), [rand(1, 2, 5), rand(2, 2, 2)],
                                stage=partial(compile_training, prepare=prepare))
    forward = [n.target for n in compiled.partition.forward.graph.nodes]
    assert forward.count(aten.convolution.default) == 2 and aten.convolution_backward.default not in forward
    assert backward_targets(compiled).count(aten.convolution_backward.default) == 2


def test_maximum_flow_against_all_cuts():
    for seed in range(60):
        rng = random.Random(seed)
        n = rng.randrange(3, 8)
        edges = [(a, b, rng.randrange(1, 9)) for a in range(n) for b in range(n) if a != b and rng.random() < 0.5]
        net = Network()
        for _ in range(n):
            add_vertex(net)
        for a, b, c in edges:
            add_edge(net, a, b, c)
        cuts = [sum(c for a, b, c in edges if a in side and b not in side)
                for k in range(n) for rest in itertools.combinations(range(1, n - 1), k) for side in [{0, *rest}]]
        assert maximum_flow(net, 0, n - 1) == min(cuts)
        behind = sink_side(net, n - 1)
        assert sum(c for a, b, c in edges if a not in behind and b in behind) == min(cuts)


def test_maximum_flow_of_a_large_graph_is_fast():
    net, rng = Network(), random.Random(0)
    source, sink = add_vertex(net), add_vertex(net)
    pairs = [(add_vertex(net), add_vertex(net)) for _ in range(2000)]
    for i, (enter, leave) in enumerate(pairs):
        add_edge(net, enter, leave, rng.randrange(1, 10 ** 6))
        for j in range(max(0, i - 8), i):
            if rng.random() < 0.3:
                add_edge(net, pairs[j][1], enter, 1 << 60)
        if rng.random() < 0.2:
            add_edge(net, source, enter, 1 << 60)
        if rng.random() < 0.3:
            add_edge(net, leave, sink, 1 << 60)
    start = time.process_time()
    maximum_flow(net, source, sink)
    assert time.process_time() - start < 1.0


def test_pointwise_chains_are_recomputed_from_inputs():
    c = compile_function(lambda x, y: ((x * y).sin().exp() * x).cos(), [rand(8, 8), rand(8, 8)])
    assert saved_targets(c) == []
    assert aten.exp.default in backward_targets(c)


def test_random_numbers_are_never_drawn_twice():
    c = compile_function(lambda x: F.dropout(x.sin(), 0.3) * torch.rand_like(x), [rand(8, 8)])
    assert not any(is_random(n) for n in c.partition.backward.graph.nodes if n.op == "call_function")


def test_matmuls_are_not_repeated():
    c = compile_function(lambda x, w: (x @ w).sin().exp(), [rand(8, 8), rand(8, 8)])
    assert saved_targets(c) == [aten.mm.default]
    assert backward_targets(c).count(aten.mm.default) == 2


def test_a_matmul_operand_is_saved_as_forward_wrote_it():
    c = compile_function(lambda x, v, w: F.linear(F.gelu(F.linear(x, v)), w), [rand(8, 8), rand(8, 8), rand(8, 8)])
    assert aten.gelu.default in saved_targets(c) and aten.gelu.default not in backward_targets(c)


def test_the_residual_stream_is_saved_not_rebuilt():
    def blocks(x, *ws):
        for w in ws:
            x = x + (x.sin() @ w)
        return x
    c = compile_function(blocks, [rand(8, 8)] + [rand(8, 8) for _ in range(6)])
    assert aten.add.Tensor not in [n.target for n in c.partition.backward.graph.nodes
                                   if n.name in {m.name for m in c.partition.forward.graph.nodes}]


def test_only_one_precision_of_a_value_is_saved():
    def f(x, w):
        h = (x.bfloat16() @ w).float()
        return h.sin() * h.exp()
    c = compile_function(f, [rand(8, 8), rand(8, 8, dtype=torch.bfloat16)])
    assert saved_targets(c).count(aten.mm.default) == 1 and aten._to_copy.default not in saved_targets(c)[1:]


def test_views_are_never_saved():
    c = compile_function(lambda x, w: (x @ w).t().view(2, 4, 8)[1].exp() * 2, [rand(8, 8), rand(8, 8)])
    assert not {aten.t.default, aten.view.default, aten.select.int} & set(saved_targets(c))


def test_small_things_are_preferred():
    c = compile_function(lambda x: (x - x.mean(1, keepdim=True)) * (x.var(1, keepdim=True) + 1).rsqrt(), [rand(64, 64)])
    sizes = [n.meta["val"].numel() for n in c.partition.backward.graph.nodes if n.op == "placeholder"
             and n.name in c.partition.saved and n.name != "x0"]
    assert all(s == 64 for s in sizes)


def test_recomputed_nodes_stand_next_to_their_readers():
    def f(x, w):
        a, b = x.sin(), x.exp()
        return (a * a) @ w, b * b
    c = compile_function(f, [rand(8, 8), rand(8, 8)])
    order = [n for n in c.partition.backward.graph.nodes if n.op == "call_function"]
    position = {n: i for i, n in enumerate(order)}
    for n in order:
        if n.target in (aten.sin.default, aten.exp.default):
            assert min(position[u] for u in n.users) - position[n] <= 3


def test_a_widened_value_is_saved_in_its_narrow_form():
    """The shortcut of a residual block waits, across library calls, for the main branch; its float32 copy must not."""
    def f(x, w, v):
        short = F.conv2d(x, w).float()
        main = F.conv2d(torch.relu(F.conv2d(x, w)), v).float()
        return (torch.tanh(short) * torch.tanh(main)).sum()
    c = compile_function(f, [rand(2, 4, 6, 6, dtype=torch.bfloat16), rand(4, 4, 1, 1, dtype=torch.bfloat16),
                             rand(4, 4, 1, 1, dtype=torch.bfloat16)])
    saved = {n.name: n for n in c.joint.gm.graph.nodes}
    assert all(saved[name].meta["val"].dtype is torch.bfloat16 for name in c.partition.saved)


def test_max_pool_saves_one_byte_per_window():
    stage = lambda gm, fakes, compile_aten: compile_training(gm, fakes, interpret_aten, decompose)
    x = rand(2, 4, 16, 16)
    for kernel, stride, padding, dilation in ((3, 2, 1, 1), (2, 2, 0, 1), (3, 1, 1, 1), (3, 2, 1, 2)):
        f = lambda x: (F.max_pool2d(x * 2, kernel, stride, padding, dilation) ** 2).sum()
        c = compile_function(f, [x], stage=stage)
        want, = torch.autograd.grad(f(x), x)
        got, = torch.autograd.grad(c(x)[0], x)
        torch.testing.assert_close(got, want)
        nodes = {n.name: n for n in c.joint.gm.graph.nodes}
        if (kernel, dilation) == (3, 1):
            assert [nodes[s].meta["val"].dtype for s in c.partition.saved if nodes[s].op != "placeholder"].count(torch.int8) == 1
            assert not any(nodes[s].meta["val"].dtype in (torch.bool, torch.int64) for s in c.partition.saved)


@pytest.mark.parametrize("before, reads", [
    (lambda h, gamma, beta: F.batch_norm(h, None, None, gamma, beta, True), aten.add.Tensor),
    (lambda h, gamma, beta: F.batch_norm(h, None, None, gamma, beta, True) + h.flip(0), "placeholder"),
    (lambda h, gamma, beta: h + beta[:, None, None], "placeholder"),
], ids=["one tensor that backward reads", "two tensors", "one that it does not read"])
def test_a_mask_of_a_relu_asks_what_backward_reads_anyway(before, reads):
    torch.manual_seed(0)
    inputs = [rand(4, 3, 9, 9), rand(8, 3, 3, 3), rand(8), rand(8), rand(5, 8, 3, 3)]
    with torch.no_grad():
        inputs[0][1, 0, 0, 0], inputs[0][3] = float("inf"), 0           # NaN and equal values in front of the ReLU

    def block(x, w1, gamma, beta, w2):
        return F.conv2d(before(F.conv2d(x, w1), gamma, beta).relu(), w2)

    stage = partial(compile_training, prepare=decompose)
    c = compile_function(block, inputs, stage=stage)
    mask, = c.partition.backward.graph.find_nodes(op="call_function", target=aten.le.Scalar)
    assert reads in (mask.args[0].target, mask.args[0].op)
    for ours, eager in zip(run_and_grads(c, inputs), run_and_grads(block, inputs)):
        torch.testing.assert_close(list(ours), list(eager), rtol=1e-4, atol=1e-4, equal_nan=True)
