"""Claim: where values decide what a batch takes, the plan is for the rank whose first batch takes most."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_amp import profile
from lightning_amp.errors import AmpError, ModelError
from lightning_amp.footprint.bounded_step import StepOverBudget
from lightning_amp.lightning.profiling.step_of_module import StepOfModule
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from tests.lightning.strategy.strategy_cases import trainer_of
from tests.odd_modules.test_steps_that_read_values import Block, N
from tests.optimised import Optimised
from tests.ranks import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore::UserWarning")]
ROWS = 512


class Selects(Optimised, by=torch.optim.Adam):
    """Computes with the rows whose first entry is positive."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(6))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = batch[batch[:, 0] > 0]
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def batch_of(rows: int) -> Tensor:
    found = torch.randn(ROWS, N, generator=torch.Generator().manual_seed(rows))
    found[:, 0] = -1
    found[:rows, 0] = 1
    return found


FEW, ALL = batch_of(ROWS // 4), batch_of(ROWS)


def fitted(rank: int, ranks: int, budget: int, fails: bool = False) -> Any:
    """Rank 0 has the small batches, rank 1 the large ones."""

    def refuses(*_: Any) -> Any:
        raise ModelError("it cannot be counted here")

    module = Selects()
    trainer = trainer_of(AMPStrategy(device_memory=f"{budget}B"), rank=rank, ranks=ranks, max_steps=2)
    with patch.object(StepOfModule, "count_own", refuses if fails and rank == 1 else StepOfModule.count_own):
        try:
            trainer.fit(module, DataLoader([FEW, ALL] * 4, batch_size=None))
        except (AmpError, StepOverBudget) as error:
            return type(error).__name__, str(error)
    plan = trainer.strategy.plan
    return plan.strategies, plan.predicted_peak_bytes, plan.notes


def test_the_plan_is_for_the_rank_whose_batch_takes_most(tmp_path: Path) -> None:
    few, every = (profile(Selects(), batch).peak_bytes for batch in (FEW, ALL))
    budget = int(0.7 * every)
    assert few < budget
    found = run_ranks(fitted, 2, tmp_path, budget)
    assert found[0] == found[1], found
    strategies, peak, notes = found[0]
    assert len(strategies) > 1
    assert few < peak <= budget
    assert any("planned for the first batch of rank 1" in note for note in notes)


def test_a_budget_that_no_plan_fits_is_refused_on_all_ranks(tmp_path: Path) -> None:
    few = profile(Selects(), FEW).peak_bytes
    assert [found[0] for found in run_ranks(fitted, 2, tmp_path, few // 8)] == ["DoesNotFitError"] * 2


def test_a_rank_that_cannot_count_does_not_leave_the_others_waiting(tmp_path: Path) -> None:
    every = profile(Selects(), ALL).peak_bytes
    for _, _, notes in run_ranks(fitted, 2, tmp_path, 2 * every, True):
        assert any(
            "not counted on every rank" in note and "rank 1: it cannot be counted here" in note for note in notes
        )
