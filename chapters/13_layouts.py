# %% [markdown]
# # Layouts: in which order does a tensor lie in memory?
#
# A tensor of images has four dimensions: the image, the channel, the row and the column. Memory has one. Somebody
# has to choose in which order the elements lie there, and nothing that a program computes depends on the choice.
# Its speed does. This chapter lets the compiler choose for convolutions. It is a short chapter, because everything
# that it needs is there already. Its folder is called `ch13_tuning`, since an order is the first of the choices that change nothing
# but the speed; the others, such as which of several kernels is fastest, are not made yet.

# %%
import torch
import torch.nn as nn
import torch.nn.functional as F

from chapters._lib import Table, bars, best_time, drawing, results, row_of_boxes, watch
from minicompile.ch01_graphs.fake import FakeMode, FakeTensor
from minicompile.ch01_graphs.graph import print_graph
from minicompile.ch01_graphs.trace import trace
from minicompile.ch13_tuning.layouts import convolutions_to_channels_last, keep_layouts

# %% [markdown]
# ## The problem, measured
#
# PyTorch's default order is called NCHW, after the dimensions from the slowest to the fastest: all columns of a row
# are neighbours, then come the rows, then the channels. In the order NHWC, which PyTorch calls *channels last*, all
# channels of one pixel are neighbours. Both are strides of the same shape:

# %%
image = torch.randn(1, 3, 4, 5)
for name, form in (("NCHW", torch.contiguous_format), ("channels last", torch.channels_last)):
    t = image.contiguous(memory_format=form)
    print(f"{name:14} shape {tuple(t.shape)}, strides {t.stride()}, equal: {torch.equal(t, image)}")

# %% [markdown]
# Take an image of two channels and three pixels. The arrows lead from one address to the next:

# %% tags=["fold"]
row_of_boxes(
    [(f"channel {c}", f"pixel {p}", "compute" if c else "library") for c in range(2) for p in range(3)],
    "In NCHW, memory holds pixels 0, 1 and 2 of channel 0, and then pixels 0, 1 and 2 of channel 1.",
    "NCHW: a whole channel, then the next one.",
    per_row=3,
)

# %% tags=["fold"]
row_of_boxes(
    [(f"channel {c}", f"pixel {p}", "compute" if c else "library") for p in range(3) for c in range(2)],
    "In channels last, memory holds channels 0 and 1 of pixel 0, then both channels of pixel 1, then those of pixel 2.",
    "Channels last: a whole pixel, then the next one.",
    per_row=2,
)

# %% [markdown]
# Here is one convolution of ResNet-50, run by eager PyTorch on this machine's CPU, in both orders:

# %%
torch.manual_seed(0)
convolution, images = nn.Conv2d(64, 64, 3, padding=1, bias=False), torch.randn(8, 64, 56, 56)
times = {}
with torch.no_grad():
    for name, form in (("NCHW", torch.contiguous_format), ("channels last", torch.channels_last)):
        turned, model = images.contiguous(memory_format=form), convolution.to(memory_format=form)
        times[name] = best_time(model, turned, repeat=10)
bars([(name, 1e3 * t) for name, t in times.items()], "ms", "Time of a convolution in two orders.", form="{:.1f}")

# %% [markdown]
# Why? A convolution multiplies, at each pixel, the channels of a small window with a matrix of weights. It is a
# matrix product in disguise. The fast units for products, on a GPU the *tensor cores*, take rows whose elements are
# neighbours in memory. With channels last, the channels of a pixel are such a row. With NCHW they are as far apart
# as the image is large, so the library turns the tensor around before each convolution and back after it, or uses a
# slower method.
#
# ## The naive version: turn around each operand
#
# A user writes `model.to(memory_format=torch.channels_last)`, and does the same with the input. A compiler can do
# it without being asked. The simplest way would be to put two copies around each convolution, one into the other
# order and one back. That is what the library does already, and it is what we want to be rid of.
#
# ## The idea: ask, and let the order spread
#
# So ask for channels last in front of each convolution, *and do not turn the result back*. A convolution that gets
# channels last answers in channels last. A pointwise operator keeps the order of its operand. So does a batch norm.
# The order spreads by itself, and when the next convolution asks, it has been answered already. Such a request is
# written as a call of `contiguous`, which copies only if the order is another one.
#
# ### On four nodes, by hand
#
# This network is four nodes: a convolution, a batch norm, a ReLU, a convolution.


# %%
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(16, 32, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(32)
        self.second = nn.Conv2d(32, 32, 3, padding=1, bias=False)

    def forward(self, x):
        return self.second(F.relu(self.norm(self.first(x))))


net, x = Net().eval(), torch.randn(8, 16, 56, 56)

# %% [markdown]
# In front of the first convolution the input is turned around. That is a real copy. Its result is in channels last,
# so the batch norm's is, so the ReLU's is. The second request finds what it asks for, and gives its operand back.
# Only at the very end, where the user will see the strides, is the tensor turned back. Two copies are left, however
# deep the network is, as long as everything between two convolutions keeps the order. What does not, such as a
# reshape that gives the channels another place, starts anew: its result is in the ordinary order, and the next
# convolution asks, and pays, again.

# %% tags=["fold"]
drawing(
    {
        "x": ("x", "NCHW", "input"),
        "r1": ("contiguous", "a copy", "bad"),
        "c1": ("conv2d", "answers in NHWC", "library"),
        "bn": ("batch_norm", "keeps NHWC", "compute"),
        "relu": ("relu", "keeps NHWC", "compute"),
        "r2": ("contiguous", "nothing to do", "plain"),
        "c2": ("conv2d", "answers in NHWC", "library"),
        "out": ("contiguous", "a copy, for the user", "bad"),
    },
    [("x", "r1"), ("r1", "c1"), ("c1", "bn"), ("bn", "relu"), ("relu", "r2"), ("r2", "c2"), ("c2", "out")],
    "The input is copied into channels last. The convolution answers in it, batch norm and ReLU keep it, and the second request finds "
    "nothing to do. The result is copied back for the user.",
)

# %% [markdown]
# The pass works on the captured graph, before anything else. It looks whether all convolutions are of the ordinary
# kind, and then inserts the requests, for its image and its weight (`operands_of`). A
# request, `moved`, gets the notes (`meta`) of the convolution, which say where it stands in the program, and
# capture's value of what it turns:
#
# %show minicompile.ch13_tuning.layouts.convolutions_to_channels_last "for node in convolutions" to "node.replace_input_with"
#
# It is applied on GPUs only, and not to a graph whose convolutions all read images of less than eight channels
# (`reads_many_channels`): those would not fill the 16 bytes that a tensor core takes at a time. This page is built
# without a GPU, so the cell below captures the network and pretends: while the pass runs, each fake of the graph has
# the device `cuda`, which is all that the pass asks about. (`fakes` notes which fake each of these stands for, and
# the last loop puts them back.) The second pass that it calls, `keep_layouts`, is the one that turns the result back;
# it comes further down.


# %%
def asked(function, *inputs):
    """The captured graph of a function with the requests in it, and the fakes of its inputs."""
    graph, fakes = watch(function, *inputs, backend="eager").graphs[0], {}
    for node in graph.graph.nodes:
        if isinstance(fake := node.meta.get("val"), FakeTensor):
            node.meta["val"] = FakeTensor(fake.meta, torch.device("cuda"))
            fakes[node.meta["val"]] = fake
    convolutions_to_channels_last(graph)
    for node in graph.graph.nodes:
        node.meta["val"] = fakes.get(node.meta.get("val"))
    return graph, [n.meta["val"] for n in graph.graph.nodes if n.op == "placeholder"]


def turned(function, *inputs):
    graph, fakes = asked(function, *inputs)
    keep_layouts(graph, fakes)
    print("\n".join(line.partition("  #")[0] for line in print_graph(graph).splitlines() if " = input" not in line))


turned(net, x)

# %% [markdown]
# The weights are turned around as well, but for those of 1 by 1, whose elements are in the same place in both orders. In training
# this costs one small copy for each step, since the optimizer
# has changed them; the kernel that makes the copy is one of ours, and fuses with what makes the operand, if that is
# ours too.
#
# ### Where the order is known
#
# That "the order spreads by itself" is no hope. The compiler has to know it before anything runs, because a
# generated kernel contains the strides of its operands. The fakes of [chapter 1](chapter:01) carry strides, and a
# fake convolution answers as the library will. Trace the two forms and read the strides of each result:


# %%
def layers(x, first, second):
    y = F.relu(F.conv2d(x, first, padding=1))
    return [F.conv2d(y, second, padding=1)]


mode, rows = FakeMode(), []
weights = [net.first.weight.detach(), net.second.weight.detach()]
for name, form in (("NCHW", torch.contiguous_format), ("channels last", torch.channels_last)):
    fakes = [mode.from_real(t.contiguous(memory_format=form)) for t in (x.clone(), *[w.clone() for w in weights])]
    nodes = [n for n in trace(layers, fakes).graph.nodes if n.op == "call_function"]
    rows += [(name, n.target.overloadpacket.__name__, str(tuple(n.meta["val"].stride()))) for n in nodes]
Table(["operands", "operator", "strides of its result"], rows)

# %% [markdown]
# A stride of 1 in the last place means that columns are neighbours, and in the second place that channels are.
#
# ## What goes wrong without care
#
# A convolution with *groups* works on few channels at a time, and gains nothing, so a graph that contains one is left
# alone. The other dangers come from programs that see the order. Here is one that every course on neural networks contains. It
# makes a vector of each image with `view`, which never copies:


# %%
def classify(x, weight):
    y = F.conv2d(x, weight, padding=1).relu()
    return y.view(y.shape[0], -1) @ torch.ones(32 * 8 * 8, 10)


small = torch.randn(2, 16, 8, 8)
y = F.conv2d(small.contiguous(memory_format=torch.channels_last), net.first.weight, padding=1).relu()
try:
    y.view(2, -1)
except RuntimeError as error:
    print(error)

# %% [markdown]
# The columns of one row are no neighbours any more, so no strides describe the vector, and the program fails although
# it is right. (Two neighbouring dimensions can be one only if the stride of the outer one is the size of the inner
# one times the stride of the inner one.) The second danger gives no error. Here `flatten` shares the memory of `y` in
# eager, and the multiplication is seen in `y`. If `y` is in channels last, `flatten` has to copy, and `y` stays as it
# was:

# %%
def doubled(y):
    y.flatten(1).mul_(2)
    return y.sum()


for name, form in (("NCHW", torch.contiguous_format), ("channels last", torch.channels_last)):
    print(f"{name:14}", doubled(torch.ones(2, 3, 4, 4).contiguous(memory_format=form)).item())

# %% [markdown]
# ### Who sees the order
#
# Could we say of each function of PyTorch whether it sees the order? There are hundreds, and for `reshape` and `flatten` the answer
# depends on what happens to the result. It is easier to try. The graph with the requests is run on fakes, once, and each result is
# compared with the fake that capture left on the node. A tensor whose strides are others than capture saw is *turned*. There are four
# ways in which a program can see that a tensor is turned:
#
# 1. **A turned tensor is a result.** The caller may ask for its strides, or call `view` on it.
# 2. **A node fails that gets a turned tensor**, as `view` did above.
# 3. **A node counts places in memory by itself.** `as_strided` does, since its arguments are strides and an offset in
#    memory, and not positions in a tensor. An operator that is not PyTorch's may do so, too. The function that
#    decides this is called `reads_memory` below.
# 4. **One memory became two, and somebody can tell.** Two tensors had one memory in capture's run and have two now,
#    and this memory is written later, as in `doubled`, or both tensors are results, and the caller may write to one
#    and look at the other. Two memories that became one are the same case the other way round; an example follows
#    further below.
#
# Here is a program of two or three lines for each of them, and one that sees nothing: its `flatten` also copies, but nobody writes.


# %%
def is_result(x, w):
    return F.conv2d(x, w)


def fails(x, w):
    return F.conv2d(x, w).view(2, -1).sum()


def counts_places(x, w):
    return F.conv2d(x, w).as_strided((4,), (1,)).sum()


def is_written(x, w):
    y = F.conv2d(x, w)
    y.flatten(1).mul_(2)
    return y.sum()


def two_results(x, w):
    y = F.conv2d(x, w)
    return y.mean(1), y.flatten(1), y.reshape(2, -1)


def sees_nothing(x, w):
    return F.conv2d(x, w).flatten(1).sum()


# %% tags=["fold"]
pair, rows = (torch.randn(2, 16, 8, 8), torch.randn(32, 16, 1, 1)), []
for program, way in ((is_result, "1"), (fails, "2"), (counts_places, "3"), (is_written, "4, written"), (two_results, "4, results"),
                     (sees_nothing, "none")):
    graph, fakes = asked(program, *pair)
    keep_layouts(graph, fakes)
    copies = [n for n in graph.graph.nodes if n.target == "contiguous" and not n.kwargs]
    readers = ["return" if u.op == "output" else u.name for n in copies for u in n.users]
    rows.append((program.__name__, way, ", ".join(readers) or "no copy"))
Table(["program", "which way", "who reads a copy in capture's order"], rows)

# %% [markdown]
# In `two_results` the mean goes on with the turned tensor, since a mean sees no order. In `is_written` the sum sees none either, and
# it reads the copy nevertheless. To see why, follow this program node by node. The table has each node's memory in both
# runs, as a letter:

# %% tags=["fold"]
from minicompile.ch01_graphs.fake import storage_key
from minicompile.ch13_tuning.layouts import Turned

graph, fakes = asked(is_written, *pair)
requests = {n for n in graph.graph.nodes if n.target == "contiguous"}
run, letters, rows = Turned(graph, fakes, requests), {}, []
for node, value in run.values.items():
    if node.op != "placeholder" and node not in requests:
        then, now = (letters.setdefault((kind, storage_key(t)), f"{kind}{sum(k == kind for k, _ in letters) + 1}")
                     for kind, t in (("A", node.meta["val"]), ("B", value)))
        rows.append((run.position[node], node.name, then, now, "turned" if run.is_turned(node) else ""))
Table(["position", "node", "memory in capture's run", "memory now", ""], rows)

# %% [markdown]
# In capture's run the convolution, `flatten` and `mul_` have one memory, A1. Now `flatten` has B2, since it had to copy, and `mul_`
# writes B2. The convolution's result in B1 is never doubled, and the sum reads B1. So A1 became two, at `flatten`, and it is
# written later, by `mul_`: the fourth way. The remedy is a copy in NCHW directly behind the convolution. If only `flatten` read
# this copy, it would share the copy's memory, and the sum would still read B1. So where a memory is written later, *all* its
# readers have to read the copy. Then there is one memory again.
#
# The opposite happens too. `conv2d(x, w).permute(0, 2, 3, 1).contiguous()` makes a copy of an NCHW tensor, and of one that is
# channels last it makes none: what were two memories in capture's run are one now, and a write to the copy would be a write to
# the convolution's result. Such a copy has to read the restored layout, where it is a copy again.
#
# ### In code
#
# A run is an object with six things:
#
# - `position`: where each node stands.
# - `values`: the result of each node.
# - `written`: for each of capture's memories, the position of the last node that writes it.
# - `ours`: the requests, and the copies that were inserted before, which are no nodes of the program.
# - `seen`: the memories whose order the program sees. It is empty at first.
# - `joined`: copies that the program itself makes, as with `contiguous()`, and that no longer copy. It is empty at
#   first, too, and is filled by the last line of the next listing.
#
# Ways 2 and 3 are noticed while a node runs. Ways 1 and 4 are looked for at the end, in the function below. In it,
# `memories` gives the identities of the memory behind a value, `node.meta["val"]` is capture's value and `value` the
# new one. For each node and each of its operands `a` that is the program's, `one` and `other` are their memories in
# capture's run. `together` says whether the two share memory now, and if that is not as it was then, somebody may
# tell:
#
# %show minicompile.ch13_tuning.layouts.Turned.parted_or_joined
#
# In the example, when `node` is `flatten` and `a` the convolution, `one` and `other` are both {A1}, and `together` is
# false, as the new memories are B2 and B1. `mul_` writes A1 at a later position, so A1 is seen. `leaving` is for the
# case of results. Its two sets have those results of the graph that lie in the memory of the node, and those that lie
# in the memory of its operand. Where one memory became two, the caller can tell if these are more than one tensor.
# Where two became one (`together` is true), the caller can tell if each of them has a result. In all cases the memory
# of the operand, `other`, is the one to be restored. Where two became one, the node is a copy that no longer copies,
# and goes into `joined`.
#
# The next function says where the copies belong. Nodes with the same memory are one group. The first node of a group has made
# the memory. An in-place operator that directly follows, as `relu_` follows a batch norm, gives back the very tensor that it got,
# so it is counted among the makers, and the copy stands behind it:
#
# %show minicompile.ch13_tuning.layouts.places
#
# The copy itself is made by `restored`. `contiguous` can only make the ordinary order, in which the last dimension is
# the fastest. If capture saw another order, the dimensions are permuted first, so that this order becomes the
# ordinary one, and permuted back afterwards. `memory_order` lists the dimensions from the slowest to the fastest, and
# `present` gives the number that a size had in the call that was captured. The two permutations are left out if the
# order is the ordinary one:
#
# %show minicompile.ch13_tuning.layouts.restored "order = memory_order" to "nodes.append"
#
# The last function puts this together. `made` are the makers of a memory, so `made[-1]` is the node behind which the
# copy stands, and `everywhere` is the question whether the memory is written after that. The new copies join `ours`,
# as they are no nodes of the program either. A copy changes what is behind it: what is computed from it may be in
# capture's order again, and then needs no copy of its own. So the graph is run again until no memory is seen:
#
# %show minicompile.ch13_tuning.layouts.keep_layouts "while ours" to "user.replace_input_with"
#
# The long condition lists who reads the copy: everybody if the memory is written; otherwise the results, the copies that would
# not copy, who counts places, and who had a view of this memory in capture's run. All others go on with the turned tensor.
#
# Here is the classifier from above, after both passes. Its `view` reads a copy:

# %%
turned(classify, small, net.first.weight.detach())

# %% [markdown]
# A tensor that was in channels last in eager as well, because the user chose it, is not turned, and nothing is done about it.
#
# ## What it costs, and what it brings
#
# The pass takes a walk over the graph. What it brings was measured on ResNet-50, for whole training steps. In the
# first rows the user's model is in NCHW and computes in tf32; in the second the user has chosen channels last and
# bf16, so the pass finds nothing to turn around:

# %% tags=["gpu-result", "results:h100-resnet50", "fold"]
found = results("h100-resnet50")["results"]
names = {"eager": "eager", "torch": "torch.compile", "minicompile": "minicompile"}
Table(["the user's model", "dtype", "compiler", "ms per step"],
      [("channels last" if r["task"]["channels_last"] else "NCHW", r["task"]["dtype"], names[r["task"]["compiler"]], f"{r['ms']:.1f}")
       for r in found if r["task"]["compiler"] in names])

# %% [markdown]
# Where the user's model is in NCHW, the gain over eager has two parts that this table does not separate: the order,
# and the fusion of batch norm with its neighbours. Where it is in channels last, the second part is what is left.
#
# ## What torch.compile does differently
#
# Inductor has the same optimization, and calls it layout optimization. It estimates first whether it pays, from the
# sizes of the convolutions in the graph. Ours is applied wherever all convolutions are ordinary two-dimensional
# ones. Inductor can also leave the choice of an order open for any buffer, until something that needs an order
# reads it.
#
# ## Exercises
#
# Four exercises of other chapters are about strides: [the layout that needs no words](exercise:contiguous-strides),
# [no gaps, no overlaps](exercise:is-dense), [when a reshape needs no copy](exercise:reshape-layout), and
# [the library's strides and ours](exercise:relayout).
#
# <!-- exercises -->
#
# ## Further reading
#
# - *Channels Last Memory Format in PyTorch*, a tutorial of PyTorch's documentation.
# - Y. Liu and others, *Optimizing CNN Model Inference on CPUs* (ATC 2019), which chooses layouts by a search over the whole graph.
