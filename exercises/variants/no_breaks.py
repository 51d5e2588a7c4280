import torch


def wrong_still_prints(x, weights, log):
    total = torch.zeros(())
    for k, w in enumerate(weights):
        y = x @ w
        largest = y.abs().max()
        y = torch.where(largest > 10, y / largest * 10, y)
        print("layer", k)
        log.append(f"layer {k}: {tuple(y.shape)}")
        total = total + y.sum()
        x = torch.relu(y)
    return x, total


def wrong_no_log(x, weights, log):
    total = torch.zeros(())
    for w in weights:
        y = x @ w
        largest = y.abs().max()
        y = torch.where(largest > 10, y / largest * 10, y)
        total = total + y.sum()
        x = torch.relu(y)
    return torch.zeros_like(x), total * 2


def wrong_always_scaled(x, weights, log):
    total = torch.zeros(())
    for k, w in enumerate(weights):
        y = x @ w
        y = y / y.abs().max() * 10
        log.append(f"layer {k}: {tuple(y.shape)}")
        total = total + y.sum()
        x = torch.relu(y)
    return x, total


def right_clamped(x, weights, log):
    sums = []
    for k, w in enumerate(weights):
        y = x.matmul(w)
        y = y * (10 / y.abs().amax().clamp(min=10))
        sums.append(y.sum())
        x = y.relu()
        log.append("layer " + str(k) + ": " + str(tuple(y.shape)))
    return x, torch.stack(sums).sum()
