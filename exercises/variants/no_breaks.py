import torch


def _step(x, weights, log, printing=False, logging=True, always=False, factor=1):
    total = torch.zeros(())
    for k, w in enumerate(weights):
        y = x @ w
        largest = y.abs().max()
        y = torch.where(largest > (-1 if always else 10), y * (10 / largest), y)
        if printing:
            print("layer", k)
        if logging:
            log.append(f"layer {k}: {tuple(y.shape)}")
        total = total + factor * y.sum()
        x = torch.relu(y)
    return x * factor, total


def wrong_still_prints(x, weights, log):
    return _step(x, weights, log, printing=True)


def wrong_no_log(x, weights, log):
    return _step(x, weights, log, logging=False)


def wrong_always_scaled(x, weights, log):
    return _step(x, weights, log, always=True)


def wrong_doubled(x, weights, log):
    return _step(x, weights, log, factor=2)


def right_clamped(x, weights, log):
    sums = []
    for k, w in enumerate(weights):
        y = x.matmul(w)
        y = y * (10 / y.abs().amax().clamp(min=10))
        sums.append(y.sum())
        x = y.relu()
        log.append("layer " + str(k) + ": " + str(tuple(y.shape)))
    return x, torch.stack(sums).sum()
