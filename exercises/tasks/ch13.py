"""Chapter 13: layouts."""
import collections

import torch
import torch.nn.functional as F
from torch import fx

from .. import behaviour, task

task("channels-last", title="Convolutions in channels-last", minutes=45, about="""\
On a GPU a convolution is fastest if the channels of one pixel lie next to each other, and the layout between the operators of a
graph is the compiler's choice. Write the pass over a captured graph, in which each node's fake value is `node.meta["val"]`: ask for
both operands of every convolution in channels-last with `gm.graph.call_method("contiguous", (operand,), {"memory_format":
torch.channels_last})`, which costs nothing where they are so already. `_wants_channels_last(node)` says whether a convolution
qualifies; one that does not speaks against the whole graph. A new node takes over the `meta` of the convolution, and the `val` of
the operand that it stands for. Return `gm`, recompiled. (Where the program sees the layout, `keep_layouts` restores it afterwards.)""",
     hints=[
    "What does a graph look like in which one convolution wants NCHW and its neighbour NHWC? That is why it is all or nothing.",
    "First ask whether every convolution qualifies, and only then change any. A new node has to stand before its convolution "
    "(gm.graph.inserting_before), which then reads it instead of the operand (node.replace_input_with).",
    "For both operands of each convolution one call of `contiguous`. Its meta is the convolution's, but the value is the operand's, "
    "since only strides change. A graph without convolutions stays as it is; the others are recompiled."])
GRAPHS = {
    "conv, relu": lambda x, w: (F.conv2d(x, w).relu(),),
    "two convs": lambda x, w: (lambda y: (F.conv2d(y.relu(), w, padding=1), y))(F.conv2d(x, w, padding=1)),
    "conv, sum": lambda x, w: (F.conv2d(x, w).sum(1), F.conv2d(x, w) * 2),
    "an input returned": lambda x, w: (x, torch.conv2d(x, w)),
    "one grouped": lambda x, w: (F.conv2d(x, w[:, :1], groups=4) + 1, F.conv2d(x, w)),
    "no conv": lambda x, w: (x.relu(), w * 2),
    "transposed result": lambda x, w: (F.conv2d(x, w).permute(0, 2, 3, 1),),
}


def captured(name, device):
    """A graph of PyTorch's functions with fakes on a device."""
    from minicompile.ch01_graphs.fake import FakeTensor
    gm, real = fx.symbolic_trace(GRAPHS[name]), {}
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            real[node] = torch.randn(2, 4, 6, 6) if node.name == "x" else torch.randn(4, 4, 3, 3)
        elif node.op != "output":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: real[n])
            real[node] = node.target(*args, **kwargs) if node.op == "call_function" else getattr(args[0], node.target)(*args[1:], **kwargs)
        if node in real:
            meta = torch.empty_strided(real[node].shape, real[node].stride(), device="meta")
            node.meta.update(val=FakeTensor(meta, torch.device(device)), location=None, origins=())
    return gm


class Watch(fx.Interpreter):
    """Runs a graph and notes how the operands of convolutions lie."""
    def run_node(self, n):
        if n.op == "call_function" and n.target in (F.conv2d, torch.conv2d):
            operands = [self.env[a] for a in n.args[:2]]
            self.seen.append([t.is_contiguous(memory_format=torch.channels_last) for t in operands])
        return super().run_node(n)


def laid_out(function, case):
    torch.manual_seed(1)
    name, device = case
    gm = captured(name, device)
    same = function(gm) is gm
    watch = Watch(gm)
    watch.seen = []
    outputs = watch.run(torch.randn(2, 4, 6, 6), torch.randn(4, 4, 3, 3))
    gm(torch.randn(2, 4, 6, 6), torch.randn(4, 4, 3, 3))
    calls = collections.Counter(str(n.target) for n in gm.graph.nodes if n.op == "call_method")
    return {"operands of convolutions are channels-last": watch.seen,
            "outputs": [o.contiguous() for o in outputs], "methods called": dict(sorted(calls.items())), "the same module": same,
            "every node has a value": all("val" in n.meta for n in gm.graph.nodes if n.op != "output")}


for _points, _name, _cases in ((6, "all convolutions, or none", [("conv, relu", "cuda"), ("two convs", "cuda"), ("conv, sum", "cuda"),
                                                            ("one grouped", "cuda")]),
                               (4, "what stays as it is", [("no conv", "cuda"), ("two convs", "cpu"), ("an input returned", "cuda"),
                                                            ("transposed result", "cuda")])):
    behaviour("channels-last", points=_points, name=_name, tolerance=1e-5, cases=lambda rng, cases=_cases: cases,
              show=lambda case: f"{case[0]}, on {case[1]}")(laid_out)
