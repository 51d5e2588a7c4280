import weakref
from functools import partial

import torch

from minicompile.ch02_guards.memory import raise_versions
from minicompile.ch11_runtime.cudagraphs import _alias_of_input


def _run(g, r, args, *, copy_in=True, write_back=True, versions=True, copy_out=True, alias=True, note=True, clear=True, of_call=True,
         count=True, strides=True):
    with torch._C._AutoDispatchBelowAutograd():
        if r.copied and copy_in:
            torch._foreach_copy_(r.placeholders, [args[i] for i in r.copied])
        r.replay()
        for i, placeholder in r.written if write_back else ():
            args[i].copy_(placeholder)
        if g.mutated and versions:
            raise_versions(*[args[i] for i in g.mutated])
        out = []
        for kind, *rest in r.recipes:
            if kind == "leaves":
                t = r.leaving[rest[0]]
                new = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device) if strides else torch.empty_like(t,
                    memory_format=torch.contiguous_format)
                out.append(new.copy_(t) if copy_out else t)
            elif kind == "stays":
                t = rest[0].as_strided(rest[0].shape, rest[0].stride()) if alias else rest[0]
                if note:
                    g.group.inside.append(weakref.ref(t))
                out.append(t)
            elif kind == "input":
                source = args[rest[0]]
                if not of_call and rest[0] in r.copied:
                    source = r.placeholders[r.copied.index(rest[0])]
                out.append(_alias_of_input(source, *rest[1:]))
            else:
                out.append(rest[0])
    if clear:
        args.clear()
    g.counts["replayed"] += count
    return out


wrong_old_inputs = partial(_run, copy_in=False)
wrong_no_write_back = partial(_run, write_back=False, versions=False)
wrong_outputs_are_overwritten = partial(_run, copy_out=False, strides=False)
wrong_keeps_arguments = partial(_run, clear=False)
wrong_aliases_of_placeholders = partial(_run, of_call=False)
wrong_nobody_is_inside = partial(_run, note=False)
wrong_always_inside = partial(_run, alias=False)
wrong_contiguous_outputs = partial(_run, strides=False)


def right_by_kind(g, r, args):
    makers = {"leaves": lambda k: leaving[k], "input": lambda i, *where: _alias_of_input(args[i], *where), "constant": lambda value: value}

    def stays(t):
        t = t.as_strided(t.size(), t.stride())
        g.group.inside.append(weakref.ref(t))
        return t
    with torch._C._AutoDispatchBelowAutograd():
        for place, i in zip(r.placeholders, r.copied):
            place.copy_(args[i])
        r.replay()
        for i, place in r.written:
            args[i].copy_(place)
        raise_versions(*(args[i] for i in g.mutated))
        leaving = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).copy_(t) for t in r.leaving]
        out = [(stays if kind == "stays" else makers[kind])(*rest) for kind, *rest in r.recipes]
    args.clear()
    g.counts["replayed"] += 1
    return out


SAME = [
    '- if g.mutated:\n'
        '+ if True:',
]
