from functools import partial


def _varint(value, big_endian=False, *, bits=6, one=True, early=False, reverse=True, flagged=-1, most=99):
    groups = [value & (1 << bits) - 1] if one or value else []
    while (value := value >> bits) and len(groups) < most:
        groups.append(value & (1 << bits) - 1)
    if big_endian and reverse and not early:
        groups.reverse()
    groups = [g | 1 << bits for g in groups[:flagged]] + (groups[flagged:] if flagged else [])
    return bytes(reversed(groups)) if early and big_endian else bytes(groups)


wrong_seven_bits = partial(_varint, bits=7)
wrong_no_byte_for_zero = partial(_varint, one=False)
wrong_flags_before_reversing = partial(_varint, early=True)
wrong_always_low_first = partial(_varint, reverse=False)
wrong_last_byte_continues = partial(_varint, flagged=None)
wrong_at_most_two = partial(_varint, most=2)


def right_by_length(value, big_endian=False):
    count = max(1, (value.bit_length() + 5) // 6)
    order = range(count - 1, -1, -1) if big_endian else range(count)
    out = bytearray(value >> 6 * k & 63 for k in order)
    for k in range(count - 1):
        out[k] += 64
    return bytes(out)
