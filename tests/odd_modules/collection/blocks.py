"""Modules of odd blocks, with a plain one between them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.odd_modules.collection.row import Row, features
from tests.optimised import Optimised

DIM = 6


class Plain(nn.Module):
    """What the others add something to."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(DIM, 8 * DIM), nn.Linear(8 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.tanh(self.a(x)))


def of(name: str, forward: Callable[[Any, Tensor], Tensor]) -> Any:
    return type(name, (Plain,), {"forward": forward, "__module__": __name__})


class OfBlocks(Optimised, by=torch.optim.SGD, lr=0.1, momentum=0.9):
    """A layer, whose gradients show those of the blocks' inputs, then the blocks."""

    def __init__(self, *kinds: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList([kind() for kind in kinds])

    def loss(self, batch: Tensor) -> Tensor:
        x = self.first(batch)
        for block in self.blocks:
            x = block(x + 0)
        return x.square().mean() + sum(getattr(block, "side", 0) for block in self.blocks)


def of_blocks(
    kind: Callable[[], nn.Module], says: dict[str, str] | None = None, *, by_rows: bool = False, drawn: bool = False
) -> Row:
    return Row(lambda: OfBlocks(kind, Plain, kind), features(DIM), says or {}, by_rows or drawn, drawn)
