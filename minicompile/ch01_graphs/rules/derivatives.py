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
    """What eager and later versions of PyTorch compute: in front of the first zero it divides by the factor, at the zero it takes
    the products without it, and behind it all is zero. PyTorch 2.11 takes steps for each element of `dim`, which nobody uses then.
    These stay if they may be differentiated, since behind a zero the gradient is 0, but not its derivative, and for one element, which may
    be infinite: there is nothing to divide."""
    node, [steps] = torch._C._current_autograd_node(), given
    x, result, grad, dim = node._saved_self, node._saved_result, grads[0], node._saved_dim
    dim -= 2**64 if dim >= 2**63 else 0
    if steps is None or grad is None or x.is_complex() or x.dim() == 0 or x.shape[dim] == 1 or is_grad_enabled():
        return None
    zeros = (x == 0).cumsum(dim)

    def share_in_all_behind(products):
        return (products * grad).flip(dim).cumsum(dim).flip(dim)
    before, first = zeros == 0, (zeros == 1) & (x == 0)
    without = torch.where(first, 1, x).cumprod(dim)
    return (torch.where(before, share_in_all_behind(torch.where(before, result, 0)) / x,
                        torch.where(first, share_in_all_behind(torch.where(before, 0, without)), 0)),)


DERIVED_OTHERWISE = {"ProdBackward0": derivative_of_product, "ProdBackward1": derivative_of_product,
                     **{f"{name}Backward{i}": derivative_of_extreme for name, i in (("Max", 1), ("Min", 1), ("Median", 0),
                                                                                    ("Nanmedian", 0))}}

if torch.__version__.startswith("2.11."):
    DERIVED_OTHERWISE["CumprodBackward0"] = derivative_of_running_product
