# %% [markdown]
# # What to do about it
#
# The reason of a graph break or a recompile is written where something fails, by code that knows what has failed, and not what the
# program is for. What its author can do about it is the other half of the message. For hundreds of places that give reasons there are a
# few dozen answers, so they stand in two tables: a pattern that is looked for in the reason, and the advice. The first row that fits
# counts, so particular patterns stand before general ones. A reason of each table, with its advice:
#
#     a branch on the values of a tensor
#       -> Write the choice as torch.where(condition, a, b), or decide on something that is no tensor, such as a shape.
#     tensor 'x' size mismatch at dimension 0: expected 3, got 4
#       -> Sizes that vary become symbols by themselves, unless dynamic=False; mark_dynamic(tensor, dim) does it from the first call.
#       Or pad to a few sizes.
#
# Logs, `explain` and the error of `fullgraph=True` append it.

# %%
import re

BREAKS = [                       # (pattern in the reason, what to do); the first that fits
    (r"branch on the values",
     "Write the choice as torch.where(condition, a, b), or decide on something that is no tensor, such "
     "as a shape."),
    (r"\bprint\(\)", "Print after the compiled function has returned, or use a logger outside of it."),
    (r"out=", "Write t.copy_(operation), or make t in the shape and dtype of the result."),
    (r"Tensor\.(item|tolist|numpy)\(\)|(int|float|range)\(\) of a tensor|the text of a tensor",
     "Keep the value a 0-d tensor, or read it after the compiled function has returned."),
    (r"__bool__|`in` of a tensor",
     "Compare with tensor operations, such as (a == b).any(), and keep the result a tensor."),
    (r"nonzero|masked_select|unique|depends on tensor values",
     "The size of the result depends on values: use torch.where, or move it out of the compiled "
     "function."),
    (r"inference_mode", "Enter it around the call of the compiled function, or use torch.no_grad() inside."),
    (r"sdpa_kernel|cudnn\.flags", "Enter it around the call of the compiled function."),
    (r"backward\(\)|optimizer|\btorch\.optim\b|autograd\.grad$", "Call it outside of the compiled function."),
    (r"a hook waits|has registered", "Call backward() in the same function, or register the hook outside of it."),
    (r"Tensor\.(requires_grad_|detach_|register_hook|retain_grad|set_|resize_)\(",
     "Do it before or after the compiled function; inside of it, make a new tensor."),
    (r"marks an input as dirty", "Return a new tensor instead of writing to the input."),
    (r"^next\(\) of",
     "A break in the loop's body leaves the iterator to Python: mend that break, or make the body a "
     "function of its own."),
    (r"a copy of|deepcopy|__reduce_ex__", "Use tensor.clone(), or copy outside of the compiled function."),
    (r"is disabled for compilation",
     "Remove minicompile.disable from that function, or call it outside of the compiled one."),
    (r"needs the frame of its caller",
     "Debug with set_stance('force_eager'): it steps through your own lines."),
    (r"(?i)numpy|ndarray",
     "Use the torch function of the same name, or call it before or after the compiled function."),
    (r"\btime\.|\b[rR]andom\.|\blogging\.|\bjson\.|\bpickle\.|\bos\.|Generator object|\bopen\(|\binput\(",
     "Call it before or after the compiled function and pass the result as an argument."),
    (r"C function|call of the C|a call of",
     "Move the call out of the compiled function, write it with tensor operations, or make it an "
     "operator with torch.library.custom_op."),
    (r"generator|coroutine", "Compile the functions that it calls instead."),
    (r"creating a|making the class", "Create it once, outside of the compiled function."),
    (r"changing the parameters or submodules", "Change the module outside of the compiled function."),
    (r"the program raises", "Nothing to do if the exception is meant; that call runs as plain Python."),
    (r"subclass|layout", "Convert to a plain dense tensor before the call."),
    (r"nested too deeply", "Turn the recursion into a loop."),
]
BREAK_DEFAULT = ("Rewrite that line with tensor operations, or put it in a function marked with "
                 "minicompile.disable.")

# %%
RECOMPILES = [
    (r"size mismatch",
     "Sizes that vary become symbols by themselves, unless dynamic=False; mark_dynamic(tensor, dim) does"
     " it from the first call. Or pad to a few sizes."),
    (r"rank mismatch|dtype mismatch|device mismatch|class mismatch",
     "Call it with one kind of tensor, or compile one function for each kind."),
    (r"stride mismatch", "Call .contiguous() before, so that the layout is always the same."),
    (r"requires_grad mismatch|grad mode|inference mode",
     "Training and evaluation are two programs: one version of each is normal."),
    (r"training|MODULE|hook was registered|class of module|parameters of module|modules of module",
     "Finish building the model, hooks included, before the first call."),
    (r"another object|another function",
     "Pass the same object in every call: make lambdas and helpers once, outside of the loop."),
    (r"length of|keys of", "Keep containers at one length, or pass one stacked tensor."),
    (r"autocast|default dtype|deterministic|torch function", "Set it once, before the first call."),
    (r"size guard", "A branch on a size, of the program or the compiler, was answered for this size; avoid the branch, or pad."),
    (r"changed",
     "A number used only as data becomes an input by itself; a value that the code decides on costs one "
     "version each. Pass it as a tensor if it is data."),
]
RECOMPILE_DEFAULT = "Keep this value the same between calls, or pass it as a tensor."


# %%
def advice_for(table, text: str, default: str) -> str:
    return next((advice for pattern, advice in table if re.search(pattern, text)), default)


def for_break(reason) -> str:
    """What to do about a graph break with this reason."""
    return advice_for(BREAKS, str(reason), BREAK_DEFAULT)


def for_recompile(why) -> str:
    """What to do about a recompile with this explanation."""
    return advice_for(RECOMPILES, str(why), RECOMPILE_DEFAULT)
