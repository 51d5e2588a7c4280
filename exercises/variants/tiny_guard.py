from chapters.tiny import describe


def _guard(outside, v, thing, text, alias="{v} is {first}"):
    if id(thing) not in outside.inputs:
        outside.inputs[id(thing)] = v, outside.recorder.input(thing)
    first, fake = outside.inputs[id(thing)]
    condition = alias.format(v=v, first=first) if v != first else text
    if condition:
        outside.test(condition)
    return fake


def wrong_no_guard(outside, v, thing):
    return _guard(outside, v, thing, "")


def wrong_shape_only(outside, v, thing):
    return _guard(outside, v, thing, f"{v}.shape == {outside.name(thing.shape)}")


def wrong_no_strides(outside, v, thing):
    wanted = outside.name((thing.shape, thing.dtype, thing.device, thing.requires_grad))
    return _guard(outside, v, thing, f"({v}.shape, {v}.dtype, {v}.device, {v}.requires_grad) == {wanted}")


def wrong_same_object(outside, v, thing):
    return _guard(outside, v, thing, f"{v} is {outside.name(thing)}")


def wrong_second_path_not_guarded(outside, v, thing):
    return _guard(outside, v, thing, f"describe({v}) == {outside.name(describe(thing))}", "")


def wrong_always_a_new_input(outside, v, thing):
    outside.inputs[id(outside), v] = v, outside.recorder.input(thing)
    outside.test(f"describe({v}) == {outside.name(describe(thing))}")
    return outside.inputs[id(outside), v][1]


def wrong_same_description(outside, v, thing):
    return _guard(outside, v, thing, f"describe({v}) == {outside.name(describe(thing))}", "describe({v}) == describe({first})")


def right_one_by_one(outside, v, thing):
    known = outside.inputs.get(id(thing))
    if known is None:
        known = outside.inputs[id(thing)] = v, outside.recorder.input(thing)
    if known[0] != v:
        outside.test(f"{known[0]} is {v}")
    else:
        for what in ("shape", "dtype", "device", "requires_grad", "stride()"):
            outside.test(f"{v}.{what} == {outside.name(eval(f'thing.{what}'))}")
    return known[1]
