"""Claim: the predicted peak of a rank under fsdp is that of the meter on a real second step, within 5 %.

Parameters dominate, activations dominate, and a stack of blocks; on 2 and on 4 ranks.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_amp.footprint.profile_module import profile_module
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.parallel.fsdp.units import units_of
from lightning_amp.planning.modules.fsdp_bytes import fsdp_peak_bytes
from tests.any_module import Meter, make
from tests.lightning.strategy.strategy_cases import RunningRanks
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks
NAMES = ("wide_mlp", "gene_transformer", "stack")
QUIET = dict.fromkeys(
    ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False
)


class Stack(LightningModule):
    """Equal blocks between layers of the root's."""

    def __init__(self, dim: int = 64, layers: int = 6) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, dim), nn.Linear(dim, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim)) for _ in range(layers)
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.first(batch)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


def module_and_batch(name: str) -> tuple[LightningModule, Any]:
    if name == "stack":
        torch.manual_seed(0)
        return Stack(), torch.randn(16, 32)
    return make(name)


def measured(
    rank: int, ranks: int, names: Sequence[str] = NAMES, *, fsdp_ranks: int | None = None
) -> dict[str, int]:
    """Bytes of every module's second step; a body for ranks."""
    found = {}
    for name in names:
        module, batch = module_and_batch(name)
        meter = Meter()
        trainer = Trainer(
            accelerator="cpu",
            devices=ranks,
            strategy=AMPStrategy(strategies="fsdp", fsdp_ranks=fsdp_ranks),
            plugins=[RunningRanks(rank, ranks)],
            use_distributed_sampler=False,
            max_epochs=1,
            callbacks=[meter],
            **QUIET,
        )
        trainer.fit(module, DataLoader([batch] * 2, batch_size=None))  # type: ignore[arg-type]
        found[name] = meter.live.peak
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_the_predicted_peak_is_the_measured_one(tmp_path: Path, ranks: int) -> None:
    peaks = run_ranks(measured, ranks, tmp_path, timeout=240)
    for name in NAMES:
        module, batch = module_and_batch(name)
        profile, units = profile_module(module, batch), units_of(module)
        predicted = fsdp_peak_bytes(profile, units, ranks)
        most = max(found[name] for found in peaks)
        assert abs(predicted - most) <= 0.05 * most, f"{name}: predicted {predicted:,}, measured {most:,}"
        assert most < profile.peak_bytes, "less than on one device"
