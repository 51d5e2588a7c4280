# %% [markdown]
# # A process that compiles kernels
#
# Compiling one kernel takes Triton 30 to 210 milliseconds (those of a GPT's training step), and a training step has dozens of kernels.
# They do not depend on each other, so they could be compiled at the same time. Threads do not help, since most of the work holds the
# interpreter lock. Processes do, but a new Python that imports Triton and compiles a first kernel takes most of a second before it
# is of use. Nor can the program's own process be forked: a fork of a process that has used a GPU cannot use it, and a fork of one with
# threads finds their locks taken for ever.
#
# So `launch.py` starts one more process, which runs this file as a script. It imports Triton once, knows nothing of PyTorch or this
# package, and never touches a GPU: for which one to compile is part of each task. For each task it forks a child. That costs
# milliseconds, the child has Triton loaded already, and if the compiler crashes, one child ends and nothing else.
#
#     the program                    this process                    a child
#     task (length, pickle)   ->     reads it, forks          ->     compiles, writes a file of the cache
#     reads the file          <-     (passes nothing on)      <-     a line with the number of the task
#
# Tasks arrive on standard input. Results do not go back the same way: the cache on disk has to have them anyway, so a child writes there,
# and a line on standard output says for which task. What it says behind the number is empty, or what went wrong.

# %%
import contextlib
import os
import pickle
import re
import select
import shutil
import struct
import sys
import tempfile
import time
import traceback
from pathlib import Path

if __package__:
    from .. import cache
else:                                      # a script, without the package, which would import PyTorch
    from importlib.util import module_from_spec, spec_from_file_location
    spec = spec_from_file_location("cache", os.path.join(os.path.dirname(__file__), "..", "cache.py"))
    cache = module_from_spec(spec)
    spec.loader.exec_module(cache)


# %% [markdown]
# Three steps make a kernel's text a binary. Triton reads the source of a function by its file name, so the text is put into `linecache`,
# where Python looks for lines before it opens a file, and executed. Then the types of the parameters are told: `signature` names them,
# block sizes are constants, and pointers whose addresses can be divided by 16 are marked, since they allow wider loads. Last, Triton
# compiles for the architecture of the task. A kernel that wants scratch memory is refused, because the launcher gives none.

# %%
# Triton's options that are the same for all our kernels. Its compiler would make one instruction, with one rounding, of
# a product and a sum. Then `x * y - y * x`, which is 0 in eager, is the rounding error of one product, and half of the
# square roots of such differences are NaN. Two roundings cost 0.3 to 0.8% of the training steps of nanoGPT, GPT-2 and
# ResNet-50 on an H200; functions of our own, which owe nothing to eager's order, ask for fused ones (`tl.fma` in
# `rules/prelude.py`: half of it for nanoGPT). The kernels of chapter 10 round in the same way. And the functions of CUDA's
# library would take subnormal numbers, those below 1e-38, for zeros, which eager's do not: `1e-45 // -0.7` is -1.
TRITON_OPTIONS = {"num_stages": 1, "enable_fp_fusion": False, "enable_reflect_ftz": False}


def compile_kernel(task: dict) -> dict:
    """Compile one kernel. `task`: name, code, signature, constants, aligned (names of 16-byte aligned
    pointers), num_warps, arch (90 for H100). Returns name, cubin, shared (bytes), num_warps."""
    try:
        return compile_text(task, task["code"])
    except RuntimeError as error:
        if "PassManager" not in str(error):
            raise
    return compile_text(task, with_folds_reshaped(task["code"]))


def compile_text(task: dict, code: str) -> dict:
    import linecache

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    filename = f"<minicompile {task['name']} {task['key'][:8]}>"
    linecache.cache[filename] = (len(code), None, code.splitlines(True), filename)
    namespace = {"__name__": f"minicompile_{task['key'][:8]}"}
    exec(compile(code, filename, "exec"), namespace)
    function = namespace[task["name"]]
    signature = dict(task["signature"]) | {name: "constexpr" for name in task["constants"]}
    attributes = {(i,): [["tt.divisibility", 16]]
                  for i, name in enumerate(signature) if name in task["aligned"]}
    constants = {(function.arg_names.index(n),): v for n, v in task["constants"].items()}
    source = ASTSource(function, signature, constants, attributes)
    with repairs():
        compiled = triton.compile(source, target=GPUTarget("cuda", task["arch"], 32),
                                  options={"num_warps": task["num_warps"], **TRITON_OPTIONS})
    data = compiled.metadata
    if getattr(data, "global_scratch_size", 0) or getattr(data, "profile_scratch_size", 0):
        raise RuntimeError("the kernel needs scratch memory")
    return {"name": data.name, "cubin": compiled.asm["cubin"], "shared": data.shared,
            "num_warps": data.num_warps}

# %% [markdown]
# Triton decides for each tile which thread has which elements: its *layout*. A pass that removes conversions between layouts moves some of
# them to before what they convert, and ends with an error ("operand does not dominate this use"): Triton 3.6 does so in a few kernels that
# compare a row with what they have folded it to, and fold that again. Such a kernel is compiled a second time, with each fold behind a
# `tl.reshape`, which the pass does not look through. It costs nothing: one number for each row stays where it is.

# %%
FOLD = re.compile(r"(tl\.(?:sum|max|min|reduce)\(.*\))\[:, None\]")


def with_folds_reshaped(code: str) -> str:
    return FOLD.sub(r"tl.reshape(\1, [XBLOCK, 1])", code)

# %% [markdown]
# ## A step of our own in Triton's compiler
#
# Triton's last forms of a kernel are LLVM's, then PTX, NVIDIA's assembly language, and then the binary, which NVIDIA's assembler `ptxas`
# makes. LLVM computes with as few bits as it can. Of `tl.arange(0, 256)` it knows that eight are enough, so it gives a quotient such as
# `rindex // 49` sixteen, may put two of these into one register, and adds 147 to one of them with the instruction that adds pairs:
#
#     mov.b32    %r96, {%rs122, %rs123};      // a register of 32 bits from two of 16
#     mov.b32    %r97, 147;
#     add.s16x2  %r98, %r96, %r97;
#     mov.b32    {%rs124, _}, %r98;           // the second sum is of no use
#
# Where only one of the two sums is of use, ptxas of CUDA 12.8 and 12.9 makes `VIADD.16x2 R0, R0, 0x0` of that: it adds zero. The kernel
# reads another element than it should, or a program's sum of small integers is wrong. Minima and maxima of pairs are right. Triton lets
# others add to its stages, so behind the one that makes PTX each sum of pairs is taken apart into two sums. Without pairs there is nothing
# to get wrong, and such sums are rare. (In a pattern of `re`, `\\1` stands for the first part in brackets.)

# %%
SUM_OF_PAIRS = r"add\.[su]16x2\s+([^,;]+),([^,;]+),([^,;]+);"
TWO_SUMS = r"""{
    .reg .b32 pair, other;  .reg .b16 low, high, plus_low, plus_high;
    mov.b32 pair, \2;  mov.b32 {low, high}, pair;
    mov.b32 other, \3;  mov.b32 {plus_low, plus_high}, other;
    add.s16 low, low, plus_low;  add.s16 high, high, plus_high;
    mov.b32 \1, {low, high};
    }"""

# %% [markdown]
# The second mistake is about signs. From sm_90 on a GPU has an instruction for the maximum of three integers, `VIMNMX3`, of which
# ptxas makes use for `max(max(-a, -b), c)`; and it forgets the second minus. `(-x).amax()` of 1,024 integers is then the maximum of
# numbers some of which have the wrong sign, and `argmax`, which looks for that number, finds none. LLVM writes negations where a
# kernel has none, as for a remainder by a negative number, so only behind LLVM are they all to be seen. In a kernel with such a maximum
# or minimum a negation becomes what it is in two's complement: all bits turned, plus one. That sum and a maximum are one instruction, too.
#
# The third mistake is about the smallest integer of a dtype, which is its own negative, and its own `abs`. Of an int32 that is made from
# such an int16 ptxas makes the wide number first and negates it then, which gives 32768. And it takes what `abs` has given, of any width,
# for no negative number, so that a remainder of it is one of 2147483648. So for 16 bits negations are complements in all kernels, and
# `abs(x)` is the larger one of `x` and its complement.
#
# The fourth mistake is about pairs again. A maximum with 0 of 16 bits behind a minimum is one instruction with it, and two minima may be
# one instruction, of a pair; where only one of these two is to have the maximum, both get it: of
# `torch.minimum(a, b).relu(), torch.minimum(c, d)` the second result has no negative numbers. So such a maximum is the number without its
# bits where the sign is set.
#
# The fifth mistake is about NaN. Of a square, an `abs` or an `exp`, ptxas knows that it is not negative, and so it takes `x * x >= 0` in
# float32 for true, whatever `x` is. With a NaN it is false. Of the comparisons that are true with a NaN it makes no such use, so each
# other one is written as the negation of its opposite: `x * x >= 0` is not (less than 0, or NaN). The machine has both, at the same price.

# %%
EXTREME = re.compile(r"\b(?:max|min)\.[su](?:16|32)")
NEGATION = r"neg\.s(16|32)\s+([^,;]+),([^,;]+);"
OF_16_BITS = NEGATION.replace("16|32", "16")
COMPLEMENT = r"{ .reg .b\1 turned;  not.b\1 turned, \3;  add.s\1 \2, turned, 1; }"
ABSOLUTE = r"abs\.s(16|32|64)\s+([^,;]+),([^,;]+);"
LARGER = r"{ .reg .b\1 turned, negated;  not.b\1 turned, \3;  add.s\1 negated, turned, 1;  max.s\1 \2, \3, negated; }"
RELU_OF_16_BITS = r"max\.s16\s+([^,;]+),([^,;]+),\s*0;"
WITHOUT_NEGATIVES = r"{ .reg .b16 sign;  shr.s16 sign, \2, 15;  not.b16 sign, sign;  and.b16 \1, \2, sign; }"
ORDERED = r"setp\.(ge|gt|le|lt)\.f32\s+([^,;]+),([^;]+);"
OF_OPPOSITE = {"ge": "ltu", "gt": "leu", "le": "gtu", "lt": "geu"}
NOT_OPPOSITE = "{ .reg .pred opposite;  setp.%s.f32 opposite,%s;  not.pred %s, opposite; }"


def repaired(ptx: str) -> str:
    """PTX of the same meaning, without what ptxas gets wrong."""
    ptx = re.sub(ABSOLUTE, LARGER, re.sub(SUM_OF_PAIRS, TWO_SUMS, ptx))
    ptx = re.sub(RELU_OF_16_BITS, WITHOUT_NEGATIVES, ptx)
    ptx = re.sub(ORDERED, lambda found: NOT_OPPOSITE % (OF_OPPOSITE[found[1]], found[3], found[2]), ptx)
    return re.sub(NEGATION if EXTREME.search(ptx) else OF_16_BITS, COMPLEMENT, ptx)


REPAIRS = (SUM_OF_PAIRS, TWO_SUMS, EXTREME.pattern, NEGATION, OF_16_BITS, COMPLEMENT, ABSOLUTE, LARGER,
           RELU_OF_16_BITS, WITHOUT_NEGATIVES, ORDERED, *OF_OPPOSITE.values(), NOT_OPPOSITE)


@contextlib.contextmanager
def repairs():
    """What Triton compiles meanwhile is `repaired`. A hook of the program's own goes first."""
    from triton import knobs
    before = knobs.runtime.add_stages_inspection_hook

    def hook(*args):
        known = before(*args) if before is not None else ("", "")
        if not args:                         # Triton asks for what makes its keys other ones
            return tuple(part + "".join(REPAIRS) for part in known)
        stages = args[1]
        make_ptx = stages["ptx"]
        stages["ptx"] = lambda *given: repaired(make_ptx(*given))
        return known

    knobs.runtime.add_stages_inspection_hook = hook
    try:
        yield
    finally:
        knobs.runtime.add_stages_inspection_hook = before

# %% [markdown]
# ## One task
#
# Triton keeps its own cache of every intermediate form on disk. Ours holds the final ones, so each child
# gives Triton a directory to throw away, in memory where there is `/dev/shm`.

# %%
def run_task(task: dict) -> str:
    """In the child: compile, write, and say how it went: nothing, or one line."""
    fast = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    scratch = tempfile.mkdtemp(prefix="minicompile-", dir=fast)
    os.environ["TRITON_CACHE_DIR"] = scratch
    try:
        result = pickle.dumps(compile_kernel(task))
        cache.write_sealed(Path(task["path"]), task["key"], lambda file: file.write_bytes(result))
        return ""
    except BaseException:
        lines = traceback.format_exc().strip().splitlines()
        return " | ".join(lines[-6:])[-1500:]
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


# %% [markdown]
# The server compiles one small kernel before it accepts tasks. All that Triton loads and parses for it is
# inherited by every child that is forked later. Nobody can be served before, so it leaves out what has no use here: Triton names the files
# of its cache after a hash of all its own, half a gigabyte that takes as long to read as all the rest.

# %%
WARM_UP = """
import triton
import triton.language as tl
from triton.language.extra import libdevice

@triton.jit
def kernel(a, b, XBLOCK: tl.constexpr):
    i = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    x = libdevice.tanh(tl.load(a + i, i < 100).to(tl.float32))
    tl.store(b + i, x - tl.sum(tl.where(i < 100, tl.exp(x), 0.0), 0), i < 100)
"""


def leave_out_hash() -> None:
    """Files of Triton's cache, which is thrown away, are not named after Triton's own files."""
    import triton
    for module in (triton.compiler.compiler, triton.runtime.cache):
        if hasattr(module, "triton_key"):
            module.triton_key = str


def warm_up() -> None:
    """Compile something, so that children inherit the imported modules and the parsed parts of Triton's
    library."""
    with tempfile.TemporaryDirectory() as scratch:
        run_task(dict(name="kernel", key="warm-up", code=WARM_UP, signature={"a": "*bf16", "b": "*fp32"},
                      constants={"XBLOCK": 128}, aligned=["a", "b"], num_warps=4, arch=90,
                      path=os.path.join(scratch, "result")))


# %% [markdown]
# `serve` goes on as long as a task may come, waits or runs. Each round does three things.
#
# 1. Read what has arrived. `select` waits until there is something, but only for 5 ms while children run, which are to be collected as
#    well. A pipe hands over bytes, not tasks: what is read goes to the end of `buffer`, and whole tasks (eight bytes with the length,
#    then that many) are taken from its beginning. If nothing is read, the other end is closed, and the process ends after its last task.
# 2. Collect children that have ended. One that ends well has answered by itself, with a line on the standard output that it has
#    inherited. If it has died, by a crash in the compiler for example, its status is not 0, and the server answers in its place.
# 3. Start children while there are free slots. A child compiles, answers and ends by `_exit`: it must not run what the server would run
#    at its end.
#
# Whatever Triton prints must not look like an answer. So answers go through a copy of standard output, and standard output itself
# leads to standard error from the beginning.

# %%
DIED = "the compiler process died with status"


def serve(slots: int) -> None:
    """Read tasks until standard input closes; at most `slots` children at a time."""
    results = os.dup(1)
    os.dup2(2, 1)
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    leave_out_hash()
    warm_up()
    waiting, running, buffer, open_ = [], {}, b"", True
    while open_ or waiting or running:
        if not open_:
            time.sleep(0.005)
        elif select.select([0], [], [], 0.005 if running else None)[0]:
            data = os.read(0, 1 << 20)
            open_, buffer = bool(data), buffer + data
            while len(buffer) >= 8 and len(buffer) >= (end := 8 + struct.unpack("<Q", buffer[:8])[0]):
                waiting.append(pickle.loads(buffer[8:end]))
                buffer = buffer[end:]
        while running and (ended := os.waitpid(-1, os.WNOHANG))[0]:
            number = running.pop(ended[0])
            if ended[1]:
                os.write(results, f"{number} {DIED} {ended[1]}\n".encode())
        while waiting and len(running) < slots:
            task = waiting.pop(0)
            pid = os.fork()
            if pid == 0:
                message = run_task(task).replace("\n", " ")
                os.write(results, f"{task['number']} {message}".rstrip().encode() + b"\n")
                os._exit(0)
            running[pid] = task["number"]


if __name__ == "__main__":
    serve(int(sys.argv[1]))
