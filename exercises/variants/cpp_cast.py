import torch

from minicompile.ch10_cpp.ops import literal, register_type


def _cast(dtype, args, arg_dtypes, *, truth=True, chosen=True, wide=("int64_t", "uint32_t", "uint64_t"), safe=True, narrow=True):
    source, target, x = register_type(arg_dtypes[0]), register_type(dtype), args[0]
    if source == target:
        return x
    if target == "bool" and truth:
        return f"{x} != 0"
    if source == "bool" and target in ("float", "double") and chosen:
        return f"{x} ? {literal(1, dtype)} : {literal(0, dtype)}"
    if source in ("float", "double") and not dtype.is_floating_point and safe:
        inner = "int64_t" if target in wide else "int32_t"
        return f"({target})mc_integer<{inner}>({x})" if narrow else f"mc_integer<{inner}>({x})"
    return f"({target}){x}"


def wrong_lowest_bit_is_truth(dtype, args, arg_dtypes):
    return f"(bool)((int64_t){args[0]} & 1)" if dtype is torch.bool else _cast(dtype, args, arg_dtypes)


def wrong_all_narrow(dtype, args, arg_dtypes):
    return _cast(dtype, args, arg_dtypes, wide=())


def wrong_no_final_cast(dtype, args, arg_dtypes):
    return _cast(dtype, args, arg_dtypes, narrow=False)


def wrong_no_cast_at_all(dtype, args, arg_dtypes):
    return args[0]


def wrong_rounds_half_types(dtype, args, arg_dtypes):
    return f"(float)(int){args[0]}" if dtype is torch.bfloat16 else _cast(dtype, args, arg_dtypes)


def wrong_half_is_another_type(dtype, args, arg_dtypes):
    return f"(double){args[0]}" if dtype is torch.float16 else _cast(dtype, args, arg_dtypes)


def right_table(dtype, args, arg_dtypes):
    x, to = args[0], register_type(dtype)
    given = arg_dtypes[0]
    if dtype is torch.bool:
        return x if given is torch.bool else f"!({x} == 0)"
    if given.is_floating_point and not dtype.is_floating_point:
        return f"({to})(mc_integer<int{64 if dtype in (torch.int64, torch.uint32, torch.uint64) else 32}_t>({x}))"
    return x if register_type(given) == to else f"static_cast<{to}>({x})"
