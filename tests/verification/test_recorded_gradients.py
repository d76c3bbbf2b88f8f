"""Claim: verify records the gradients of every rank, and what it records counts in no budget."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from torch.utils.data import DataLoader

from tests.any_module import QUIET, Meter
from tests.verification import verify_cases as cases
from tests.verification.verify_cases import cells, verified


@pytest.mark.ranks
def test_gradients_of_stages_are_those_of_one_process(tmp_path: Path) -> None:
    """A rank has those of its stage only; ranks that joined in unlike broadcasts waited for each other."""
    found = verified(tmp_path, {"pipeline": (cases.Stages(), cells(8), {"strategies": "pipeline"})})["pipeline"]
    assert found.ok, str(found)
    (gradients,) = (row for row in found.rows if row.quantity == "gradients, step 1")
    assert gradients.errors.keys() == dict(cases.Stages().named_parameters()).keys()


@pytest.mark.ranks
def test_recorded_gradients_are_no_part_of_a_budget(tmp_path: Path) -> None:
    """The second step was counted with those of the first, and stopped."""
    batch, meter = torch.randn(512, 64), Meter()
    trainer = Trainer(accelerator="cpu", devices=1, max_steps=2, precision="64-true", callbacks=[meter], **QUIET)
    # of one of two ranks
    trainer.fit(cases.Wide().double(), DataLoader([batch[:256].double()] * 2, batch_size=None))  # type: ignore[arg-type]
    parameters = 8 * sum(p.numel() for p in cases.Wide().parameters())
    budget = meter.live.peak + parameters // 4
    found = verified(tmp_path, {"budget": (cases.Wide(), batch, {"device_memory": budget})})["budget"]
    assert found.ok, str(found)
    assert "recompute" not in found.strategies, "it fits as it is"
