# %% [markdown]
# # Tracing below the dispatcher
#
# Capture gives a graph of what the user wrote: `F.cross_entropy`, `x.add_(1)`, `nn.functional.layer_norm`. To
# get the graph of what PyTorch would *run*, execute the first graph on fakes under a mode that records every
# ATen operator it is asked for. The mode sits below autograd, so operators that are only compositions have
# already come apart, autocast has inserted its casts, and when the program calls the autograd engine the
# backward operators arrive in the same recording. No rule of differentiation is written in this compiler: the
# joint forward and backward graph is a recording of the engine at work on fakes.

# %%
import contextlib
import functools
import operator
from typing import Any, Callable, Sequence

import torch
from torch import fx, is_grad_enabled
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ..errors import Unsupported
from .fake import DispatchMode, FakeTensor
from .graph import Graph, call_node, closure, graph_module, interpret, map_args
from .operators import settle_floats
from .recipes import fake_call
from .rules.derivatives import derive_otherwise
from .rules.operators import IN_PLACE_VIEWS
from .rules.recurrent import WITH_WORKSPACE
from .shapes import IN_NUMBERS, expr_of, is_symbolic

aten = torch.ops.aten

# %% [markdown]
# ## The recorder
#
# While the recorder is active, every operator that PyTorch dispatches comes to `__torch_dispatch__`, which
# computes the result on fakes and writes a node. A program whose `K` is a real tensor of three numbers,
#
#     def special(x):
#         y = x * 2
#         y.t_()
#         return y.detach() + K
#
# is recorded in three operators and a constant:
#
#     x: f32[3, 4] = input
#     mul_tensor: f32[3, 4] = aten.mul.Tensor(x, 2)
#     t_default: f32[4, 3] = aten.t.default(mul_tensor)
#     _constant0: f32[3] = _constant0()
#     add_tensor: f32[4, 3] = aten.add.Tensor(t_default, _constant0)
#     return (add_tensor,)
#
# *Which tensor is which.* A fake is known by object identity: `nodes` leads from its `id` to the node that made it, and holds the
# fake, so that no other one can get that `id`. `node_of` asks it for each argument. A tensor that is not in there is a
# real one that the program brought along, as `K`, and becomes a constant of the graph; a fake that is not in there belongs to
# another recording, which is a mistake of ours.
#
# *What is no ordinary node.* `__torch_dispatch__` asks in this order:
#
# 1. Questions with a number for an answer (`IN_NUMBERS`) are answered.
# 2. A `detach` is another fake for the same node (`_alias`), since it matters to autograd alone.
# 3. The conjugate of a Python number, which the derivative of `z * 1j` needs, is a number again (`numbers`).
# 4. `t_()` writes no data: it makes a tensor a view of what it was, and is written as that view. The nodes
#    before it keep a fake of the old shape (`_keep_metadata`), as the product above, which is 3 by 4.
# 5. Where gradients are recorded, an operator may keep a workspace for its backward (`WITH_WORKSPACE`); then the form that gives it is
#    written.
#
# All others are computed and written as they are, and a result of several tensors gets a node for each of them.
#
# *Where it comes from.* In the forward pass that is `provenance`, which whoever runs the program has
# set. In the backward pass the engine decides what runs, and there is no line of the user under it. So the recorder asks which
# autograd node is at work, and looks up what it remembered when that node was made (`remember_grad_fns`; some get a
# hook there, `derive_otherwise`). Where several gradients come in, `tangents_of`
# says which lead to an autograd node, and what runs there is marked so. `passes` and `backward` count backward passes
# that are recorded in the middle of a program (chapter 12).

# %%
class Recorder(DispatchMode):
    """Records each dispatched operator as a node of `graph`, with its `val`, `location` and `origins`."""

    def __init__(self):
        super().__init__()
        self.graph = Graph()
        self.root = torch.nn.Module()
        self.nodes: dict[int, tuple[Any, fx.Node]] = {}
        self.provenance: tuple = (None, ())
        self.recompute = 0
        self.passes = self.backward = 0
        self.grad_provenance: dict = {}
        self.tangents_of: dict = {}
        self.numbers: dict[int, tuple[Any, complex]] = {}

    def placeholder(self, name: str, value) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta.update(val=value, location=None, origins=())
        if isinstance(value, torch.Tensor):
            self.nodes[id(value)] = (value, node)
        return node

    def node_of(self, value):
        """The graph's name for a value: a node for a tensor, an expression for a symbolic number, the
        value itself for anything else."""
        if is_symbolic(value):
            return expr_of(value)
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in self.nodes:
            if isinstance(value, FakeTensor):
                raise AssertionError(f"{value!r} was not made under this recorder")
            name = f"_constant{sum(1 for n in self.graph.nodes if n.op == 'get_attr')}"
            self.root.register_buffer(name, value, persistent=False)
            node = self.graph.get_attr(name)
            node.meta.update(val=value, location=self.provenance[0], origins=self.provenance[1])
            self.nodes[id(value)] = (value, node)
        return self.nodes[id(value)][1]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in IN_NUMBERS:
            return fake_call(func, args, kwargs)
        if func is aten.detach.default and isinstance(args[0], FakeTensor):
            return self._alias(args[0])
        if self.numbers:
            args, kwargs = map_args(self._number_of, (args, kwargs))
        if func is aten._conj.default and not isinstance(args[0], torch.Tensor):
            return self._as_tensor(args[0].conjugate())
        args, kwargs = settle_floats(func, args, kwargs)
        node_args, node_kwargs = map_args(self.node_of, (args, kwargs))
        target = func
        if func in IN_PLACE_VIEWS:
            target = IN_PLACE_VIEWS[func]
            self._keep_metadata(args[0], node_args[0])
        elif is_grad_enabled():
            target = WITH_WORKSPACE.get(func, func)
        out = fake_call(func, args, kwargs)
        node = self.write(target, node_args, node_kwargs, out)
        for i, item in enumerate(out) if isinstance(out, (tuple, list)) else ():
            if isinstance(item, torch.Tensor):
                self.write(operator.getitem, (node, i), {}, item)
        return out

    def write(self, target, args, kwargs, val) -> fx.Node:
        """One more node, by which `val` is known if it is a tensor."""
        node = self.graph.call_function(target, args, kwargs)
        location, origins = self._provenance_now()
        node.meta.update(val=val, location=location, origins=origins)
        if self.recompute and torch._C._current_autograd_node() is None:
            node.meta["recompute"] = self.recompute
        if self.backward:
            node.meta["backward"] = self.backward
        if tangents := self.tangents_of.get(torch._C._current_autograd_node()) if self.tangents_of else None:
            node.meta["tangents"] = tangents
        if isinstance(val, torch.Tensor):
            self.nodes[id(val)] = (val, node)
        return node

    def _keep_metadata(self, fake, node):
        """`fake` is about to become a view of itself: the nodes that made and wrote it keep a fake of the old
        shape."""
        if node.op == "placeholder":
            raise Unsupported("an input of the graph changes its shape in place")
        as_it_is = fake.meta.as_strided(fake.shape, fake.stride(), fake.storage_offset())
        before = FakeTensor(as_it_is, fake.device)
        fake.formers += 1
        self.nodes[id(before)] = before, node
        for earlier in self.graph.nodes:
            earlier.meta["val"] = pytree.tree_map(lambda x: before if x is fake else x, earlier.meta["val"])

    def _as_tensor(self, number: complex):
        """A tensor for the engine, which asks for one; the operators that get it are recorded with the number."""
        stand_in = FakeTensor(torch.tensor(number, device="meta"), torch.device("cpu"))
        self.numbers[id(stand_in)] = stand_in, number
        return stand_in

    def _number_of(self, value):
        return self.numbers.get(id(value), (None, value))[1]

    def _alias(self, fake):
        meta = fake.meta.detach() if isinstance(fake, FakeTensor) else fake.detach().to("meta")    # a constant is real
        twin = FakeTensor(meta, fake.device)
        self.nodes[id(twin)] = (twin, self.node_of(fake))
        return twin

    def _provenance_now(self):
        current = torch._C._current_autograd_node()
        if current is not None:
            return self.grad_provenance.get(current, (None, ()))
        return self.provenance

    def remember_grad_fns(self, out):
        """Give the autograd nodes that an operation just created the provenance of that operation."""
        found = [out] if isinstance(out, torch.Tensor) else pytree.tree_leaves(out)
        new = functools.partial(filter, lambda fn: fn is not None and fn not in self.grad_provenance)
        nodes = closure(new(t.grad_fn for t in found if isinstance(t, torch.Tensor)), lambda fn: new(f for f, _ in fn.next_functions))
        self.grad_provenance.update(dict.fromkeys(nodes, self.provenance))
        derive_otherwise(nodes)

    def finish(self, outputs: Sequence) -> fx.GraphModule:
        self.graph.output(tuple(self.node_of(o) for o in outputs))
        return graph_module(self.root, self.graph)

# %% [markdown]
# A program may itself call the engine, in its middle. What that writes is marked with the number of the pass.

# %%
@contextlib.contextmanager
def backward_pass():
    """What the active recorder, if there is one, writes meanwhile is one more backward pass of the program."""
    recorder = _get_current_dispatch_mode()
    if not isinstance(recorder, Recorder):
        yield
        return
    recorder.passes += 1
    recorder.backward = recorder.passes
    try:
        yield
    finally:
        recorder.backward = 0

# %% [markdown]
# And the engine is to find PyTorch as it would be found by a backward pass that comes later.

# %%
@contextlib.contextmanager
def backward_state():
    """As a caller of `backward()` would have it: no autocast; and the engine runs in this thread, where the
    recorder is. It looks for no NaN in its gradients, as under anomaly detection: fakes have no numbers."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        if torch.is_anomaly_enabled():
            stack.enter_context(torch.autograd.set_detect_anomaly(False))
        yield


# %% [markdown]
# ## Lowering one graph into another
#
# `trace` records any Python function of fakes. `run_recorded` is the special case that stages use most:
# interpret a graph node by node under a recorder, and stamp each recorded operator with the node it came
# from.

# %% tags=["exercise:run-recorded"]
def run_recorded(recorder: Recorder, gm: fx.GraphModule, inputs: Sequence, call: Callable | None = None):
    """Interpret `gm` on fakes under `recorder` (which must be active), so that what a node records, and what the backward pass records for
    it later, has the node's location, its name as the only origin, and its mark for recomputing. Returns the output structure of
    `gm`. `call(node, args, kwargs)` computes each node instead of PyTorch."""
    def on_node(node, args, kwargs):
        recorder.provenance = (node.meta.get("location"), (node.name,))
        recorder.recompute = node.meta.get("recompute", 0)
        out = call(node, args, kwargs) if call else call_node(gm, node, args, kwargs)
        recorder.remember_grad_fns(out)
        return out

    return interpret(gm, inputs, on_node)


# %%
def trace(fn: Callable, inputs: Sequence, names: Sequence[str] | None = None) -> fx.GraphModule:
    """Record `fn(*inputs)` (fakes, SymInts, constants) as an ATen graph. `fn` returns a flat sequence."""
    recorder = Recorder()
    for i, value in enumerate(inputs):
        recorder.placeholder(names[i] if names else f"arg{i}", value)
    with recorder:
        outputs = fn(*inputs)
    return recorder.finish(outputs)
