# %% [markdown]
# # Attributes and methods of tensors, by name
#
# `METADATA` are facts that the guard of the tensor already fixes, such as its dtype. They become constants. Views that are written as
# attributes, such as `x.T`, are operations of the graph. `READ_FROM_INPUT` are facts about an input that no fake has, and which are
# guarded when they are read. `REFUSED_METHODS` need the numbers, the address, or change what the tensor is. The arguments of
# `TAKES_SIZES` are sizes, among which tensors count as numbers. So does the tensor that `TAKES_VALUE` fill with, where it is known: eager
# refuses a number that does not fit the dtype. To `fill_` it is a number on a GPU only; a CPU's kernel converts what it gets.
# `FILLS` put a number into a tensor whose dtype has to have it; `FILLS_WITH_INTEGERS` promote the tensor where the number is a float.

# %%
import torch

METADATA = frozenset((
    "dtype", "device", "layout", "ndim", "requires_grad", "is_cuda", "is_cpu", "is_sparse", "is_quantized",
    "is_mps", "is_meta", "is_xpu", "is_mkldnn", "is_nested", "itemsize", "names", "is_mtia",
    "is_ipu", "is_maia")) & {*dir(torch.Tensor)}          # PyTorch 2.13 has no `names`
VIEW_ATTRIBUTES = frozenset(("T", "mT", "H", "mH", "real", "imag"))
REFUSED_METHODS = frozenset((
    "item", "tolist", "numpy", "data_ptr", "backward", "storage", "untyped_storage", "register_hook",
    "retain_grad", "requires_grad_", "set_", "resize_", "resize_as_", "share_memory_", "pin_memory",
    "detach_", "is_pinned", "__array__", "__dlpack__", "register_post_accumulate_grad_hook", "is_set_to",
    "apply_", "map_", "map2_", "__reduce_ex__", "storage_type", "rename_", "sparse_resize_",
    "__bool__", "__int__", "__float__", "__index__", "__repr__", "__str__", "__format__", "__contains__",
    "_make_subclass", "as_subclass", "__complex__", "__hash__"))
READ_FROM_INPUT = frozenset(("grad", "is_leaf", "grad_fn", "name", "grad_dtype"))
TAKES_SIZES = frozenset(("view", "reshape", "expand", "repeat", "new_zeros", "new_ones", "new_empty", "new_full",
                         "unflatten", "narrow", "as_strided", "tile"))
TAKES_VALUE = frozenset(("masked_fill", "masked_fill_", "index_fill", "index_fill_"))
FILLS = TAKES_VALUE | {"fill", "fill_", "full", "new_full", "full_like", "tensor", "new_tensor", "scatter", "scatter_", "setitem",
                       "_threshold", "fill_diagonal_"}
FILLS_WITH_INTEGERS = frozenset(("where", "clamp", "clamp_", "clip", "clip_"))
