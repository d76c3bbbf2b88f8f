"""Claim: `lightning_amp.plan(module, batch)` plans any module without a run, in the words of the module, and answers
what Lightning's batch-size finder would.
"""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

import lightning_amp
from lightning_amp.errors import AmpError, DataError, ModelError, PlanError
from tests.planning.modules.test_plan_step import Deep

SHAPE = "512x32"


class Late(Deep):
    """Its layers are made when a fit begins."""

    def __init__(self) -> None:
        pl.LightningModule.__init__(self)
        self.blocks = None  # type: ignore[assignment]

    def configure_model(self) -> None:
        if self.blocks is None:
            self.blocks = Deep().blocks


@pytest.fixture(scope="module")
def whole() -> Any:
    return lightning_amp.plan(Deep(), SHAPE)


@pytest.fixture(scope="module")
def lean(whole: Any) -> Any:
    return lightning_amp.plan(Deep(), SHAPE, device_memory=int(0.6 * whole.plan.predicted_peak_bytes))


def test_a_module_and_a_batch_are_planned(whole: Any, lean: Any) -> None:
    assert (whole.plan.strategies, whole.plan.fits, whole.plan.batch_size) == ((), None, 512)
    assert whole.plan.predicted_peak_bytes == whole.profile.peak_bytes
    assert lean.plan.strategies == ("recompute",)
    assert lean.plan.fits
    # chunks, stages and replay are looked for, which a profile alone does not allow
    assert {"recompute", "chunk", "replay"} <= lean.plan.diagnosis.helps.keys()
    assert lightning_amp.Plan.from_json(lean.plan.to_json()) == lean.plan


def test_it_prints_in_the_words_of_the_module(whole: Any, lean: Any) -> None:
    text = str(lean)
    assert max(map(len, text.splitlines())) <= 80
    assert text.startswith("Deep on 1 device\n")
    # repeated modules and their tensors are one row
    assert "blocks.*.* (12 x Linear)" in text
    assert "6 x [512, 128] float32  activations  blocks.*.1: gelu" in text
    words = " ".join(text.split())
    assert "plan recompute of blocks.0 ... blocks." in words
    assert "per device (fits) predicted step" in words
    assert "at the rates of one CPU core" in text
    assert "fsdp" in whole.plan.diagnosis.helps
    assert "nothing to install" in str(whole)
    assert f"<pre>{text[:10]}" in lean._repr_html_()
    assert "does NOT fit" in str(lightning_amp.plan(Deep(), "4x32", device_memory=1000))


def test_the_largest_batch_fits_with_the_plan_and_one_more_does_not(lean: Any) -> None:
    budget = lean.plan.budget_bytes
    for strategies in ("S1", "recompute"):
        n = lightning_amp.plan(Deep(), SHAPE, device_memory=budget, strategies=strategies).largest_batch()
        assert (n > 512) is (strategies == "recompute")
        for more, fits in ((0, True), (1, False)):
            found = lightning_amp.plan(Deep(), SHAPE, device_memory=budget, strategies=strategies, batch_size=n + more)
            assert found.plan.fits is fits


@pytest.mark.release
def test_the_batch_fits_on_the_fewest_devices_and_on_one_less_it_does_not() -> None:
    # parameters are most of it
    small = lightning_amp.plan(Deep(), "2x32")
    budget = int(0.6 * small.plan.predicted_peak_bytes)
    n = lightning_amp.plan(Deep(), "2x32", device_memory=budget).fewest_devices()
    assert n is not None
    assert n > 1
    for devices, fits in ((n, True), (n - 1, False)):
        assert lightning_amp.plan(Deep(), "2x32", device_memory=budget, devices=devices).plan.fits is fits
    tight = lightning_amp.plan(Deep(), "2x32", device_memory=1000)
    assert tight.fewest_devices() is None
    assert tight.largest_batch() == 0


def test_what_cannot_be_planned_or_answered_is_refused(whole: Any) -> None:
    for question in (whole.largest_batch, whole.fewest_devices):
        with pytest.raises(PlanError, match="requires a plan with one budget, found none; give device_memory='24GiB'"):
            question()
    with pytest.raises(ModelError, match="cannot plan a 'Linear' and a batch; give a LightningModule"):
        lightning_amp.plan(nn.Linear(2, 2), SHAPE)  # type: ignore[call-overload]
    with pytest.raises(PlanError, match="node_devices was given with a module and a batch"):
        lightning_amp.plan(Deep(), SHAPE, node_devices=2)  # type: ignore[call-overload]
    with pytest.raises(ModelError, match=r"makes layers in .* call them before: module.configure_model\(\)"):
        lightning_amp.plan(Late(), SHAPE)
    made = Late()
    made.configure_model()
    assert lightning_amp.plan(made, SHAPE).plan == whole.plan
    with pytest.raises(AmpError, match="its training step fails with .*mat1 and mat2 shapes cannot be multiplied"):
        lightning_amp.plan(Deep(), "4x5")


def test_batches_are_made_of_their_shapes() -> None:
    from lightning_amp.data.batch import batch_of_shapes

    one, pair = batch_of_shapes("4x3"), batch_of_shapes("4x3x2, 4:int64")
    assert isinstance(one, Tensor)
    assert (one.shape, one.dtype) == ((4, 3), torch.float32)
    assert torch.equal(one, batch_of_shapes("4x3"))  # type: ignore[arg-type]
    assert isinstance(pair, tuple)
    assert [(tuple(part.shape), part.dtype) for part in pair] == [((4, 3, 2), torch.float32), ((4,), torch.int64)]
    (alone,) = batch_of_shapes("4x3,")
    assert torch.equal(alone, one)  # type: ignore[arg-type]
    named = batch_of_shapes("ids=4x3:int32,mask=4:bool")
    assert isinstance(named, dict)
    assert [(name, part.dtype) for name, part in named.items()] == [("ids", torch.int32), ("mask", torch.bool)]
    for text in ("", "4x", "0x3", "4x3:int65", "4x3,,", "a=4,5", "a=4,a=5", "four"):
        with pytest.raises(DataError, match="the shapes of a batch are"):
            batch_of_shapes(text)
