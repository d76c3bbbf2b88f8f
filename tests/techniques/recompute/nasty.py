"""Blocks whose second forward pass would be another than the first, if nobody looked after it."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

DIM = 6


class Plain(nn.Module):
    """What the others add something to."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.a(x)))


def of(name: str, forward: Callable[[Any, Tensor], Tensor]) -> Any:
    return type(name, (Plain,), {"forward": forward, "__module__": __name__})


Dropout = of("Dropout", lambda m, x: F.dropout(Plain.forward(m, x), 0.3, m.training) + torch.rand_like(x))
PythonRandom = of("PythonRandom", lambda m, x: Plain.forward(m, x) * random.random())
NumpyRandom = of("NumpyRandom", lambda m, x: Plain.forward(m, x) * float(np.random.rand()))
InPlaceInput = of("InPlaceInput", lambda m, x: Plain.forward(m, x.mul_(2)))


class BatchNorm(Plain):
    """Its buffers are changed by every forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))


class ZerosAtFirst(BatchNorm):
    """Its first batch leaves the mean in the buffers as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(DIM, DIM, bias=False)
        nn.init.zeros_(self.c.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.c(x))


class PowerIteration(Plain):
    """Reads a buffer, and changes it, as spectral norm does."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("u", torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.u.copy_(F.normalize(self.b.weight @ (self.b.weight.t() @ self.u) + x.mean(0), dim=0))
        return super().forward(x) * (self.u * x).sum(1, keepdim=True)


class OtherBuffer(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(DIM))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return super().forward(x - self.mean)


class Counter(Plain):
    """A branch that depends on how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) if self.calls % 2 else super().forward(torch.sin(x))


class PlainTensor(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(DIM, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        self.scale.mul_(1.1)
        return super().forward(x) * self.scale


class SideLoss(Plain):
    """Leaves a part of the loss in an attribute, as mixtures of experts do."""

    side: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.side = (self.a(x) ** 2).mean()
        return super().forward(x)


class Scale(torch.autograd.Function):
    """Keeps a tensor by autograd and another by itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.sign, ctx.factor = torch.sign(x), factor
        return x.abs() * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return grad * ctx.sign * ctx.factor + 0 * x, None


Custom = of("Custom", lambda m, x: Scale.apply(Plain.forward(m, x), 0.7))


class Frozen(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.a.requires_grad_(False)


class BackwardHook(Plain):
    """Hooks of the backward pass inside, on a module and on a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a.register_full_backward_hook(lambda module, given, got: (2 * given[0],))

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        x.register_hook(lambda grad: 3 * grad)
        return x


LOGGED: list[float] = []


class Logging(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(DIM, DIM)

    def log(self, name: str, value: Any, *_: Any, **__: Any) -> None:
        LOGGED.append(float(value))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.a(x))
        self.log("mean", x.mean().detach())
        return x


class LogsForAnother(Plain):
    """Logs by way of the module that it is part of."""

    def __init__(self) -> None:
        super().__init__()
        self.owner = [Logging()]

    def forward(self, x: Tensor) -> Tensor:
        self.owner[0].log("mean", x.mean().detach())
        return super().forward(x)


EXACT = (
    Plain, Dropout, BatchNorm, ZerosAtFirst, PowerIteration, OtherBuffer, Counter, PlainTensor, PythonRandom,
    NumpyRandom, SideLoss, Custom, Frozen, BackwardHook,
)  # fmt: skip


class Remembers(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(float(x.detach().mean()))
        return super().forward(x) * len(self.seen)


class Memory(Plain):
    class Store:
        def __init__(self) -> None:
            self.n = 0

    def __init__(self) -> None:
        super().__init__()
        self.store = self.Store()

    def forward(self, x: Tensor) -> Tensor:
        self.store.n += 1
        return super().forward(x) * self.store.n


class SlottedMemory(Memory):
    """Of an object without a dictionary."""

    @dataclass(slots=True)
    class Store:  # type: ignore[misc]
        n: int = 0


class PrivateSlot(Memory):
    """Of an object whose only slot has a private name, which Python changes."""

    class Store:  # type: ignore[misc]
        __slots__ = ("__count",)

        def __init__(self) -> None:
            self.__count = 0

        @property
        def n(self) -> int:
            return self.__count

        @n.setter
        def n(self, n: int) -> None:
            self.__count = n


class OwnGenerator(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(self.generator.random())


class OwnRandomState(OwnGenerator):
    def __init__(self) -> None:
        super().__init__()
        self.generator: Any = np.random.RandomState(0)

    def forward(self, x: Tensor) -> Tensor:
        return Plain.forward(self, x) * float(self.generator.rand())


class OwnTorchGenerator(OwnGenerator):
    """Draws nothing on fake tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.generator: Any = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        return Plain.forward(self, x) * torch.rand(x.shape, generator=self.generator, dtype=x.dtype)


class MakesGenerator(Plain):
    def forward(self, x: Tensor) -> Tensor:
        drawn = torch.rand(x.shape, generator=torch.Generator().manual_seed(3), dtype=x.dtype)
        return super().forward(x) * drawn


class ChangesParameter(Plain):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.a.weight.mul_(0.99)
        return super().forward(x)


GENERATOR = torch.Generator()
GlobalGenerator = of(
    "GlobalGenerator", lambda m, x: Plain.forward(m, x) * torch.rand(x.shape, generator=GENERATOR, dtype=x.dtype)
)
"""Draws where nobody can see it."""


class Hooked(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.a.register_forward_hook(lambda module, given, result: result * 2)


class Compiled(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.a = torch.compile(self.a, backend="eager")


class OwnForward(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.forward = self.other  # type: ignore[method-assign]

    def other(self, x: Tensor) -> Tensor:
        return x


REFUSED_AT_ONCE = {
    Hooked: "its submodule 'a' has forward_hooks, which would run twice",
    Compiled: "its submodule 'a' is compiled",
    OwnForward: "its `forward` is set on the instance",
}
REFUSED_IN_FIRST_PASS = {
    InPlaceInput: "it changes its argument 0 in place",
    Remembers: "it changes what 'seen' holds",
    Memory: "it changes what 'store' holds",
    SlottedMemory: "it changes what 'store' holds",
    PrivateSlot: "it changes what 'store' holds",
    OwnGenerator: "it changes what 'generator' holds",
    OwnRandomState: "it changes what 'generator' holds",
    ChangesParameter: "it changes 'a.weight' in place",
}
REFUSED_IN_BACKWARD = {GlobalGenerator: "its second pass gives other numbers than its first"}
