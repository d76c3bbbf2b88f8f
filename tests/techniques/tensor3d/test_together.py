"""Claim: recomputed blocks, batch normalisation in them, checkpoints in parts, and mixed precision go together with
`tensor3d`, on four ranks as on one.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_amp.planning.plan.plan import Plan
from tests.ranks import run_ranks
from tests.techniques.tensor3d.cases import CASES, Case, Trained
from tests.techniques.tensor3d.test_tensor3d import Grid, run


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.one, self.norm = nn.Conv1d(width, 2 * width, 3, padding=1, bias=False), nn.BatchNorm1d(2 * width)
        self.depth = nn.Conv1d(2 * width, 2 * width, 5, padding=2, groups=2 * width, bias=False)
        self.two = nn.Conv1d(2 * width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = functional.silu(self.norm(self.one(x)))
        return x + self.two(self.depth(h).tanh())


class Residuals(Trained):
    """Blocks with running statistics, which run again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Conv1d(2, 6, 3), nn.Sequential(*[Residual(6) for _ in range(3)])

    def loss(self, batch: Any) -> Tensor:
        return (self.blocks(self.first(batch)).mean(-1) - 1).square().mean()  # type: ignore[no-any-return]


RESIDUALS = Case(Residuals, lambda: torch.randn(4, 2, 21).double())
AGAIN: dict[str, tuple[Case, list[Grid]]] = {
    "gpt": (CASES["gpt"], [(2, 2, 1)]),
    "residuals": (RESIDUALS, [(2, 1, 2), (1, 2, 1)]),
}


def on_ranks(rank: int, ranks: int) -> dict[Any, Any]:
    given = {"strategies": ["tensor3d", "recompute"]}
    return {
        (name, grid): run(case, grid, rank, ranks, options=given)
        for name, (case, grids) in AGAIN.items()
        for grid in grids
    }


@pytest.mark.ranks
def test_recomputed_blocks_train_as_on_one_process(tmp_path: Path) -> None:
    """With their predicted peak; running statistics are those of all rows, on every rank."""
    found = run_ranks(on_ranks, 4, tmp_path)
    for name, (case, grids) in AGAIN.items():
        right = run(case)
        for grid in grids:
            losses = torch.stack([one[name, grid]["losses"] for one in found]).mean(0)
            torch.testing.assert_close(losses, right["losses"], rtol=1e-10, atol=0, msg=f"{name} {grid}")
            for one in found:
                assert one[name, grid]["valid"] == pytest.approx(right["valid"], rel=1e-10)
                torch.testing.assert_close(one[name, grid]["state"], right["state"], rtol=1e-10, atol=1e-10)
            plan = Plan.from_json(found[0][name, grid]["plan"])
            assert "recompute" in plan.strategies
            peak = max(one[name, grid]["peak"] for one in found)
            assert peak == pytest.approx(plan.predicted_peak_bytes, rel=0.05), (name, grid)
