"""A GPU that is pretended: tensors with dimensions say that they are on one, and all memory is the CPU's. What is compiled is what a GPU
would get, in C++ or in interpreted Triton, and what is recorded goes to the fake recorder of CUDA graphs."""
import torch
from torch import fx

from minicompile import driver
from minicompile.ch01_graphs.fake import FakeTensor
from minicompile.ch01_graphs.graph import call_node
from minicompile.ch01_graphs.trace import Recorder, run_recorded
from minicompile.ch05_autograd.runtime import compile_training
from minicompile.ch06_decompositions.decompose import decompose
from minicompile.ch11_runtime import host, numbers
from minicompile.ch11_runtime.cudagraphs import GraphSet, graphed, outputs_that_leave

GPU = torch.device("cuda", 0)


def pretend(monkeypatch, language="cpp"):
    monkeypatch.setattr(host, "allocate", lambda size, stride, dtype, device: torch.empty_strided(size, stride, dtype=dtype))
    monkeypatch.setattr(host, "DEVICES", {"cuda": language, "cpu": "cpp"})
    monkeypatch.setattr(numbers, "Ring", lambda device, count: REAL_RING(torch.device("cpu"), count))
    if language == "triton":
        monkeypatch.setenv("TRITON_INTERPRET", "1")


REAL_RING = numbers.Ring


def moved(gm: fx.GraphModule) -> fx.GraphModule:
    """The graph with its tensors on the GPU; 0-d inputs stay on the CPU."""
    recorder, inputs = Recorder(), []
    for node in gm.graph.find_nodes(op="placeholder"):
        val = node.meta["val"]
        if isinstance(val, torch.Tensor):
            val = FakeTensor(val.meta.detach(), GPU if val.dim() else val.device, False)
        inputs.append(val)
        recorder.placeholder(node.name, val).meta.update(node.meta | {"val": val})

    def call(node, args, kwargs):
        if kwargs.get("device") is not None and (node.meta["val"].dim() or "full" not in str(node.target)):
            kwargs = kwargs | {"device": GPU}
        return call_node(gm, node, args, kwargs)

    with torch.no_grad(), recorder:
        outputs = run_recorded(recorder, gm, inputs, call)
    return recorder.finish(outputs)


class Backend:
    """A backend of `minicompile.compile`; `schedules` are those of the graphs that it was given, `graphs` their sets of CUDA graphs."""

    def __init__(self, recorder=None):
        self.recorder, self.schedules, self.graphs, self.compiled = recorder, [], [], []

    def __call__(self, gm, examples):
        graphs = GraphSet(self.recorder()) if self.recorder else None

        def lower_half(gm, *, is_backward):
            made = driver.compile_aten(moved(gm), rung="default", is_backward=is_backward, recorded=graphs is not None)
            self.compiled.append(made)
            return made
        compile_aten = graphed(graphs, lower_half) if graphs else lower_half
        run = compile_training(gm, [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")], compile_aten, decompose)
        if graphs:
            outputs_that_leave(graphs, run.joint.results + len(run.joint.written))
            self.graphs.append(graphs)
        return run
