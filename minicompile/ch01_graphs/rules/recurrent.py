# %% [markdown]
# # Recurrent networks
#
# PyTorch's version in Python forgets the dropout between layers, so the layers are called one by one.
#
# On a CPU an LSTM is one call of oneDNN for each layer and direction. Its kernel keeps a workspace for backward if the grad mode is on when
# it runs, which its schema does not say, and compiled graphs run without. So what is recorded in grad mode is `lstm_with_workspace`,
# which turns it on, below autograd. (The fake of the workspace is empty. Only the derivative reads it, which takes it as it comes.)

# %%
import torch

aten = torch.ops.aten
library = torch.library.Library("minicompile", "FRAGMENT")
library.define("lstm_with_workspace" + str(aten.mkldnn_rnn_layer.default._schema).removeprefix("aten::mkldnn_rnn_layer"))


def lstm_with_workspace(*args):
    with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad():
        return aten.mkldnn_rnn_layer.default(*args)


library.impl("lstm_with_workspace", lstm_with_workspace, "CPU")
library.impl("lstm_with_workspace", aten.mkldnn_rnn_layer.default, "Meta")
WITH_WORKSPACE = {aten.mkldnn_rnn_layer.default: torch.ops.minicompile.lstm_with_workspace.default}


def layer_by_layer(function, *args):
    """A recurrent network, `function(x[, batch_sizes], hidden, params, has_biases, layers, dropout, train, ...)`."""
    at = next(i for i, a in enumerate(args) if isinstance(a, bool)) - 1
    hidden, params, has_biases, layers, dropout, train, both, *batch_first = args[at - 1:]
    if layers == 1 or not dropout or not train:
        return function(*args)
    swap = bool(batch_first and batch_first[0])
    x, sizes = args[0].transpose(0, 1) if swap else args[0], args[1:at - 1]
    states, ends = list(hidden) if isinstance(hidden, (tuple, list)) else [hidden], []
    for i in range(layers):
        now = [s[i * (1 + both):(i + 1) * (1 + both)] for s in states]
        weights = params[i * len(params) // layers:(i + 1) * len(params) // layers]
        x, *end = function(x, *sizes, now if isinstance(hidden, (tuple, list)) else now[0], weights, has_biases, 1, 0.0, train,
                           both, *[False for _ in batch_first])
        ends.append(end)
        x = torch.dropout(x, dropout, train) if i < layers - 1 else x
    return x.transpose(0, 1) if swap else x, *map(torch.cat, zip(*ends))


RECURRENT = {torch.gru, torch.lstm, torch.rnn_tanh, torch.rnn_relu}
