import re

import torch

from chapters.tiny import NEUTRAL, aten, packet, triton_value, written


def _loop(draft, loop, *, prefix=True, masked=True, neutral=None, keep=True, axis=1, convert=True, store=True, function=None, simple=False):
    register, values = draft.registers[loop.node], [triton_value(draft, x) for x in loop.operands]
    formula = re.sub(r"\b(exp|log|sqrt|rsqrt|erf|sin|cos|abs|where)\b", r"tl.\1", loop.text) if prefix else loop.text
    text = formula.format(*values)
    if loop.row:
        value = f"tl.where(row & column, {values[0]}, {neutral or NEUTRAL[loop.text]})" if masked else values[0]
        text = f"tl.reduce({value}, {axis}, {function or loop.text}{', keep_dims=True' * keep})"
    elif packet(loop.node) is aten._to_copy and convert:
        text = f"({text}).to(tl.{'int1' if loop.node.fake.dtype is torch.bool else 'float32'})"
    draft.lines.append(f"{register} = {text}")
    if loop.node in draft.stored and store:
        draft.lines.append(f"tl.store({draft.pointers[loop.node]} + {written(loop, draft.rows)} + 0 * (r + c), {register}, row & column)")


def wrong_names(draft, loop):
    _loop(draft, loop, prefix=False)


def wrong_zero_for_all(draft, loop):
    _loop(draft, loop, neutral="0.0")


def wrong_beyond_the_row(draft, loop):
    _loop(draft, loop, neutral="1.0")


def wrong_flat(draft, loop):
    _loop(draft, loop, keep=False)


def wrong_columns(draft, loop):
    _loop(draft, loop, axis=0)


def wrong_nothing_stored(draft, loop):
    _loop(draft, loop, store=False)


def wrong_always_a_sum(draft, loop):
    _loop(draft, loop, function="sum")


def right_in_pieces(draft, loop):
    values = [triton_value(draft, x) for x in loop.operands]
    names = {n: f"tl.{n}" for n in ("exp", "log", "sqrt", "rsqrt", "erf", "sin", "cos", "abs", "where")}
    text = re.sub(r"[a-z]+", lambda m: names.get(m[0], m[0]), loop.text).format(*values)
    if loop.row:
        draft.lines.append(f"inside = tl.where(row & column, {values[0]}, {NEUTRAL[loop.text]})")
        text = f"tl.reduce(inside, axis=1, combine_fn={loop.text}, keep_dims=True)"
    if packet(loop.node) is aten._to_copy:
        kind = "int1" if loop.node.fake.dtype == torch.bool else "float32"
        text = f"tl.where({text}, 1.0, 0.0)" if kind == "float32" else f"({text}) != 0"
    draft.lines += [f"{draft.registers[loop.node]} = {text}"]
    if loop.node in draft.stored:
        where = f"{draft.pointers[loop.node]} + ({written(loop, draft.rows)}) + 0 * r + 0 * c"
        draft.lines += [f"tl.store({where}, {draft.registers[loop.node]}, mask=row & column)"]
