import torch
import torch.nn.functional as F

def entry(a, n, m):
    return [loss(a, t, reduction=how) * 2 for how in ("none", "mean") for loss, t in (
        (F.multi_margin_loss, n), (F.multi_margin_loss, n[None]), (F.multilabel_margin_loss, m), (F.multilabel_margin_loss, m[None][0]),
        (F.nll_loss, n), (F.cross_entropy, n))]

def drive(compile_, call):
    call(compile_(entry), torch.arange(4.0).requires_grad_(), torch.tensor(2), torch.tensor([1, 3, -1, 0]))
