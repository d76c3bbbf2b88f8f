"""Claim: a first step that takes other bytes than its count is told in one line, with the operator that differs; one
that takes what was counted is not, under any technique.
"""

import re
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_amp.footprint.confirm_count import StepMakes, difference
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.planning.plan.plan import Plan
from tests.odd_modules.test_whole_fit import Net, fitted, rows

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:predicted to run out")
TOLD = "the first real step takes"


def told(module: LightningModule, caplog: Any, recwarn: Any, **options: Any) -> list[str]:
    """What is said about a fit whose batches are all alike."""
    with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
        fitted(module, rows((256, 16)), **{"budget": "64MiB", **options})
    said = [str(one.message) for one in recwarn.list] + [one.getMessage() for one in caplog.records]
    return [text for text in said if TOLD in text]


class Other(Net):
    """Computes more, or less, in a run of the strategy than where it is counted."""

    def __init__(self, factor: int) -> None:
        super().__init__()
        self.factor = factor

    def loss(self, batch: Tensor) -> Tensor:
        if isinstance(self.trainer.strategy, AMPStrategy):
            wide = self.net[0](batch).repeat(self.factor, 1) if self.factor else self.net[0](batch[:8])
            return self.net[1:](wide).square().mean()
        return super().loss(batch)


MORE = r"repeat \[2048, 64\].*the count gelu \[256, 64\] of net.1"


@pytest.mark.parametrize(("factor", "words"), [(8, MORE), (0, "")])
def test_a_step_that_differs_from_its_count_is_told(factor: int, words: str, caplog: Any, recwarn: Any) -> None:
    said = told(Other(factor), caplog, recwarn)
    assert len(said) == 1
    assert ("were counted for its plan (+" in said[0]) == bool(factor)
    assert re.search(words, said[0])


class Blocks(Net):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, 64, dropout=0.1, batch_first=True, activation=nn.GELU()) for _ in range(3)
        )
        self.norm = nn.BatchNorm1d(16)

    def loss(self, batch: Tensor) -> Tensor:
        x = self.norm(batch).unflatten(0, (2, -1))
        for block in self.net:
            x = block(x)
        return x.logsumexp(-1).square().mean()


@pytest.mark.long
@pytest.mark.parametrize("share", [100, 70])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_step_as_it_was_counted_is_not_told(share: int, accumulated: int, caplog: Any, recwarn: Any) -> None:
    options: dict[str, Any] = {"accumulate_grad_batches": accumulated}
    plan: Plan = fitted(Blocks(), rows((256, 16)), budget="64MiB", **options)[0]
    budget = plan.predicted_peak_bytes * share // 100
    assert told(Blocks(), caplog, recwarn, budget=f"{budget}B", **options) == []


def test_batches_of_other_shapes_are_not_compared() -> None:
    one, other = (StepMakes.of(torch.ones(n, 2), (), [("forward", "")]) for n in (2, 3))
    assert difference(one, other, predicted=100, measured=200) == ""
    assert "the same storages" in difference(one, one, predicted=100, measured=200)
    assert difference(one, one, predicted=1000, measured=1005) == ""
