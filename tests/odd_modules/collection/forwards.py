"""Blocks whose forward is unusual: branches, results in containers, what it reads, makes and sets besides tensors."""

import functools
import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.odd_modules.collection.blocks import DIM, of_blocks
from tests.odd_modules.collection.row import IN_EVERY_PASS, UNCAPTURED, WRONG


class Base(nn.Module):
    """A layer, and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.unused = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.flag = True
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        return self.layer(x).relu()


def of(name: str, forward: Any) -> Any:
    return type(name, (Base,), {"forward": forward, "__module__": __name__})


Flag = of("Flag", lambda m, x: m.layer(x) if m.flag else x * 2)
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


class Outside(Base):
    def __init__(self) -> None:
        super().__init__()
        self.scale = [torch.full((DIM,), 2.0, dtype=torch.float64)]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale[0].to(x.dtype)


class TensorHook(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        y.register_hook(lambda grad: 2 * grad)
        return y.relu()


def made(block: Base, x: Tensor) -> Tensor:
    block.register_buffer("mask", torch.ones(DIM))
    return block.layer(x) * block.mask


def seeded(block: Base, x: Tensor) -> Tensor:
    torch.manual_seed(3)
    return nn.functional.dropout(block.layer(x))


def goes_back(block: Base, x: Tensor) -> Tensor:
    block.layer(x.detach()).sum().backward()
    return block.layer(x)


Makes, Seeded, GoesBack = (of(f.__name__, f) for f in (made, seeded, goes_back))
Leaf = of("Leaf", lambda m, x: m.layer(x).detach().requires_grad_())


class HasTo(Base):
    def __init__(self) -> None:
        super().__init__()
        self.to = nn.Linear(DIM, DIM)


@functools.lru_cache(maxsize=1)
def cached_mask(size: int) -> Tensor:
    return torch.arange(size) % 2 == 0


Masked = of("Masked", lambda m, x: m.layer(x).masked_fill(cached_mask(DIM), 0.0))


def masked(remembers: bool) -> Any:
    """A block, and whether its function remembers a tensor at first: nothing of another run."""
    cached_mask.cache_clear()
    if remembers:
        cached_mask(DIM)
    return Masked()


FORWARDS = {
    "a branch on an attribute": of_blocks(Flag),
    "a layer that is called twice": of_blocks(Shared),
    "a branch on the sum of the input": of_blocks(ByValue, {"chunk": "its forward cannot run on fake tensors",
        "pipeline": WRONG},
        by_rows=True),
    "a branch by chance": of_blocks(Chance, {"chunk": "draws from Python's or NumPy's random numbers"}, drawn=True),
    "a checkpoint in a block": of_blocks(Checkpointed, {"chunk": "runs under torch.utils.checkpoint by itself",
        "sequence": "'untyped_storage' in"}),
    "a buffer that counts": of_blocks(Buffer, {"pipeline": IN_EVERY_PASS}),
    "a tensor in a list": of_blocks(Outside, {"chunk": UNCAPTURED}),
    "a hook on a tensor": of_blocks(TensorHook, {"chunk": "calls 'register_hook' of a tensor",
        "pipeline": "registers a hook on a tensor"}),
    "a buffer that is made in a pass": of_blocks(Makes, {"chunk": "replaces its parameter or buffer 'mask'",
        "pipeline": "changed the parameters or buffers"}),
    "a seed that is set in a pass": of_blocks(Seeded, {"chunk": "sets the seed of torch's random numbers"}, drawn=True),
    "a backward pass in a pass": of_blocks(GoesBack, {"recompute": "it starts a backward pass",
        "chunk": "calls 'backward' of a tensor",
        "tensor3d": "started a backward pass",
        **dict.fromkeys(("fsdp", "pipeline"), "the step takes gradients while it runs")}),
    "a result that is a leaf": of_blocks(Leaf, {"chunk": "calls 'requires_grad_' of a tensor"}),
    "an attribute named to": of_blocks(HasTo, {"chunk": "it has an attribute 'to'"}),
    "a function that remembers": of_blocks(lambda: masked(False)),
    "a function that has remembered": of_blocks(lambda: masked(True), {"chunk": UNCAPTURED}),
}  # fmt: skip
