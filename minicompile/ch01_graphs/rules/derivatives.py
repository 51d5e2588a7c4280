# %% [markdown]
# # Derivatives that look at numbers
#
# A few derivatives look at numbers to choose their way: that of a product divides by its factors if none of them is
# zero. For tensors without numbers PyTorch takes another way, which agrees with the first but for infinities and NaN. Hooks
# replace what such a derivative has given by what eager would have chosen. They divide by 1 where they do not choose the
# quotient: in the next derivative an infinity that was not chosen is multiplied by 0.

# %%
import torch
from torch import is_grad_enabled


def derivative_of_product(given, grads):
    node, [safe] = torch._C._current_autograd_node(), given
    x, result, grad = node._saved_self, node._saved_result, grads[0]
    if safe is None or grad is None or x.is_complex() or x.dim() == 0:
        return None
    zeros = (x == 0).sum()
    if not hasattr(node, "_saved_dim"):
        safe = torch.where(zeros > 1, 0, safe)
    elif not node._saved_keepdim:
        dim = node._saved_dim - (2**64 if node._saved_dim >= 2**63 else 0)
        result, grad = result.unsqueeze(dim), grad.unsqueeze(dim)
    return (torch.where(zeros > 0, safe, grad * (result / torch.where(zeros > 0, 1, x))),)


def derivative_of_extreme(given, grads):
    """A CPU kernel writes a share of the gradient to where the extreme is; on a GPU, and for fakes, a mask is multiplied by it."""
    node, [shares] = torch._C._current_autograd_node(), given
    x, result = node._saved_self, node._saved_result
    if shares is None or x.device.type != "cpu":
        return None
    return (torch.where((x == result) | (x.isnan() & result.isnan()), shares, 0),)


def derivative_of_running_product(given, grads):
    """What eager computes. Where nobody differentiates it, eager and later versions of PyTorch divide in front of the first zero by the
    factor, take the products without it at the zero, and behind it all is zero. Where it may be differentiated that does not do: behind
    a zero the gradient is 0, but not its derivative. Eager divides if nothing is zero, and else takes steps for each element of `dim`, each
    of which would be a number of steps in the next derivative; the products without one factor are also rows of one matrix.
    The steps PyTorch has taken stay for one element, which may be infinite, and for none: there is nothing to divide."""
    node, [steps] = torch._C._current_autograd_node(), given
    x, result, grad, dim = node._saved_self, node._saved_result, grads[0], node._saved_dim
    dim -= 2**64 if dim >= 2**63 else 0
    if steps is None or grad is None or x.is_complex() or x.dim() == 0 or x.shape[dim] == 1 or 0 in x.shape:
        return None

    def share_in_all_behind(products):
        return (products * grad).flip(dim).cumsum(dim).flip(dim)
    if is_grad_enabled():
        some = (x == 0).any()
        return (torch.where(some, of_products_without_one(x, grad, dim), share_in_all_behind(result) / torch.where(some, 1, x)),)
    if not torch.__version__.startswith("2.11."):
        return None
    zeros = (x == 0).cumsum(dim)
    before, first = zeros == 0, (zeros == 1) & (x == 0)
    without = torch.where(first, 1, x).cumprod(dim)
    return (torch.where(before, share_in_all_behind(torch.where(before, result, 0)) / x,
                        torch.where(first, share_in_all_behind(torch.where(before, 0, without)), 0)),)


def of_products_without_one(x, grad, dim: int):
    """The gradient of a running product: for factor k the sum, over all j from k on, of `grad[j]` times the product of the factors up to j
    without k."""
    n, factors, weights = x.shape[dim], x.movedim(dim, -1).unsqueeze(-2), grad.movedim(dim, -1).unsqueeze(-2)
    k, j = torch.arange(n, device=x.device).unsqueeze(-1), torch.arange(n, device=x.device)
    products = torch.where(k == j, 1, factors).cumprod(-1)
    return torch.where(k <= j, products * weights, 0).sum(-1).movedim(-1, dim)


DERIVED_OTHERWISE = {"ProdBackward0": derivative_of_product, "ProdBackward1": derivative_of_product,
                     **{f"{name}Backward{i}": derivative_of_extreme for name, i in (("Max", 1), ("Min", 1), ("Median", 0),
                                                                                    ("Nanmedian", 0))},
                     "CumprodBackward0": derivative_of_running_product}


# %% [markdown]
# Chapter 12 runs the engine on fakes before anything is recorded, to see what the gradients are: whether a derivative depends on its
# factors, and thus can be differentiated again, is also for these hooks to say.

# %%
def derive_otherwise(nodes) -> None:
    """The hooks of `DERIVED_OTHERWISE` on nodes of the autograd graph, once on each."""
    for node in nodes:
        if (derivative := DERIVED_OTHERWISE.get(node.name())) and "derived otherwise" not in node.metadata:
            node.metadata["derived otherwise"] = True
            node.register_hook(derivative)
