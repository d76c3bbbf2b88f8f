"""Claim: `lightning_amp.plan` takes what `lightning_amp.profile` gives, of a module too; both print as reports."""

import pickle
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

import lightning_amp
from lightning_amp.errors import ModelError, PlanError
from lightning_amp.footprint.profile_module import profile_module


class Deep(pl.LightningModule):
    """Blocks of which each keeps much."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(6)]
        self.blocks = nn.Sequential(*blocks)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.blocks(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


@pytest.fixture(scope="module")
def profile() -> Any:
    return lightning_amp.profile(Deep(), torch.randn(512, 32))


def test_a_modules_profile_is_planned(profile: Any) -> None:
    as_it_is = lightning_amp.plan(profile)
    assert (as_it_is.strategies, as_it_is.rules, as_it_is.fits) == ((), (), None)
    assert as_it_is.predicted_peak_bytes == profile.peak_bytes
    budget = int(0.6 * profile.peak_bytes)
    within = lightning_amp.plan(profile, device_memory=budget)
    assert within.fits
    assert within.strategies == ("recompute",)
    assert within.batch_size == 512
    assert within.predicted_peak_bytes <= budget
    two = lightning_amp.plan(profile, devices=2, strategies="fsdp")
    assert two.strategies == ("S1", "fsdp")
    assert two.predicted_peak_bytes < lightning_amp.plan(profile, devices=2).predicted_peak_bytes
    assert lightning_amp.plan(profile, device_memory=1000).fits is False
    assert lightning_amp.Plan.from_json(within.to_json()) == within
    assert lightning_amp.plan(pickle.loads(pickle.dumps(profile)), device_memory=budget) == within


def test_what_cannot_be_profiled_or_planned_is_refused(profile: Any) -> None:
    with pytest.raises(ModelError, match=r"'Deep' requires a batch, an example .*profile\(module, batch\)"):
        lightning_amp.profile(Deep())
    with pytest.raises(PlanError, match="cannot plan a 'ModuleProfile'; pass a module and a batch"):
        lightning_amp.plan(profile_module(Deep(), torch.randn(4, 32)))
    with pytest.raises(PlanError, match="cannot plan a 'Deep'; pass"):
        lightning_amp.plan(Deep())  # type: ignore[call-overload]
    with pytest.raises(PlanError, match="batch_size was given with the profile of a module's step"):
        lightning_amp.plan(profile, batch_size=4)
    with pytest.raises(PlanError, match="chunk is not possible: the blocks were not looked at"):
        lightning_amp.plan(profile, strategies="chunk", device_memory="1MiB")


class Skips(Deep):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int:
        return -1


def test_a_step_that_is_not_run_has_no_profile() -> None:
    """It had a peak of 0 bytes."""
    for module, batch in ((Deep(), None), (Skips(), torch.randn(4, 32))):
        with pytest.raises(ModelError, match="whose training_step was not called"):
            profile_module(module, batch)
