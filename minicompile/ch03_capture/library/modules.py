# %% [markdown]
# # nn.Module
#
# Four methods of `torch.nn.Module` are handled like builtins, so that whoever reads, sets or deletes an attribute of a module, or
# calls one, comes here as Python comes to those methods. Inlining them would be right and slow.
#
# `module(x)` is `Module.__call__`, a long function about hooks that ends in `self.forward(x)`. Without
# hooks (the guard on the module's structure says so) that is all it does.

# %%
import torch

from ...ch02_guards.sources import ModuleAttrSource
from ...ch02_guards.torch_guards import CHILD_DICTS, GLOBAL_HOOKS, HOOK_DICTS, ModuleSpec
from ..attributes import get_attribute, store_attribute
from ..calls import HANDLED, handles, inline_function
from ..descriptors import guard_bare, no_attribute
from ..effects import changed, touch
from ..lookup import lookup
from ..tracer import call, guard, unsupported
from ..values import NONE, ObjVal, TensorVal, const, describe
from ..wrap import BUILDERS, part, realize, wrap


@BUILDERS.of(torch.nn.Module)
def wrap_module(tx, real, kind, source):
    """A module is guarded by its structure: its class, and the names of its children. One before the end of its `__init__` has none yet,
    and one of TorchScript keeps them elsewhere."""
    if "_parameters" in real.__dict__ and not isinstance(real, torch.jit.ScriptModule):
        guard(tx, source, "MODULE_STRUCTURE", ModuleSpec.of(real) if source is not None else None)
        return ObjVal(real=real, cls=kind, source=source)


CALL_IMPL = torch.nn.Module._call_impl


@handles(torch.nn.Module.__call__)
def call_module(tx, module, *args, **kwargs):
    if issubclass(module.cls, torch.jit.ScriptModule):
        unsupported(tx, "a call of a TorchScript module")
    fields = {k: v.items for k, v in module.attrs.items() if k in HOOK_DICTS} if module.real is None else module.real.__dict__
    if not any(GLOBAL_HOOKS):                       # what reads them otherwise is inlined
        tx.guards.add(None, "GLOBAL_HOOKS")
    around = lookup(module.cls, "_call_impl")
    if any(map(fields.get, HOOK_DICTS)) or any(GLOBAL_HOOKS) or around is not CALL_IMPL:
        return call(tx, wrap(tx, around), [module, *args], kwargs)
    return call(tx, get_attribute(tx, module, "forward"), list(args), kwargs)


@handles(("torch._dynamo.eval_frame", "__call__"))
def call_compiled_module(tx, module, *args, **kwargs):
    """What torch.compile returned for a module."""
    if type(module) is not ObjVal or not issubclass(module.cls, torch.nn.Module):
        unsupported(tx, f"a call of {describe(module)}")
    return call(tx, find_child(tx, module, "_orig_mod"), list(args), kwargs)


# %% [markdown]
# A module keeps its parameters, buffers and children in three dictionaries, which its `__getattr__` searches.

# %%
def find_child(tx, obj, name):
    if obj.real is None:
        for kind in CHILD_DICTS:
            if kind in obj.attrs and name in obj.attrs[kind].items:
                return realize(tx, obj.attrs[kind].items[name][1])
        no_attribute(obj.cls, name)
    for kind in CHILD_DICTS:
        children = obj.real.__dict__.get(kind, {})
        overlay = changed(tx, children)
        if name in (children if overlay is None else overlay.items):
            return wrap(tx, children[name], part(ModuleAttrSource, obj.source, kind, name)) if overlay is None else \
                realize(tx, overlay.items[name][1])
    # MODULE_STRUCTURE guards the names in those dictionaries; the class is guarded with them
    guard_bare(tx, obj, name)
    no_attribute(obj.cls, name)


# %% [markdown]
# Its `__setattr__` sorts values into them. A buffer is an item of its dictionary, which may be asked for its keys;
# replacing a parameter or a child changes the structure that guards describe.

# %%
def set_module_attribute(tx, obj, name, value):
    fields = {} if obj.real is None else obj.real.__dict__
    if "_parameters" not in fields:
        return set_new_module_attribute(tx, obj, name, value)
    structural = name in fields["_parameters"] or name in fields["_modules"]
    overlay = changed(tx, fields["_buffers"])
    is_buffer = name in (overlay.items if overlay else fields["_buffers"])
    if structural or is_buffer and value is None or value is not None and issubclass(value.cls, (torch.nn.Module, torch.nn.Parameter)):
        unsupported(tx, f"changing the parameters or submodules of a module ({name})")
    if not is_buffer:
        return store_attribute(tx, obj, name, value)
    if type(value) is not TensorVal and value is not NONE:
        unsupported(tx, f"a buffer set to something that is no tensor ({name})")
    buffers = get_attribute(tx, obj, "_buffers")
    touch(tx, buffers)
    buffers.items[name] = const(name), value


def set_new_module_attribute(tx, obj, name, value):
    """The same for a module that the trace itself has made, such as a loss, or whose `__init__` it runs: nothing guards its structure, and
    what is no matter of its children is that of any object."""
    known = any(name in obj.attrs[kind].items for kind in CHILD_DICTS if kind in obj.attrs)
    if value is not None and not known and not issubclass(value.cls, (torch.nn.Module, torch.nn.Parameter)):
        return store_attribute(tx, obj, name, value)
    setter, arguments = (torch.nn.Module.__delattr__, []) if value is None else (torch.nn.Module.__setattr__, [value])
    inline_function(tx, wrap(tx, setter), [obj, const(name), *arguments], {})


HANDLED.update({
    torch.nn.Module.__getattr__: lambda tx, module, name: find_child(tx, module, name.value),
    torch.nn.Module.__setattr__: lambda tx, module, name, new: set_module_attribute(tx, module, name.value, new),
    torch.nn.Module.__delattr__: lambda tx, module, name: set_module_attribute(tx, module, name.value, None),
})
