"""Claim: what a Trainer does around a step goes together with `sequence`: accumulation, clipping, lower precision,
averaged weights, manual optimisation, checkpoints that another number of ranks goes on from.
"""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_amp import AMPStrategy
from tests.lightning.strategy.strategy_cases import RunningRanks
from tests.ranks import run_ranks
from tests.techniques.sequence.cases import CASES, Text
from tests.techniques.sequence.test_sequence import QUIET

OPTIONS: dict[str, dict[str, Any]] = {
    "accumulated and clipped": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "precision": "64-true"},
    "clipped by value": {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value", "precision": "64-true"},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "averaged weights": {"precision": "64-true", "averages": True},
    "by hand": {"precision": "64-true", "by_hand": True},
    "fsdp, by hand": {"precision": "64-true", "by_hand": True, "strategies": "sequence,fsdp"},
}  # fmt: skip


class ByHand(Text):
    """Two backward passes and a step, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        optimizer.zero_grad()  # type: ignore[union-attr]
        for scale in (1.0, 0.5):
            loss = scale * self.loss(batch)
            self.manual_backward(loss)
        optimizer.step()  # type: ignore[union-attr]
        return loss.detach()


def trained(
    rank: int, ranks: int, *, ckpt: str | None = None, epochs: int = 1, save: str = "", **options: Any
) -> dict[str, Tensor]:
    warnings.simplefilter("ignore")
    seed_everything(5, verbose=False)
    batches = [CASES["text"].batch() for _ in range(4)]
    given: dict[str, Any] = {"accelerator": "cpu", "max_epochs": epochs, "use_distributed_sampler": False, "devices": 1}
    if options.pop("averages", False):
        given["callbacks"] = [EMAWeightAveraging(decay=0.5)]
    strategies = options.pop("strategies", "sequence")
    module = ByHand() if options.pop("by_hand", False) else Text()
    if options["precision"] == "64-true":
        # Lightning loads a checkpoint before it converts a module
        module = module.double()
    if ranks > 1:
        given["devices"], given["plugins"] = ranks, [RunningRanks(rank, ranks)]
        given["strategy"] = AMPStrategy(strategies=strategies, model_parallel_size=ranks, **CASES["text"].options)
    trainer = Trainer(**QUIET | given | options)
    trainer.fit(module, DataLoader(batches, batch_size=None), ckpt_path=ckpt)  # type: ignore[arg-type]
    if save:
        trainer.save_checkpoint(save)
    return {name: value.clone() for name, value in module.state_dict().items()}


def on_ranks(rank: int, ranks: int, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {name: trained(rank, ranks, **options) for name, options in OPTIONS.items()}
    found["saved"] = trained(rank, ranks, save=f"{folder}/two.ckpt", precision="64-true", strategies="sequence,fsdp")
    return found


def going_on(rank: int, ranks: int, folder: str) -> dict[str, Tensor]:
    return trained(rank, ranks, ckpt=f"{folder}/two.ckpt", epochs=2, precision="64-true", strategies="sequence,fsdp")


@pytest.mark.ranks
def test_what_a_trainer_does_around_a_step_is_exact(tmp_path: Path) -> None:
    found = run_ranks(on_ranks, 2, tmp_path, str(tmp_path))
    for name, options in OPTIONS.items():
        right, near = trained(0, 1, **options), 2e-2 if "bf16" in name else 1e-10
        for rank in found:
            for key, value in right.items():
                torch.testing.assert_close(rank[name][key], value, rtol=near, atol=near)
    right = trained(0, 1, epochs=2, precision="64-true")
    for ranks in (1, 3):
        found = run_ranks(going_on, ranks, tmp_path, str(tmp_path))
        for key, value in right.items():
            torch.testing.assert_close(found[-1][key], value, rtol=1e-10, atol=1e-12)
