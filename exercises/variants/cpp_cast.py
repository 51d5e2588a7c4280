import torch

from minicompile.ch10_cpp.ops import literal, register_type


def _cast(x, source, target, *, truth=True, chosen=True, wide=("int64_t", "uint32_t", "uint64_t"), safe=True, narrow=True):
    given, wanted = register_type(source), register_type(target)
    if given == wanted:
        return x
    if wanted == "bool" and truth:
        return f"{x} != 0"
    if given == "bool" and wanted in ("float", "double") and chosen:
        return f"{x} ? {literal(1, target)} : {literal(0, target)}"
    if given in ("float", "double") and not target.is_floating_point and safe:
        inner = "int64_t" if wanted in wide else "int32_t"
        return f"({wanted})mc_integer<{inner}>({x})" if narrow else f"mc_integer<{inner}>({x})"
    return f"({wanted}){x}"


def wrong_lowest_bit_is_truth(x, source, target):
    return f"(bool)((int64_t){x} & 1)" if target is torch.bool else _cast(x, source, target)


def wrong_all_narrow(x, source, target):
    return _cast(x, source, target, wide=())


def wrong_no_final_cast(x, source, target):
    return _cast(x, source, target, narrow=False)


def wrong_no_cast_at_all(x, source, target):
    return x


def wrong_rounds_half_types(x, source, target):
    return f"(float)(int){x}" if target is torch.bfloat16 else _cast(x, source, target)


def wrong_half_is_another_type(x, source, target):
    return f"(double){x}" if target is torch.float16 else _cast(x, source, target)


def right_table(x, source, target):
    to = register_type(target)
    if target is torch.bool:
        return x if source is torch.bool else f"!({x} == 0)"
    if source.is_floating_point and not target.is_floating_point:
        return f"({to})(mc_integer<int{64 if target in (torch.int64, torch.uint32, torch.uint64) else 32}_t>({x}))"
    return x if register_type(source) == to else f"static_cast<{to}>({x})"


SAME = [
    "- if given == 'bool' and wanted in ('float', 'double'):\n"
        "+ if given == 'bool':",
    "- if given == 'bool' and wanted in ('float', 'double'):\n"
        "- return f'{x} ? {literal(1, target)} : {literal(0, target)}'\n"
        '+ if True:\n'
        '+ pass',
    '- if given == wanted:\n'
        '- return x\n'
        '+ if True:\n'
        '+ pass',
    "- if given == 'bool' and wanted in ('float', 'double'):\n"
        "+ if given == 'bool' and wanted in ('double',):",
    "- if given == 'bool' and wanted in ('float', 'double'):\n"
        "+ if given == 'bool' and wanted not in ('float', 'double'):",
    "- if given == 'bool' and wanted in ('float', 'double'):\n"
        "+ if given == 'bool' and wanted in ('float',):",
]
