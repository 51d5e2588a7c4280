import torch


def _copy(tensor, size, stride):
    out = torch.empty_strided(size, stride, dtype=tensor.dtype, device=tensor.device)
    out.copy_(tensor)
    return out


def _shape(tensor, size):
    if tuple(tensor.shape) != tuple(size):
        raise RuntimeError("shape")


def wrong_always_copies(tensor, size, stride):
    _shape(tensor, size)
    return _copy(tensor, size, stride)


def wrong_never_copies(tensor, size, stride):
    _shape(tensor, size)
    return tensor


def wrong_ones_matter(tensor, size, stride):
    _shape(tensor, size)
    return tensor if tensor.stride() == tuple(stride) or 0 in size else _copy(tensor, size, stride)


def wrong_restrides_without_copying(tensor, size, stride):
    _shape(tensor, size)
    same = all(a == b or n == 1 for a, b, n in zip(tensor.stride(), stride, size)) or 0 in size
    return tensor if same else tensor.contiguous().as_strided(size, stride)


def wrong_any_shape(tensor, size, stride):
    same = tensor.dim() == len(size) and all(a == b or n == 1 for a, b, n in zip(tensor.stride(), stride, size)) or 0 in size
    return tensor if same else _copy(tensor.reshape(size), size, stride)


def wrong_contiguous(tensor, size, stride):
    _shape(tensor, size)
    same = all(a == b or n == 1 for a, b, n in zip(tensor.stride(), stride, size)) or 0 in size
    return tensor if same else tensor.contiguous()


def wrong_float32(tensor, size, stride):
    _shape(tensor, size)
    same = all(a == b or n == 1 for a, b, n in zip(tensor.stride(), stride, size)) or 0 in size
    return tensor if same else torch.empty_strided(size, stride).copy_(tensor)


def right_by_elements(tensor, size, stride):
    if tensor.shape != torch.Size(size):
        raise RuntimeError(f"{tuple(tensor.shape)} instead of {size}")
    for d, n in enumerate(size):
        if n > 1 and tensor.numel() and tensor.stride(d) != stride[d]:
            fresh = tensor.new_empty_strided(size, stride)
            fresh.copy_(tensor)
            return fresh
    return tensor
