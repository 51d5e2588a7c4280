from minicompile.ch07_loops.ir import root_of


def _written(schedule):
    return [root_of(schedule.program.buffers, n) for step in schedule.steps for n in step.outputs if n is not None]


def wrong_repeats(schedule):
    return [n for n in _written(schedule) if n in schedule.program.inputs]


def wrong_order_of_inputs(schedule):
    found = set(_written(schedule))
    return [n for n in schedule.program.inputs if n in found]


def wrong_one_alias_deep(schedule):
    b = schedule.program.buffers
    found = [b[n].alias_of for step in schedule.steps for n in step.outputs if n is not None]
    return list(dict.fromkeys(n for n in found if n in schedule.program.inputs))


def wrong_all_roots(schedule):
    return list(dict.fromkeys(_written(schedule)))


def wrong_last_output_only(schedule):
    found = [root_of(schedule.program.buffers, step.outputs[-1]) for step in schedule.steps if step.outputs[-1] is not None]
    return list(dict.fromkeys(n for n in found if n in schedule.program.inputs))


def wrong_names_not_roots(schedule):
    names = [n for step in schedule.steps for n in step.outputs if n is not None]
    return list(dict.fromkeys(n for n in names if root_of(schedule.program.buffers, n) in schedule.program.inputs))


def right_walks_the_chain(schedule):
    buffers, found = schedule.program.buffers, []
    for step in schedule.steps:
        for name in filter(None, step.outputs):
            while buffers[name].alias_of:
                name = buffers[name].alias_of
            if name in schedule.program.inputs and name not in found:
                found.append(name)
    return found


def wrong_patches_the_host_program(schedule):
    import minicompile.ch11_runtime.host as host
    host.compile_schedule = lambda schedule, backend: lambda args: [a.add_(1) for a in args]
    return []


SAME = [
    '- found[root] = True\n'
        '+ found[root] = False',
    '- if n is not None and (root := root_of(p.buffers, n)) in owned:\n'
        '+ if (root := root_of(p.buffers, n)) in owned:',
]
