# %% [markdown]
# # Recording a CUDA graph
#
# The recorder is separate from the rules of `cudagraphs.py`, so that these can be tested where there is no GPU: the tests
# have a fake recorder that runs the function again on each replay and writes into the first run's outputs,
# which is just what a graph does.

# %%
import contextlib
import ctypes
import functools
import threading
from dataclasses import dataclass, field
from typing import Any, Callable, Sequence

import torch

from ..ch07_loops.ir import written_by
from ..ch09_triton.launch import RECORDING, tables_after_recording
from .collector import without_collection

BROKEN: list = []                # graphs whose recording could not be ended: PyTorch's allocator has their addresses


# %% [markdown]
# A product of matrices needs a *workspace*, memory for its intermediate results. cuBLAS has one for each pair of a thread
# and a stream, 32 MiB on an H100, and keeps it for ever. A recording would make one in its pool that never returns, so
# all workspaces are given back before it and at its end; PyTorch has no way to give back one. That is safe while no other
# thread multiplies. One that does has just been told the address of its workspace, and would use what is another thread's
# by now, or no longer memory at all. So beside other threads nothing is given back. All recordings then use the workspace
# that the recording thread has on a stream of our own, which lies in a pool of its own: if anybody gives workspaces back,
# the memory is still there, and nobody else's. Because the graphs of different functions share this workspace, they are
# replayed in turn also where they are on different streams.

# %%
@dataclass(frozen=True)
class SharedWorkspaces:
    """Of one device."""

    stream: Any
    pool: Any
    turn: Any = field(default_factory=threading.Lock)
    replayed: Any = field(default_factory=torch.cuda.Event)

    @classmethod
    @functools.cache
    def of(cls, device: int) -> "SharedWorkspaces":
        stream = ctypes.c_void_p()
        if error := ctypes.CDLL("libcuda.so.1").cuStreamCreate(ctypes.byref(stream), 1):     # 1: not ordered with the default stream
            raise RuntimeError(f"cuStreamCreate: error {error}")
        return cls(torch.cuda.ExternalStream(stream.value, device), torch.cuda.MemPool())

    def prepare(self) -> None:
        """This thread has a workspace on `stream`, in `pool`."""
        with torch.cuda.use_mem_pool(self.pool), torch.cuda.stream(self.stream):
            torch.cuda.current_blas_handle()

    def replay(self, graph) -> None:
        with self.turn:
            self.replayed.wait()
            graph.replay()
            self.replayed.record()


def is_only_thread() -> bool:
    """Is this the only thread that may call libraries? The threads of PyTorch's backward passes, which Python did not start, work
    while another waits."""
    started = [t for t in threading.enumerate() if not isinstance(t, threading._DummyThread) and not t.name.startswith("minicompile")]
    return len(started) <= 1 and (threading.current_thread() in started or torch._C._current_graph_task_id() >= 0)

# %% [markdown]
# `record` is PyTorch's context manager with four more precautions. A recording starts by waiting for the device, so no
# other thread may record meanwhile. The garbage collector must not run, since it might free another graph. Before it, PyTorch clears
# the place of the generator's offset on a stream of its own: a replay that overtook this would draw the numbers of the
# first call once more, so the caller's stream waits for it. And if something makes the recording invalid, so that it
# cannot be ended, `give_up` does what the context manager then leaves out. `queue_behind` keeps calls on different
# streams in order, since all graphs of a function write to one pool. `borrow` makes a tensor that looks at the pool's
# memory without owning it.

# %%
@functools.cache
def recording_stream(device: int) -> torch.cuda.Stream:
    """Of each GPU one: PyTorch's own for this belongs to the one that was current when it was made, and takes a recording there."""
    return torch.cuda.Stream(device)


class CudaRecorder:
    """Records on a private memory pool that all graphs of one compiled function share. Sharing is sound as
    long as they replay in the order of recording (forward, then backward), and tensors that must survive in
    between are kept referenced."""

    def __init__(self):
        self.pool = None

    def usable(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Are they on one GPU? Without tensors that is known only where there is no other."""
        found = {t.device for t in tensors}
        return torch.cuda.is_available() and all(d.type == "cuda" for d in found) and (len(found) == 1 or torch.cuda.device_count() == 1)

    def objection(self, compiled: Callable) -> str | None:
        """Why a compiled graph cannot be recorded, or None."""
        schedule = getattr(compiled, "schedule", None)
        found = set()
        for step in schedule.steps if schedule else ():     # an interpreted graph is judged by its inputs
            for name in (*step.inputs, *written_by(step)):
                found.add(device := schedule.program.buffers[name].device)
                if device.type != "cuda" or len(found) > 1:
                    return f"{step.name} uses {name}, which is on {device}, and not all of the graph is"
        return None

    def record(self, fn: Callable[[list], list], inputs: list) -> tuple[Callable[[], None], list]:
        """Returns `replay` and the outputs, which each replay rewrites. Recording executes nothing:
        the inputs keep their values. `fn` empties the list `inputs`: memory that nothing else refers to is
        free for the rest of the recording."""
        with RECORDING, without_collection():
            if self.pool is None:
                self.pool = torch.cuda.graph_pool_handle()
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
            shared = None if is_only_thread() else SharedWorkspaces.of(torch.cuda.current_device())
            if shared is None:
                torch._C._cuda_clearCublasWorkspaces()
            else:
                shared.prepare()
            own = shared.stream if shared else recording_stream(torch.cuda.current_device())
            recording = torch.cuda.graph(graph, self.pool, own, capture_error_mode="thread_local")
            try:
                with tables_after_recording(), recording:
                    outputs = fn(inputs)
                    if shared is None:
                        torch._C._cuda_clearCublasWorkspaces()
            finally:
                if torch.cuda.current_stream() != stream:
                    self.give_up(graph, stream)
            stream.wait_stream(recording.capture_stream)
        return functools.partial(shared.replay, graph) if shared else graph.replay, outputs

    def give_up(self, graph, stream) -> None:
        """Clean up where the end of a recording has failed, because something had made it invalid. PyTorch leaves its stream current,
        the allocator with its pool, and the generator in the middle of a recording, which one that succeeds puts right."""
        BROKEN.append(graph)
        torch.cuda.set_stream(stream)
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self.pool)
        with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=recording_stream(stream.device_index), capture_error_mode="thread_local"):
            torch.zeros((), device=stream.device)
        self.pool = None

    def leave_pool(self) -> None:
        """What is recorded from now on lies elsewhere than what was recorded before."""
        self.pool = None

    def queue_behind(self, last: Any) -> Any:
        """Make what is launched next wait for what was launched on the stream `last` (None: nothing was).
        Returns the stream of what is launched next."""
        raw = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())
        if last is not None and last.cuda_stream == raw:
            return last
        stream = torch.cuda.current_stream()
        if last is not None:
            stream.wait_stream(last)
        return stream

    def borrow(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory, without keeping it from being freed. The pool outlives the borrower, because every
        recording holds the pool."""
        size = tensor.untyped_storage().nbytes()
        start = tensor.data_ptr() - tensor.storage_offset() * tensor.element_size()
        storage = torch._C._construct_storage_from_data_pointer(start, tensor.device, size)
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
            storage, tensor.storage_offset(), tensor.shape, tensor.stride())
