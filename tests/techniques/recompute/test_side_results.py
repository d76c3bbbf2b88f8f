"""Claim: what recomputed blocks leave in attributes, and no loss uses, is held for one step, and is in the predicted
peak.
"""

import pytest
import torch
from torch import Tensor, nn

from tests.odd_modules.collection.blocks import DIM, Plain
from tests.odd_modules.collection.state import SideLoss
from tests.odd_modules.test_whole_fit import fitted, rows
from tests.optimised import Optimised

pytestmark = pytest.mark.filterwarnings("ignore")


class InTuple(SideLoss):
    """Leaves it in a container that is made anew."""

    sides: tuple[Tensor, list[Tensor]]

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        self.sides = self.side, [self.side * 2]
        return found


class Unused(Optimised, by=torch.optim.Adam):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.ModuleList([kind(), Plain(), Plain(), kind()])

    def loss(self, batch: Tensor) -> Tensor:
        x = batch
        for block in self.net:
            x = block(x)
        return x.square().mean()


@pytest.mark.parametrize("kind", [SideLoss, InTuple])
@pytest.mark.parametrize("budget", [450_000, 400_000, 345_000])
def test_a_fit_takes_what_its_plan_says(kind: type[nn.Module], budget: int) -> None:
    plan, peaks = fitted(Unused(kind), rows((300, DIM)), budget=f"{budget}B")
    assert plan.strategies == ("recompute",)
    assert plan.predicted_peak_bytes <= budget
    assert peaks["training"] == pytest.approx(plan.predicted_peak_bytes, abs=100)


class Reads(SideLoss):
    """Reads what it has left in the step before, without its graph."""

    def forward(self, x: Tensor) -> Tensor:
        seen = self.side.detach() if hasattr(self, "side") else 0
        return super().forward(x) + seen


def test_a_block_that_reads_what_it_has_left_trains_the_same_numbers() -> None:
    numbers = []
    for budget in ("64MiB", "400000B"):
        module = Unused(Reads)
        plan, _ = fitted(module, rows((300, DIM)), budget=budget)
        numbers.append([p.detach().clone() for p in module.parameters()])
    assert plan.strategies == ("recompute",)
    assert all(map(torch.equal, *numbers))
