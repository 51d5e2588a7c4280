import torch


def step(x, weights, log):
    """x: [n, d]. weights: a list of [d, d]. log: a list, which gets a message for each layer."""
    total = torch.zeros(())
    for k, w in enumerate(weights):
        y = x @ w
        largest = y.abs().max()
        y = torch.where(largest > 10, y / largest * 10, y)
        log.append(f"layer {k}: {tuple(y.shape)}")
        total = total + y.sum()
        x = torch.relu(y)
    return x, total
