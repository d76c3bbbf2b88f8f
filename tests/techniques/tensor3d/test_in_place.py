"""Claim: residual blocks that add in place train on a grid as on one process, at the predicted peak."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.ranks import run_ranks
from tests.techniques.tensor3d.cases import Case, Trained
from tests.techniques.tensor3d.test_tensor3d import Grid, as_predicted, run, same


class Residual(nn.Module):
    """A basic block: its shortcut is split over a grid where its last convolution is whole."""

    def __init__(self, n: int, out: int, norm: Any) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(n, out, 3, padding=1, bias=False), nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.first, self.second, self.relu = norm(out), norm(out), nn.ReLU(inplace=True)
        self.shortcut = None if n == out else nn.Sequential(nn.Conv2d(n, out, 1, bias=False), norm(out))

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.two(self.relu(self.first(self.one(x)))))
        y += x if self.shortcut is None else self.shortcut(x)
        return self.relu(y)  # type: ignore[no-any-return]


class ResNet(Trained):
    norm: Any = staticmethod(nn.BatchNorm2d)

    def __init__(self) -> None:
        super().__init__()
        # the first shortcut is split, and what it is added to is whole
        self.blocks = nn.Sequential(Residual(3, 8, self.norm), Residual(8, 16, self.norm), Residual(16, 16, self.norm))
        self.head = nn.Linear(16, 5)

    def loss(self, batch: Any) -> Tensor:
        x = self.blocks(batch).mean((2, 3))
        # a view of what is written to
        x.view(-1)[:16] += self.head.bias.sum()
        return functional.cross_entropy(self.head(x), torch.arange(len(x)) % 5)


class Groups(ResNet):
    norm = staticmethod(lambda n: nn.GroupNorm(4, n))


NETWORKS = {
    "batches": Case(ResNet, lambda: torch.randn(4, 3, 10, 9).double()),
    "groups": Case(Groups, lambda: torch.randn(4, 3, 10, 9).double()),
}
GRIDS: tuple[Grid, ...] = ((2, 1, 1), (1, 2, 1))


def on_grids(rank: int, ranks: int) -> dict[Any, Any]:
    return {(name, grid): run(case, grid, rank, ranks) for name, case in NETWORKS.items() for grid in GRIDS}


@pytest.mark.full
@pytest.mark.ranks
def test_residuals_are_added_in_place(tmp_path: Path) -> None:
    found = run_ranks(on_grids, 2, tmp_path)
    for name, case in NETWORKS.items():
        right = run(case)
        for grid in GRIDS:
            as_predicted(same([one[name, grid] for one in found], right), (name, grid))
