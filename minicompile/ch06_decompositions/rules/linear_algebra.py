# %% [markdown]
# # Linear algebra
#
# Matrix products are library calls and stay whole. Around them a little is left to do. `addmm` keeps a 1-d
# bias, because cuBLASLt adds it while the result is still in registers. Any other addend costs the library
# a copy into the output first; taken out, the addition fuses with what follows the product. In half
# precision that would round twice where eager rounds once, so there it stays.

# %%
import torch

from ..table import HALF, decomposition


def _combined(x, product, beta, alpha):
    """beta * x + alpha * product, where beta == 0 ignores even a NaN in x."""
    product = product if alpha == 1 else product * alpha
    if beta == 0:
        return product
    return (x if beta == 1 else x * beta) + product


def _taken_apart(name: str, product, keep_epilogue: bool = False) -> None:
    @decomposition(name)
    def plus_product(x, a, b, *, beta=1, alpha=1):
        epilogue = keep_epilogue and x.dim() == 1 and beta == 1 and alpha == 1
        if epilogue or x.dtype in HALF or not x.is_floating_point() or not x.dtype == a.dtype == b.dtype:
            return NotImplemented
        return _combined(x, product(a, b), beta, alpha)


_taken_apart("addmm", torch.mm, keep_epilogue=True)
_taken_apart("baddbmm", torch.bmm)
_taken_apart("addmv", torch.mv)
_taken_apart("addbmm", lambda a, b: torch.sum(torch.bmm(a, b), [0]))
_taken_apart("addr", lambda a, b: a.unsqueeze(1) * b)


# %% [markdown]
# `nn.TransformerEncoderLayer` in evaluation calls one operator for the whole layer, so that eager need not
# launch twelve. Kept whole, its biases, norms and activation would run as eager's kernels; taken apart they fuse.
# With a mask (and nested tensors) it stays.

# %%
@decomposition("_transformer_encoder_layer_fwd")
def encoder_layer(x, width, heads, qkv_weight, qkv_bias, proj_weight, proj_bias, use_gelu, norm_first, eps,
                  norm_weight_1, norm_bias_1, norm_weight_2, norm_bias_2, ffn_weight_1, ffn_bias_1, ffn_weight_2,
                  ffn_bias_2, mask=None, mask_type=None):
    if mask is not None or x.dim() != 3:
        return NotImplemented
    linear, batch, length = torch.nn.functional.linear, x.shape[0], x.shape[1]

    def attention(x):
        parts = linear(x, qkv_weight, qkv_bias).chunk(3, -1)
        parts = [t.view(batch, length, heads, width // heads).transpose(1, 2) for t in parts]
        out = torch.nn.functional.scaled_dot_product_attention(*parts)
        return linear(out.transpose(1, 2).reshape(batch, length, width), proj_weight, proj_bias)

    def feed_forward(x):
        inner = linear(x, ffn_weight_1, ffn_bias_1)
        inner = torch.nn.functional.gelu(inner) if use_gelu else inner.relu()
        return linear(inner, ffn_weight_2, ffn_bias_2)

    def norm(x, weight, bias):
        return torch.nn.functional.layer_norm(x, [width], weight, bias, eps)

    if norm_first:
        x = x + attention(norm(x, norm_weight_1, norm_bias_1))
        return x + feed_forward(norm(x, norm_weight_2, norm_bias_2))
    x = norm(x + attention(x), norm_weight_1, norm_bias_1)
    return norm(x + feed_forward(x), norm_weight_2, norm_bias_2)
