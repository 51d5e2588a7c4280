"""Is a compiled model right? Its distance to a reference in float64 against the distance of eager.

Two programs that compute the same function in floating point never agree exactly, and how far they may differ depends on the function.
So eager is the yardstick: it is run as it is and on inputs and parameters moved by one rounding, and an answer is wrong if it is
further from the reference than FACTOR times the furthest of these, plus FLOOR of the tensor's size.

The gradient of a ReLU or of a maximum jumps where rounding decides a tie, and in a model of a million ReLUs some run meets one
that none of eager's runs has met. So what is too far is asked again at neighbours of the inputs (`Yardstick.persists`): there a
tie falls another way, and a wrong number is as wrong.
"""
from __future__ import annotations

import copy
from contextlib import nullcontext

import torch

FACTOR = 4.0
FLOOR = {torch.float32: 1e-5, torch.bfloat16: 1e-3}            # of a tensor's largest element
ROUNDING = {torch.float32: 2.0 ** -24, torch.bfloat16: 2.0 ** -9}
HUGE = 1e30                                                    # masks are filled with the lowest number of a dtype


def leaves(value, path="output", depth=0):
    """(path, leaf) for every tensor and number inside an output: containers, dataclasses, caches."""
    if isinstance(value, torch.Tensor) or value is None or isinstance(value, (bool, int, float, str)):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}", depth + 1)
    elif isinstance(value, (tuple, list)):
        for i, item in enumerate(value):
            yield from leaves(item, f"{path}[{i}]", depth + 1)
    elif hasattr(value, "__dict__") and depth < 6 and not callable(value) and "Config" not in type(value).__name__:
        for key, item in vars(value).items():
            yield from leaves(item, f"{path}.{key}", depth + 1)
    else:
        yield path, type(value).__name__


def loss_of(output):
    """The model's loss if it computes one, else the mean square of what it answers."""
    found = dict(leaves(output))
    for name in ("output.loss", "output[1]"):
        value = found.get(name)
        if isinstance(value, torch.Tensor) and value.dim() == 0 and value.requires_grad:
            return value
    terms = [v.to(torch.promote_types(v.dtype, torch.float32)).square().mean() for v in found.values()
             if isinstance(v, torch.Tensor) and v.requires_grad and v.numel()]
    return sum(terms)


class Bench:
    """A model on a device, how it is run, and its state before a run.

    device: "cpu" or "cuda"; dtype: float32, or bfloat16 for autocast; training: forward and backward, else a forward without
    gradients."""

    def __init__(self, model, device: str, dtype: torch.dtype, training: bool):
        self.model, self.device, self.dtype, self.training = model.to(device).train(training), device, dtype, training
        self.buffers, self.exact = [b.clone() for b in self.model.buffers()], None

    def autocast(self):
        return torch.autocast(self.device, torch.bfloat16) if self.dtype == torch.bfloat16 else nullcontext()

    def step(self, call, inputs):
        """One timed unit of work. Answers the output and the loss (None without training)."""
        args, kwargs = inputs
        if not self.training:
            with torch.no_grad(), self.autocast():
                return call(*args, **kwargs), None
        self.model.zero_grad(set_to_none=True)
        with self.autocast():
            output = call(*args, **kwargs)
        loss = loss_of(output)
        loss.backward()
        return output, loss

    def answers(self, call, inputs) -> dict:
        """All that a step leaves behind, by name; the state is afterwards as it was before."""
        torch.manual_seed(1)
        output, loss = self.step(call, inputs)
        found = {path: v.detach().clone() if isinstance(v, torch.Tensor) else v for path, v in leaves(output)}
        if self.training:
            found["loss"] = loss.detach().clone()
            found.update((f"gradient of {n}", None if p.grad is None else p.grad.clone()) for n, p in self.model.named_parameters())
            self.model.zero_grad(set_to_none=True)
        found.update((f"buffer {n}", b.clone()) for n, b in self.model.named_buffers())
        self.restore()
        return found

    def restore(self):
        with torch.no_grad():
            for b, before in zip(self.model.buffers(), self.buffers):
                b.copy_(before)

    def inputs(self, made, dtype=None):
        """made: (args, kwargs) on the CPU. Tensors on the device, floats in a dtype."""
        def move(value):
            if not isinstance(value, torch.Tensor):
                return value
            return value.to(self.device, dtype if value.is_floating_point() else None)
        args, kwargs = made
        return tuple(map(move, args)), {k: move(v) for k, v in kwargs.items()}

    def reference(self, made) -> tuple[dict, torch.dtype]:
        """The answers in float64 without autocast; of a model with operators that lack it, in float32. The copy is made at the first
        call: a model that has run may keep tensors that cannot be copied."""
        for dtype in (torch.float64, torch.float32) if self.exact is None else (self.exact.dtype,):
            try:
                torch.set_default_dtype(dtype)
                if self.exact is None or self.exact.dtype != dtype:
                    self.exact = Bench(copy.deepcopy(self.model).to(dtype), self.device, dtype, self.training)
                return self.exact.answers(self.exact.model, self.exact.inputs(made, dtype)), dtype
            except (RuntimeError, NotImplementedError) as error:
                if dtype == torch.float32 or isinstance(error, torch.OutOfMemoryError):
                    raise
            finally:
                torch.set_default_dtype(torch.float32)

    def moved(self, call, made, seed: int) -> dict:
        """The answers for inputs and parameters that are each moved by at most one rounding."""
        generator = torch.Generator(self.device).manual_seed(seed)

        def move(t):
            if not isinstance(t, torch.Tensor) or not t.is_floating_point():
                return t
            noise = torch.rand(t.shape, generator=generator, device=t.device) * 2 - 1
            return t * (1 + ROUNDING[self.dtype] * noise)

        args, kwargs = self.inputs(made)
        kept = [p.detach().clone() for p in self.model.parameters()]
        try:
            with torch.no_grad():
                for p in self.model.parameters():
                    p.copy_(move(p))
            return self.answers(call, (tuple(map(move, args)), {k: move(v) for k, v in kwargs.items()}))
        finally:
            with torch.no_grad():
                for p, value in zip(self.model.parameters(), kept):
                    p.copy_(value)


def distance(got: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """float64 [2]: the largest and the root mean square difference. Equal infinities and NaNs do not differ."""
    got, exact = got.double(), exact.double()
    same = (got == exact) | (got.isnan() & exact.isnan()) | ((got.abs() > HUGE) & (exact.abs() > HUGE) & (got.sign() == exact.sign()))
    difference = torch.where(same, 0.0, (got - exact).abs()).nan_to_num(torch.inf, torch.inf)
    return torch.stack((difference.max(), difference.square().mean().sqrt())) if difference.numel() else difference.new_zeros(2)


class Yardstick:
    """What is right for one set of inputs: the reference, and how far eager is from it."""

    def __init__(self, bench: Bench, made, shared=nullcontext):
        """shared: makes the context in which each run of the model uses the device."""
        self.bench, self.made, self.runs, self.shared, self.ratio = bench, made, 0, shared, 0.0
        with shared():
            self.exact, dtype = bench.reference(made)
        self.dtype = str(dtype).removeprefix("torch.")
        with shared():
            self.eager = bench.answers(bench.model, bench.inputs(made))
        self.tensors = [n for n, v in self.eager.items() if isinstance(v, torch.Tensor) and isinstance(self.exact.get(n), torch.Tensor)]
        self.errors = self.distances(self.eager)
        sizes = torch.stack([self.size(self.exact[n]) for n in self.tensors]).cpu()
        gradients = [i for i, n in enumerate(self.tensors) if n.startswith("gradient")]
        if gradients:                     # a gradient that is zero but for rounding is measured by those that are not
            sizes[gradients] = sizes[gradients].maximum(1e-2 * sizes[gradients].median())
        self.floor = FLOOR[bench.dtype] * sizes
        self.add()

    @staticmethod
    def size(t):
        t = t.double().abs()
        t = t[t < HUGE]
        return t.max() if t.numel() else t.new_zeros(())

    def distances(self, answers: dict) -> torch.Tensor:
        """float64 [tensors, 2]"""
        return torch.stack([distance(answers[n], self.exact[n]) for n in self.tensors]).cpu()

    def add(self, more: int = 1):
        """Measure eager on more neighbours of the inputs."""
        for _ in range(more):
            self.runs += 1
            with self.shared():
                answers = self.bench.moved(self.bench.model, self.made, self.runs)
            self.errors = self.errors.maximum(self.distances(answers))

    def judge(self, answers: dict, extra=(3, 6)) -> tuple[float, str]:
        """(how many times what is allowed, of what): right if at most 1. Answers of another make-up than eager's: infinite.
        Before they are found wrong, eager is measured on `extra` more neighbours.

        `self.ratio` becomes the largest error in terms of eager's, whatever the floor (root mean squares)."""
        if answers.keys() != self.eager.keys():
            return float("inf"), f"names {sorted(answers.keys() ^ self.eager.keys())[:4]}"
        for n, value in self.eager.items():
            other = answers[n]
            if isinstance(value, torch.Tensor) != isinstance(other, torch.Tensor):
                return float("inf"), f"{n}: {type(other).__name__} instead of {type(value).__name__}"
            if not isinstance(value, torch.Tensor):
                if value != other and not (isinstance(value, float) and value == value):
                    return float("inf"), f"{n}: {other!r} instead of {value!r}"
            elif value.shape != other.shape or value.dtype != other.dtype:
                return float("inf"), f"{n}: {other.dtype} {list(other.shape)} instead of {value.dtype} {list(value.shape)}"
        found = self.distances(answers)
        for more in (0, *extra):
            self.add(more)
            allowed = FACTOR * self.errors + self.floor[:, None]
            times = torch.where(found > 0, found / allowed, 0.0).amax(1)
            self.ratio = torch.where(found[:, 1] > 1e-2 * self.floor, found[:, 1] / self.errors[:, 1], 0.0).max().item()
            worst = int(times.argmax())
            if times[worst] <= 1:
                break
        error, own = found[worst, 0].item(), self.errors[worst, 0].item()
        return times[worst].item(), f"{self.tensors[worst]}: {error:.2g} from the reference, eager {own:.2g}"

    def persists(self, call) -> bool:
        """Whether `call`, whose answers are too far from the reference, gives such answers in two of four neighbours of the inputs,
        too. If it gives right ones when it is called again, that was no tie."""
        with self.shared():
            again = self.bench.answers(call, self.bench.inputs(self.made))
            found = [self.bench.moved(call, self.made, seed) for seed in range(101, 105)]
        return self.judge(again, extra=())[0] <= 1 or sum(self.judge(answers, extra=())[0] > 1 for answers in found) > 1
