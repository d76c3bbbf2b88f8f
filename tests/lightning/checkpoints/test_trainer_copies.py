"""Claim: a Trainer can be deep-copied and saved while it fits, and can save once the ranks of a fit are gone."""

import subprocess
import sys
from copy import deepcopy
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader

from lightning_amp.lightning.strategy.strategy import AMPStrategy
from tests.any_module import QUIET
from tests.lightning.strategy.model_axis_cases import Maps, loader_of, trainer_of
from tests.ranks import run_ranks

OPTIONS: dict[int, dict[str, Any]] = {1: {}, 2: {"strategies": "S2,S3", "model_parallel_size": 2}}

SAVES = """\
import sys
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
import lightning_amp

if __name__ == "__main__":
    for name in sys.argv[2:]:
        trainer = Trainer(
            strategy=name, accelerator="cpu", devices=2, max_steps=2, limit_val_batches=0, logger=False,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        )
        module = BoringModel()
        before = module.layer.weight.clone()
        trainer.fit(module)
        trainer.save_checkpoint(sys.argv[1])
        saved = torch.load(sys.argv[1])["state_dict"]
        assert not torch.equal(before, module.layer.weight), "trained"
        assert all(torch.equal(saved[name], value) for name, value in module.state_dict().items())
        print("saved after", name)
"""


class Copies(Callback):
    """Copies the Trainer at every turn, and ends the copies' runs."""

    def __init__(self) -> None:
        self.copies = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        copy = deepcopy(trainer)
        assert copy.lightning_module is not pl_module
        copy.strategy._remove_installed()  # type: ignore[attr-defined]
        self.copies += 1

    on_train_batch_end = on_train_end = on_train_start  # type: ignore[assignment]


def trained(rank: int, ranks: int) -> dict[bool, Any]:
    """Parameters after a fit, by whether the Trainer was copied in it."""
    found = {}
    for copied in (False, True):
        callbacks = [Copies()] if copied else []
        trainer = trainer_of(rank, ranks, AMPStrategy(**OPTIONS[ranks]), max_epochs=1, callbacks=callbacks)
        seed_everything(7)
        module = Maps()
        trainer.fit(module, loader_of(rank, ranks))
        found[copied] = {name: value.detach().clone() for name, value in module.state_dict().items()}
        if copied:
            assert callbacks[0].copies > 2
            deepcopy(trainer)
    return found


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", OPTIONS)
def test_a_trainer_can_be_copied_during_a_fit_which_does_not_notice(ranks: int, tmp_path: Path) -> None:
    for found in run_ranks(trained, ranks, tmp_path):
        assert all(torch.equal(found[True][name], value) for name, value in found[False].items())


class Saves(Callback):
    """Saves the Trainer itself."""

    def __init__(self) -> None:
        self.saved: list[Trainer] = []

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        file = BytesIO()
        torch.save(trainer, file)
        file.seek(0)
        self.saved.append(torch.load(file, weights_only=False))


def test_a_trainer_can_be_saved_during_a_fit_and_after_it() -> None:
    saves, module = Saves(), BoringModel()
    trainer = Trainer(strategy="amp", accelerator="cpu", devices=1, max_steps=1, callbacks=[saves], **QUIET)
    trainer.fit(module, DataLoader(torch.ones(2, 32)))  # type: ignore[arg-type]
    saves.on_train_batch_end(trainer)
    assert len(saves.saved) == 2
    for found in saves.saved:
        assert isinstance(found.strategy, AMPStrategy)
        assert found.global_step == 1
        assert torch.equal(found.lightning_module.layer.weight, module.layer.weight)
        assert isinstance(found.strategy._lightning_optimizers[0], LightningOptimizer)


@pytest.mark.exhaustive
@pytest.mark.release
def test_a_checkpoint_can_be_saved_where_the_ranks_were_processes_of_the_fit(tmp_path: Path) -> None:
    script = tmp_path / "saves.py"
    script.write_text(SAVES)
    names = ["amp_spawn", "amp_notebook"]
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "last.ckpt"), *names],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert [line for line in done.stdout.splitlines() if line.startswith("saved")] == [
        f"saved after {name}" for name in names
    ]
