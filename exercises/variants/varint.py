def wrong_seven_bits(value, big_endian=False):
    groups = [value & 0x7F]
    while value := value >> 7:
        groups.append(value & 0x7F)
    if big_endian:
        groups.reverse()
    return bytes(g | 0x80 for g in groups[:-1]) + bytes(groups[-1:])


def wrong_no_byte_for_zero(value, big_endian=False):
    groups = []
    while value:
        groups.append(value & 0x3F)
        value >>= 6
    if big_endian:
        groups.reverse()
    return bytes(g | 0x40 for g in groups[:-1]) + bytes(groups[-1:])


def wrong_flags_before_reversing(value, big_endian=False):
    groups = [value & 0x3F]
    while value := value >> 6:
        groups[-1] |= 0x40
        groups.append(value & 0x3F)
    return bytes(reversed(groups)) if big_endian else bytes(groups)


def wrong_always_low_first(value, big_endian=False):
    groups = [value & 0x3F]
    while value := value >> 6:
        groups.append(value & 0x3F)
    return bytes(g | 0x40 for g in groups[:-1]) + bytes(groups[-1:])


def wrong_last_byte_continues(value, big_endian=False):
    groups = [value & 0x3F]
    while value := value >> 6:
        groups.append(value & 0x3F)
    if big_endian:
        groups.reverse()
    return bytes(g | 0x40 for g in groups)


def wrong_at_most_two(value, big_endian=False):
    groups = [value & 0x3F, value >> 6 & 0x3F] if value > 63 else [value]
    if big_endian:
        groups.reverse()
    return bytes(g | 0x40 for g in groups[:-1]) + bytes(groups[-1:])


def right_by_length(value, big_endian=False):
    count = max(1, (value.bit_length() + 5) // 6)
    order = range(count - 1, -1, -1) if big_endian else range(count)
    out = bytearray(value >> 6 * k & 63 for k in order)
    for k in range(count - 1):
        out[k] += 64
    return bytes(out)
