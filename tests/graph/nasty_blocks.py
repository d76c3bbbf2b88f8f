"""Blocks that a capture would get wrong, and some that look so."""

import functools
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Base(nn.Module):
    """A layer, and a call counter that a test may use."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.unused = nn.Linear(4, 4), nn.Linear(4, 4)
        self.flag, self.calls = True, 0
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        return self.layer(x).relu()


def of(name: str, forward: Any) -> Any:
    return type(name, (Base,), {"forward": forward, "__module__": __name__})


Flag = of("Flag", lambda m, x: m.layer(x) if m.flag else x * 2)
InPlace = of("InPlace", lambda m, x: m.layer(x.mul_(2)))
Shared = of("Shared", lambda m, x: m.layer(nn.functional.gelu(m.layer(x))))
ByValue = of("ByValue", lambda m, x: m.layer(x) if x.sum() > 0 else x)
Chance = of("Chance", lambda m, x: m.layer(x) if random.random() < 0.5 else x)


Checkpointed = of("Checkpointed", lambda m, x: checkpoint(m.layer, x, use_reentrant=False))


class Buffer(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.layer(x) * self.count


class Nested(Base):
    def forward(self, x: Tensor, *, more: dict[str, Tensor] | None = None) -> Any:
        y = self.layer(x)
        return {"a": (y, [y.sum(), None, 3]), "b": None if more is None else more["y"] * y}


class Counting(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x) * self.calls


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Custom(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(Twice.apply(self.layer(x)))


class Outside(Base):
    def __init__(self) -> None:
        super().__init__()
        self.scale = [torch.full((4,), 2.0, dtype=torch.float64)]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale[0].to(x.dtype)


class Hooked(Base):
    def __init__(self) -> None:
        super().__init__()
        self.layer.register_forward_hook(lambda module, args, result: result + 1)


class TensorHook(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        y.register_hook(lambda grad: 2 * grad)
        return y.relu()


def replaced(block: Base, x: Tensor) -> Tensor:
    block.count = block.count + 1
    return block.layer(x) * block.count


def made(block: Base, x: Tensor) -> Tensor:
    block.register_buffer("mask", torch.ones(4))
    return block.layer(x) * block.mask


def seeded(block: Base, x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return nn.functional.dropout(block.layer(x))


def goes_back(block: Base, x: Tensor) -> Tensor:
    block.layer(x).sum().backward()
    return block.layer(x)


Replaces, Makes, Seeded, GoesBack = (of(f.__name__, f) for f in (replaced, made, seeded, goes_back))
Leaf = of("Leaf", lambda m, x: m.layer(x).detach().requires_grad_())


class HasTo(Base):
    def __init__(self) -> None:
        super().__init__()
        self.to = nn.Linear(4, 4)


class Compiled(Base):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.compile(nn.Linear(4, 4), backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def x_of(rows: int = 3) -> Tensor:
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()


class Settings:
    """An object that is no module: what HuggingFace's blocks hold as `config`, or get as a cache."""

    def __init__(self) -> None:
        self.scale, self.inner, self.seen = 2.0, {"deep": [self]}, np.zeros(2)


@functools.lru_cache(maxsize=1)
def cached_mask(size: int) -> Tensor:
    return torch.arange(size) % 2 == 0


Masked = of("Masked", lambda m, x: m.layer(x).masked_fill(cached_mask(4), 0.0))
