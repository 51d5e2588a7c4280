# %% [markdown]
# # Decompositions: three thousand operators, and few enough
#
# *How many operators must a compiler know?* PyTorch has an operator for everything. There are variants of each for
# scalars and tensors, in place and with an `out` argument, and backward operators beside them. A compiler that has to
# generate code for each will never be finished. This chapter rewrites a graph until only *primitives* are left:
# about 150 operators that every later stage has to know, and nothing else.
#
# What is rewritten is the joint graph of [chapter 5](chapter:05): forward and backward, without writes. One might
# think that this is the easy chapter, since most operators are formulas that stand in every book. The formulas are
# easy. That the result is *the same as eager's* takes most of this chapter.

# %%
import collections
import inspect
import sys

import torch
import torch.nn.functional as F

import minicompile
from chapters import tiny
from chapters._lib import Table, Walk, bars, best_time, drawing, example, row_of_boxes, watch
from minicompile.ch01_graphs.fake import FakeMode
from minicompile.ch01_graphs.graph import print_graph
from minicompile.ch01_graphs.trace import trace
from minicompile.ch06_decompositions.decompose import Decomposed, Decomposer, decompose, violations
from minicompile.ch06_decompositions.primitives import PRIMITIVES
from minicompile.ch06_decompositions.table import TABLE, promoted

# %%
every = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::")]
kinds = collections.Counter(p.category for p in PRIMITIVES.values())
print(f"{len(every):,} ATen operators, overloads counted; {len(TABLE)} of them have a decomposition here")
Table(["primitives", "number"], [*kinds.items(), ("all", len(PRIMITIVES))])

# %% [markdown]
# Where are the other operators? Variants that write have been removed by [chapter 5](chapter:05). Operators that
# PyTorch itself defines as compositions have come apart before the recorder saw them. And an operator that is in
# neither list becomes a call of PyTorch's own kernel. So a rule that is missing costs speed, and nothing else.
#
# ## The idea: run the formula instead of the operator
#
# A rule writes one operator as several others. One can imagine how a compiler applies it: look for the operator in
# the graph, cut it out, paste the formula in, connect the ends, and compute the shapes of all new nodes. None of
# that is needed. Write the rule as an ordinary function of tensors. Then *run the graph again*, on fakes, under the
# recorder of [chapter 1](chapter:01). When a call arrives for which there is a rule, the recorder does not write it
# down. It calls the rule, and writes down the calls that the rule makes. If one of those has a rule, the same
# happens again.
#
# [Part 6 of tiny](chapter:tiny.6) is the smallest form. This is its rule for softmax, and all of its driver. (A rule has
# the parameters of its operator. `half_to_float` is one that tiny does not need.)

# %%
print(inspect.getsource(tiny.softmax))

# %%
print(inspect.getsource(tiny.decompose))

# %% [markdown]
# `Decomposer` is tiny's recorder, and it looks into a dictionary of rules before it writes down a call. What a rule
# may use is ordinary PyTorch. So a rule can be *tested* as ordinary PyTorch, on real tensors, against the operator
# that it replaces.
#
# ### Five nodes, by hand
#
# Take one row, (1, 2, 3). Its largest element is 3. Subtracting it gives (-2, -1, 0). The exponentials are (0.135,
# 0.368, 1), and their sum is 1.503. Dividing gives (0.090, 0.245, 0.665). Each step is one operator: `amax`, `sub`,
# `exp`, `sum`, `div`. That is the graph which tiny makes:

# %%
print(tiny.decompose(tiny.record(lambda x: torch.softmax(x, -1), torch.tensor([[1.0, 2.0, 3.0]]))))

# %% [markdown]
# The real driver works in the same way. `expand` looks up the rule:
#
# %show minicompile.ch06_decompositions.decompose.expand
#
# and the recorder calls it first. While the rule runs, the recorder is active (`with self`), so it gets the calls
# of the rule, too. A rule may also decline, by returning `NotImplemented`. Then everything is erased that it
# recorded up to there, and the call is written down as it is:
#
# %show minicompile.ch06_decompositions.decompose.Decomposer.__torch_dispatch__
#
# Three names in it need a word. `mark` remembers the last node, so that `erase_after` knows where to stop.
# `literal` is set by the driver when a call is to be written down as it is, because its rule has been found to be
# wrong for this case. And `_alias` is for rules that give back the very tensor that they got, as the expansion of a
# tensor to its own shape does. Autograd wants a view to be a new object, so one is made.
#
# A model has equal layers, and an optimizer does the same to each parameter. So the same operator often arrives again,
# on other tensors of the same shapes, dtypes and strides, with the same further arguments. Then no rule runs. The nodes
# that the earlier call was expanded to are kept as a
# [pattern](ref:minicompile.ch06_decompositions.decompose.Pattern), and are written down once more for the new tensors.
#
# Here it is at work on a layer norm with a weight and without a bias. Each frame is one call that arrives. The first
# line of a frame names the operators whose rules are running at that moment, the outermost first, and below it stands
# what has been written down so far. (Lines of `getitem`, which pick one of several results, are left out.) "No rule
# applies" means that there is no rule for the operator, or that its rule has declined, as that of `add` does here.

# %% tags=["fold"]
class Watching(Decomposer):
    """The recorder, and a frame for each call that arrives."""

    def __init__(self):
        super().__init__()
        self.frames, self.stack = [], []
        Watching.last = self

    def shown(self):
        nodes = [line for line in print_graph(self).splitlines() if " = getitem(" not in line]
        return "being expanded: " + (" > ".join(self.stack) or "nothing") + "\n\n" + "\n".join(nodes)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.promote_types.default:  # a question about dtypes
            return super().__torch_dispatch__(func, types, args, kwargs)
        name, place, nodes = func._schema.name.removeprefix("aten::"), len(self.frames), len(self.graph.nodes)
        self.frames.append((f"{name} arrives. There is a rule, and it runs.", self.shown()))
        self.stack.append(name)
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.stack.pop()
        if len(self.frames) == place + 1:  # it made no calls
            words = "No rule applies, so it is written down." if len(self.graph.nodes) > nodes else "It changes nothing here."
            self.frames[place] = f"{name} arrives. {words}", self.shown()
        return out


def norm(x, weight):
    return [F.layer_norm(x, (64,), weight) + 1]


mode = FakeMode()
graph = trace(norm, [mode.from_real(torch.randn(8, 64)), mode.from_real(torch.randn(64))], ["x", "weight"])
module = sys.modules[Decomposer.__module__]
module.Decomposer = Watching
try:
    expanded = decompose(graph)
finally:
    module.Decomposer = Decomposer
Walk("A layer norm, expanded", Watching.last.frames)

# %% [markdown]
# The rule that ran is short, because it says nothing about how a mean is computed:
#
# %show minicompile.ch06_decompositions.rules.normalization.native_layer_norm
#
# `_inner` lists the dimensions that are normalised, `moments` is the variance and the mean, `widen` makes float32 of half
# precision, and `_affine` multiplies by the weight and adds the bias where they exist. `_stats_dtype` is the dtype in
# which eager returns mean and `rstd`. The last line returns what the operator promises: three results, each in
# the dtype that eager's kernel would give. Why all this care with dtypes? That is the next question.

# %% [markdown] tags=["page"]
# ## What a formula forgets
#
# A rule has to agree with eager's *kernel*. The formula in the book is about real numbers, and says nothing about
# rounding, overflow, NaN, dtypes or strides. Each section below has a formula that is right on paper, a program for
# which it gives another answer than eager, and what the real rule does.
#
# ### Overflow
#
# In the book, softmax divides exponentials by their sum:


# %%
def by_the_book(x):
    return torch.exp(x) / torch.exp(x).sum(-1, keepdim=True)


x = torch.tensor([1.0, 2.0, 90.0])
print("softmax:", by_the_book(x).tolist(), " eager:", F.softmax(x, -1).tolist())

# %% [markdown]
# `exp(90)` is larger than any float32. Dividing numerator and denominator by the exponential of the same number
# changes nothing on paper, and if this number is the largest of the row, no exponential is larger than 1. That is why
# tiny's rule, and every library, subtracts the maximum first. It costs another pass over the row.
#
# ### Cancellation
#
# The variance is the mean of the squares minus the square of the mean. This needs one pass over the data, since
# both means can be summed up together:

# %%
x = 10_000 + torch.randn(1000)
print(f"in one pass: {(x * x).mean() - x.mean() ** 2:.2f}, eager: {x.var(correction=0):.2f}")

# %% [markdown]
# Both means are near 10^8, where two neighbouring float32 numbers are 8 apart. Their difference is all that we
# want, and it has no correct digit; it may even be negative. Two passes are right: first the mean, then the mean of
# the squared differences. tiny does that. The real table keeps variance and mean as *one primitive*, `var_mean`,
# which later stages compute in one pass by Welford's method. It carries the count, the mean so far, and the sum of
# squared differences from that mean. For each new element it moves the mean a little and corrects the sum. It never
# squares anything but a difference, and differences are small.
#
# ### Rounding
#
# Half precision numbers have few digits; bfloat16 has eight bits, which are between two and three decimal digits.
# Here is GELU, with tiny's rule, on 4,001 numbers between -4 and 4:

# %%
half = torch.linspace(-4, 4, 4001).bfloat16()


def activation(x):
    return F.gelu(x)


def against_eager(name, compiled):
    apart = (compiled(half).float() - F.gelu(half).float()).abs()
    print(f"{name:12} {int((apart > 0).sum()):4} of {len(half)} elements differ, by at most {apart.max():.2g}")


against_eager("tiny", tiny.compile(activation))
against_eager("minicompile", minicompile.compile(activation))

# %% [markdown]
# Eager's kernel reads a bfloat16, computes in float32, and rounds once, at its end. tiny's formula rounds after
# each of its operations:

# %% tags=["fold"]
row_of_boxes(
    [("load", "8 bits", "input"), ("x * 0.7071", "float32", "compute"), ("erf", "float32", "compute"), ("1 + erf", "float32", "compute"),
     ("times x / 2", "float32", "compute"), ("store", "rounds to 8 bits", "bad")],
    "Eager's kernel loads a bfloat16 and computes in float32. It rounds to eight bits once, at the store.",
    "Eager's kernel: one rounding.",
    per_row=3,
)

# %% tags=["fold"]
row_of_boxes(
    [("load", "8 bits", "input"), ("x * 0.7071", "rounds to 8 bits", "bad"), ("erf", "rounds to 8 bits", "bad"),
     ("1 + erf", "rounds to 8 bits", "bad"), ("times x / 2", "rounds to 8 bits", "bad"), ("store", "8 bits already", "plain")],
    "In tiny's formula the product, the error function, the sum and the last product are operators of their own, and each of them "
    "rounds its result to eight bits.",
    "tiny's formula: a rounding after each operator.",
    per_row=3,
)

# %% [markdown]
# For x = -4, `erf(...)` is so near to -1 that with eight bits it is -1, and the sum `1 + erf(...)` is 0. A model that is
# trained with such a rule has another loss curve, and nobody finds out why.
#
# So a rule can say that it computes in float32 as eager's kernel does, `float32=True`:
#
# %show minicompile.ch06_decompositions.rules.activations.gelu
#
# The decorator wraps the rule: its half-precision operands are widened, the rule runs, and the results are rounded to
# the dtype that the operands promise. In the graph these are explicit `_to_copy` nodes. They cost nothing
# in the end, because a fused kernel converts in a register. In the listing, `widen` makes float32 of a tensor in half
# precision and leaves anything else alone, and `dtype` is what the operands promise:
#
# %show minicompile.ch06_decompositions.table.in_float32 "out = fn" to "return tree_map(narrow, out)"
#
# The elements that still differ lie so close to the middle between two bfloat16 numbers that the last bit of the
# error function decides, and eager's vectorised kernel computes that bit in another way.
#
# ### Infinity and NaN
#
# ReLU is 0 for negative numbers and x for the others. That is one sentence and at least four formulas:

# %%
x = torch.tensor([-1.0, 2.0, -torch.inf, torch.nan])
zero = torch.tensor(0.0)
Table(["formula", *map(str, x.tolist())], [
    ("eager", *F.relu(x).tolist()),
    ("where(x > 0, x, 0)", *torch.where(x > 0, x, zero).tolist()),
    ("x * (x > 0)", *(x * (x > 0)).tolist()),
    ("where(x <= 0, 0, x)", *torch.where(x <= 0, zero, x).tolist()),
    ("maximum(x, 0)", *torch.maximum(x, zero).tolist()),
])

# %% [markdown]
# A comparison with NaN is false. The first formula asks "is it positive?" and turns NaN into 0, so a network
# that has diverged looks healthy. The second multiplies infinity by zero, which is NaN. The last two are right. Every
# rule with a comparison has to choose its direction like that, and the tests feed NaN and infinities to each.
#
# ### Dtypes
#
# `integers + floats` is a legal call of PyTorch. Its kernel converts the integers while it reads them. A code
# generator would have to know for every operator which operand is converted to what. It is simpler to say it in the
# graph. After this chapter all tensor operands of a pointwise primitive have one dtype:

# %%
mixed = trace(lambda i, x: [i + x], [mode.from_real(torch.tensor([1, 2])), mode.from_real(torch.tensor([1.5, 2.5]))], ["i", "x"])
print(print_graph(decompose(mixed)))

# %% [markdown]
# Which dtype is it? PyTorch does not simply take the larger one. A number from Python should not turn a float16
# tensor into float64, and neither should a tensor without dimensions. So operands have ranks: tensors with
# dimensions, then tensors without, then numbers. A lower rank only counts if its *kind* is higher, where the kinds
# are bool, integer, float and complex (to write this function is an [exercise](exercise:promoted)). A number that
# counts brings its kind's usual dtype: int64 for an integer, the default dtype, mostly float32, for a float:

# %%
i, h, one = torch.tensor([1, 2]), torch.ones(2).half(), torch.tensor(1.0, dtype=torch.float64)
pairs = {"int64[2], float16[2]": (i, h), "float16[2], float32[2]": (h, h.float()), "float16[2], float64 without dims": (h, one),
         "int64[2], float64 without dims": (i, one), "float16[2], 1.5": (h, 1.5), "int64[2], 1.5": (i, 1.5)}
Table(["operands", "promoted", "eager's sum"],
      [(name, *(str(t).removeprefix("torch.") for t in (promoted(*p), torch.add(*p).dtype))) for name, p in pairs.items()])

# %% [markdown]
# Within one rank and one kind the wider dtype wins. The two half types are a case of their own. bfloat16 has the
# range of float32 and few digits, float16 has more digits and a small range. Neither contains the other, so their
# sum is float32.
#
# `agree` is the rule of all operators that promote. If their operands agree, it declines and the call is written
# down as it is. Otherwise it converts and calls the operator again, which arrives a second time and now agrees:
#
# %show minicompile.ch06_decompositions.rules.arithmetic.agree
#
# ### Strides
#
# This program turns a matrix around, normalises its rows, and looks at the result as a vector:


# %%
def turned(x):
    return F.layer_norm(x.t(), (4,)).view(-1)


for name, compiled in (("tiny", tiny.compile(turned)), ("minicompile", minicompile.compile(turned))):
    try:
        print(f"{name:12}", tuple(compiled(torch.randn(4, 3)).shape))
    except RuntimeError as error:
        print(f"{name:12}", str(error).partition(" (")[0])

# %% [markdown]
# Eager's kernel of a layer norm writes its result row by row, whatever the strides of its operand are, so the
# `view` works. (Its softmax does the same.) The formula consists of pointwise operators, and these keep the strides of
# their operand. So tiny's result is a transposed matrix, and a transposed matrix has no view as a vector.
#
# A later `view`, or a call of a library, may depend on the strides that eager promised. So the driver compares each
# result with the fake of the node that it replaces. Another dtype or shape means that the rule is wrong for this
# case, and the operator stays as it is. Other strides are repaired by a copy in the right order:
#
# %show minicompile.ch06_decompositions.decompose._ordered
#
# Suppose that a result of shape (2, 3, 4) should have the strides (1, 8, 2). The largest stride belongs to
# dimension 1, then come dimensions 2 and 0, so `order` is (1, 2, 0). `permute` brings the dimensions into this
# order, and the shape is (3, 4, 2). `clone` lays that out row by row, with the strides (8, 2, 1). The last line
# turns the dimensions back. Dimension 0 of the result is the last one of the copy and has stride 1, dimension 1 is
# the first and has 8, dimension 2 has
# 2: these are the wanted strides.

# %% tags=["explore:turned(torch.randn(4, 3))"]
print(print_graph(decompose(trace(lambda x: [turned(x)], [mode.from_real(torch.randn(4, 3))], ["x"]))))

# %% [markdown]
# The `clone` is a pointwise operator. The kernel that computes the numbers writes them in this order, so there is no
# copy at run time.
#
# ### Cases that are not covered
#
# The largest element of an empty row does not exist, and `amax` raises an error. Eager's softmax of an empty row is
# an empty row. The real rule declines here. What a formula does not cover has to be looked for, and it is found by
# testing: PyTorch has a database of sample inputs for its operators, used by its own tests. `Decomposed` is a mode
# under which an eager program runs with the rules, on real tensors, without any graph:
#
# %show minicompile.ch06_decompositions.decompose.Decomposed.__torch_dispatch__

# %%
samples = {"a row": torch.randn(1, 5), "an empty row": torch.randn(1, 0), "a row of -inf": torch.full((1, 3), -torch.inf)}
for name, x in samples.items():
    with Decomposed() as ran:
        ours = F.softmax(x, -1)
    same = torch.allclose(ours, F.softmax(x, -1), equal_nan=True)
    print(f"{name:14} same as eager: {same}; expanded: {torch.ops.aten._softmax.default in ran.used}")

# %% [markdown] tags=["page"]
# ## Rules for gradients
#
# The joint graph was recorded from the autograd engine, and the engine calls backward operators: `gelu_backward`,
# `_softmax_backward_data`, `native_layer_norm_backward`. Each of them is one kernel in eager, and each needs a
# rule. These rules are derived on paper, once.
#
# Take softmax. Let y be its result for a row, and g the gradient that arrives for y. How does y change when x
# changes a little? Each exponential grows by the factor of its own change, and the sum in the denominator grows by
# the average of these changes, weighted by y. So the change of y is `y * (dx - sum(y * dx))`. Read off what one
# element does to another: if only x[j] changes, y[i] changes by `-y[i] * y[j]` times as much, for i other than j.
# This is the same with i and j exchanged. The change of y[i] is a sum over all j, of that factor times dx[j]. The
# gradient of x[j] is a sum over all i, of the same factor times g[i]. Since the factor is the same with i and j
# exchanged, the second sum is the first one with g in the place of dx, and the gradient is
# `y * (g - sum(g * y))`. In numbers, for y = (0.1, 0.3, 0.6) and g = (1, 0, 0): the sum is 0.1,
# and the gradient is (0.1 * 0.9, -0.3 * 0.1, -0.6 * 0.1) = (0.09, -0.03, -0.06). Its elements add up to 0, as they
# must, because adding the same number to all of x changes nothing.
#
# %show minicompile.ch06_decompositions.rules.normalization.softmax_backward "weighted =" to "return (weighted"
#
# The rule reads y and not x. It was the author of the derivative formula in PyTorch who chose what forward keeps,
# and here it is the result. Does the compiler have to keep the same? No: the rule's operators are now ordinary
# nodes of the joint graph, and so are those of the softmax in forward. The partitioner of chapter 5 sees both, and
# may compute y again from x and the two numbers of each row, its maximum and its sum. This is one more reason to
# decompose *before* the graph is cut.
#
# Another one is that forward and backward share work:

# %%
def loss(x):
    return F.gelu(x).sum()


from minicompile.ch05_autograd.joint import trace_joint


def joint_of(function, *args):
    captured = watch(function, *args, backend="eager").graphs[0]
    return trace_joint(captured, [n.meta["val"] for n in captured.graph.nodes if n.op == "placeholder"])


both = joint_of(loss, torch.randn(64, requires_grad=True)).gm
print(print_graph(both), "\n")
print(print_graph(decompose(both)))

# %% [markdown]
# GELU is x times the probability that a normally distributed number is below x. Its derivative is that probability,
# plus x times the density. The probability is `0.5 * (1 + erf(x * 0.7071))`, and both formulas contain it. Before,
# it was hidden inside of two operators. After decomposition it is a pair of equal nodes. The cleanup of chapter 5
# makes equal nodes one, so there is a single `erf` in the graph above. (This rule, and the one for the gradient of
# a layer norm, are exercises: [the slope of GELU](exercise:gelu-backward) and [layer norm,
# backwards](exercise:layer-norm-backward).)
#
# ## Where to stop
#
# What is a primitive, then, and what is not? `sigmoid`, `exp` and `rsqrt` are; a mean is not, being a sum and a
# division, nor are `silu`, `mse_loss` and `softmax`. Why 150 primitives, and not 50? Addition can be written with
# subtraction, `tanh` with `exp`, and a matrix product
# as a multiplication and a sum. Fewer primitives would make the later stages smaller. Two forces stop it. The first
# is precision:

# %%
small = torch.tensor([1e-5], dtype=torch.float32)
by_exp = (torch.exp(2 * small) - 1) / (torch.exp(2 * small) + 1)
print(f"tanh(1e-5): {torch.tanh(small).item():.8e}; written with exp: {by_exp.item():.8e}")

# %% [markdown]
# `exp` of a small number is close to 1, and when 1 is subtracted, most digits are lost. A kernel for `tanh` uses
# another formula near zero. The second force is speed:

# %%
a, b = torch.randn(128, 128), torch.randn(128, 128)
library = best_time(torch.mm, a, b)
by_sum = best_time(lambda: (a[:, :, None] * b[None]).sum(1), repeat=5)
bars(
    [("mm", library * 1e3), ("multiply and sum", by_sum * 1e3, "bad")],
    "ms",
    "A product of two 128x128 matrices.",
    form="{:.3f}",
)

# %% [markdown]
# A library for matrix products arranges the work so that each number that is loaded is used many times. The formula
# says nothing of the kind. So a primitive is what cannot be written with others without a loss, or what is better
# not opened up. Products, convolutions and attention are primitives that this compiler never opens. (Even tiny
# leaves them alone.)
#
# The drawing below shows what becomes of an operator. One that is a view, a pointwise operator or a reduction itself,
# such as `exp` or `sum`, needs no rule: it is in a green box from the start.
# "Anything else" has neither a rule nor a place among the primitives.

# %% tags=["fold"]
drawing(
    {
        "op": ("an ATen operator", "about 3,000", "input"),
        "rule": ("has a rule", f"{len(TABLE)} overloads", "compute"),
        "view": ("view, indexing", "maps of positions", "saved"),
        "point": ("pointwise", "element by element", "saved"),
        "red": ("reduction", "many to one", "saved"),
        "ext": ("extern", "mm, attention", "library"),
        "call": ("anything else", "PyTorch's kernel", "plain"),
    },
    [("op", "rule"), ("rule", "view"), ("rule", "point"), ("rule", "red"), ("op", "ext"), ("op", "call")],
    "An operator with a rule becomes views, pointwise operators and reductions, from which later chapters make loops. "
    "Extern primitives and operators without a rule are called as they are.",
    "What becomes of an operator. From the green boxes chapter 7 makes loops.",
    marked=[("op", "call")],
)

# %% [markdown]
# ### What later stages may rely on
#
# A primitive is more than a name on a list. Chapters 7 to 10 generate code for it without asking questions, so the
# graph has to be *regular*: operands agree on their dtype, reductions name their dimensions, sums accumulate in at
# least 32 bits. (So the sum of a bfloat16 tensor is three nodes: a cast to float32, the sum, and a cast back.) These
# promises are written down as a function that lists the nodes which break one. Here is the part about pointwise nodes.
# The first operand of `where` is not compared, since it is the condition, which is bool. (`alpha` is the factor of
# `add(x, y, alpha=2)`, which means x + 2 * y. In a regular graph the factor is a product of its own.)
#
# %show minicompile.ch06_decompositions.decompose.violations "if primitive.category" to "found.append(f"{node.format_node()}: alpha"

# %%
print("before:", violations(mixed))
print("after: ", violations(decompose(mixed)))

# %% [markdown]
# ## The running example
#
# The joint graph of the GPT block, before and after:

# %%
block, inputs = example(batch=8, length=64)
joint = joint_of(block, inputs)


def counted(gm):
    operators = [n.target for n in gm.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]
    return collections.Counter(op.overloadpacket.__name__ for op in operators)


before, after = counted(joint.gm), counted(decompose(joint.gm))
print(f"{sum(before.values())} operators of {len(before)} kinds became {sum(after.values())} of {len(after)} kinds\n")
print("taken apart:", {op: n for op, n in before.items() if op not in after})
print("new:        ", {op: n for op, n in after.items() if op not in before})

# %% [markdown]
# There are more operators, of simpler kinds. Two layer norms and their gradients became sums, products and
# roots. The linear layers are what they were, because `mm` and `addmm` are primitives.
#
# ## What it costs
#
# The time to decompose grows with the graph, since each new operator is traced as in chapter 1. And the operators
# that are taken apart, are they not faster as one kernel? Without fusion they are. Each stage of the compiler can
# execute what it has made, and `compile` takes the name of the stage at which it is to stop as its backend. The
# book calls these names the rungs of a *ladder*. `aot_eager` runs the joint graph, cut in two, and `decomposed`
# runs the primitives one by one:

# %%
rows = []
with torch.no_grad():
    for backend in ("aot_eager", "decomposed", "cpp"):
        minicompile.reset()
        compiled = minicompile.compile(block, backend=backend)
        seconds = best_time(compiled, inputs, repeat=40)
        rows.append((backend, seconds * 1e6, "bad" if backend == "decomposed" else "compute"))
bars(rows, "us", "Time of the GPT block, forward, on three rungs of the ladder.", form="{:,.0f}")

# %% [markdown]
# It takes apart what eager has as one kernel, and puts nothing together again. This rung exists for debugging: if
# its numbers are wrong and those of `aot_eager` are right, the table has a bug. The gain comes from the chapters
# that follow. An operator that has come apart can be fused with its neighbours. Eager's GELU is one pass over
# memory, as are the bias before it and the dropout after it; opened up, all three become one.
#
# ## What torch.compile does differently
#
# It has several tables: the core ATen decompositions, Inductor's own, and `torch._refs`, a rewriting of most of
# PyTorch in Python over `prims`, a second operator set below ATen. A backend can choose its own table, and
# `torch.export` another. We keep one vocabulary, ATen overloads, so every graph at every stage is runnable PyTorch.
#
# torch.compile decomposes while it traces the joint graph. We do it afterwards, in a pass of its own, so that the
# joint graph can be run and compared before it is decomposed. Both do it before the graph is cut in two. Its table
# is larger, and some of its entries depend on the hardware. It widens half precision in the same way, and keeps
# float32 between fused operators, even where eager rounds between two of them. `emulate_precision_casts` makes it
# round there, too.
#
# ## Exercises
#
# <!-- exercises -->
#
# ## Further reading
#
# - N. Higham, *Accuracy and Stability of Numerical Algorithms* (2002), chapters 1 and 4.
# - *Core ATen IR* and *Prims IR*, in PyTorch's documentation of its IRs.
# - M. Milakov, N. Gimelshein, *Online normalizer calculation for softmax* (2018).
# - J. L. Ba and others, *Layer Normalization* (2016).
