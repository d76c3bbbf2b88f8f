"""Claim: a plan that is predicted to fit never ends in a step with OverBudget: with exactly the bytes that it predicts
three batches are trained, on every rank, and what it predicts is close to what the second of them takes. With one byte
less there is another plan, of which the same is true, or a refusal before anything is trained.
"""

from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_amp.errors import PlanError
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from tests.any_module import Meter, make
from tests.each import BEFORE_A_RELEASE
from tests.lightning.strategy.any_module_cases import Batches, fitted
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks

PLENTY = 10**13
TIGHT = 1e-3
SIZES: dict[str, dict[str, int]] = {"gene_transformer": {"cells": 4, "length": 24}}


class Chain(pl.LightningModule):
    """Of layers with small gradients, which are copied into one buffer to be averaged; nothing else takes as much."""

    def __init__(self, *, by_hand: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = not by_hand
        self.first, self.last = nn.Linear(300, 300), nn.Linear(300, 300)
        self.blocks = nn.Sequential(*(nn.Linear(300, 300) for _ in range(3)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        loss = F.mse_loss(self.last(F.relu(self.blocks(F.relu(self.first(batch))))), batch)
        self.log("loss", loss)
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def module_of(name: str) -> tuple[pl.LightningModule, Any]:
    if name.startswith("chain"):
        return Chain(by_hand=name == "chain by hand"), torch.rand(4, 300)
    return make(name, **SIZES.get(name, {}))


def kept(rank: int, ranks: int, name: str, sets: tuple[str, ...], options: dict[str, Any]) -> dict[str, Any]:
    """What became of the plan of each set of strategies with the bytes that it predicts, and with one less."""

    def trained(strategies: str, budget: int) -> tuple[int, int]:
        module, batch = module_of(name)
        meter, data = Meter(options.get("accumulate_grad_batches", 1)), Batches(batch, 4 if options else 3)
        run = fitted(
            module,
            DataLoader(data, batch_size=None),
            AMPStrategy(device_memory=budget, strategies=strategies),
            rank=rank,
            ranks=ranks,
            max_steps=-1,
            use_distributed_sampler=False,
            callbacks=[meter],
            **options,
        )
        return run["plan"].predicted_peak_bytes, meter.live.peak

    found = {}
    for strategies in sets:
        predicted, _ = trained(strategies, PLENTY)
        exactly = trained(strategies, predicted)
        less = None
        with suppress(PlanError):
            less = trained(strategies, exactly[0] - 1)
        found[strategies] = exactly, less
    return found


BY_RANKS = {1: ("S1", "S1,recompute"), 2: ("S1", "S1,recompute", "S1,fsdp", "S1,fsdp,recompute")}


# each of these has failed
@pytest.mark.parametrize(
    ("name", "ranks", "options"),
    [
        ("cnn", 1, {}),
        ("wide_mlp", 1, {}),
        ("chain by hand", 2, {}),
        pytest.param("chain", 2, {"accumulate_grad_batches": 2}, marks=BEFORE_A_RELEASE),
        pytest.param("gene_transformer", 1, {}, marks=pytest.mark.full),
    ],
)
def test_what_is_predicted_to_fit_is_trained(name: str, ranks: int, options: dict[str, Any], tmp_path: Path) -> None:
    sets = ("S1,chunk",) if name == "gene_transformer" else BY_RANKS[ranks]
    found = run_ranks(kept, ranks, tmp_path, name, sets, options, timeout=400)
    for strategies in sets:
        rows = [one[strategies] for one in found]
        for k in (0, 1):
            if rows[0][k] is None:
                continue
            predicted, measured = rows[0][k][0], max(row[k][1] for row in rows)
            assert measured <= predicted, (strategies, k)
            # the walk of fsdp holds the first block until the end, for its inputs may have no gradient
            near = 0.05 if "fsdp" in strategies else TIGHT
            assert predicted <= (1 + near) * measured, (strategies, k)
