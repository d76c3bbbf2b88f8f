"""Claim: code that leaves out a branch for fake tensors is counted in the branch of the first batch, and other batches
are held to the budget.
"""

import pytest
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.utils.data import DataLoader

from lightning_amp import AMPStrategy, profile
from lightning_amp.footprint.bounded_step import StepOverBudget
from lightning_amp.footprint.copies.batch_values import AskedFakeTensor
from lightning_amp.footprint.copies.copy_batch import fake_batch
from lightning_amp.footprint.copies.fake_copy import without_values
from lightning_amp.footprint.copies.quick_fakes import QuickFakes
from lightning_amp.footprint.live_bytes import LiveBytes
from tests.any_module import QUIET, Meter
from tests.optimised import Optimised

Batch = dict[str, Tensor]


class Masked(Optimised, by=torch.optim.Adam):
    """Layers over samples with a mask, which is not applied where it is known to hide nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, mask = batch["x"], batch["mask"].bool()
        # as transformers' `is_tracing` does
        hidden = isinstance(mask, torch._subclasses.FakeTensor) or not mask.all()
        for layer in self.layers:
            x = layer(x).sigmoid()
            if hidden:
                x = x * mask[:, None] * x.cos()
        return x.square().mean()


class Compared(Masked):
    """Compares the mask with a number that the step makes, which a count keeps to read other batches."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        shown = batch["mask"] == torch.tensor([1])
        return super().training_step({**batch, "mask": shown}, batch_idx)


def batch_of(*, padded: bool) -> Batch:
    mask = torch.ones(64, dtype=torch.int64)
    mask[60:] = 1 - int(padded)
    return {"x": torch.randn(64, 64), "mask": mask}


def taken(padded: bool) -> int:
    """Return the bytes of a second step."""
    module, batch = Masked(), batch_of(padded=padded)
    optimizer = torch.optim.Adam(module.parameters())
    for _ in range(2):
        meter = LiveBytes()
        meter.watch([batch, *module.parameters(), *[p.grad for p in module.parameters()]])
        meter.watch([list(state.values()) for state in optimizer.state.values()])
        with meter:
            loss = module.training_step(batch, 0)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return meter.peak


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_the_branch_of_the_first_batch_is_counted_without_values(padded: bool, dtype: torch.dtype) -> None:
    batch = batch_of(padded=padded)
    counted = profile(Masked(), {**batch, "mask": batch["mask"].to(dtype)})
    assert counted.reason == ""
    assert counted.peak_bytes == pytest.approx(taken(padded), rel=0.01)
    assert counted.reads.names == ["mask"]
    assert "reads" not in counted.to_dict()


def test_what_a_count_keeps_to_read_other_batches_is_no_part_of_a_step() -> None:
    meter, strategy = Meter(), AMPStrategy(strategies="S1", device_memory="1MiB")
    batches: DataLoader[Batch] = DataLoader([batch_of(padded=False)] * 3, batch_size=None)  # type: ignore[arg-type]
    Trainer(max_epochs=1, strategy=strategy, callbacks=[meter], **QUIET).fit(Compared(), batches)
    assert strategy.plan is not None
    assert any("values of 'mask'" in note for note in strategy.plan.notes)
    assert meter.live.peak == strategy.plan.predicted_peak_bytes


def test_only_code_outside_of_torch_that_asks_may_read_the_batch() -> None:
    fake = QuickFakes(valid=True)
    batch = fake_batch({"x": torch.randn(3), "mask": torch.ones(3, dtype=torch.bool)}, fake, None)
    with fake, without_values():
        with pytest.raises(DataDependentOutputException):
            bool(batch["mask"].all())
        # what random numbers or parameters are part of is unknown
        assert isinstance(batch["x"] * torch.rand(3), AskedFakeTensor)
        assert not isinstance(batch["mask"], AskedFakeTensor)
        assert bool(batch["mask"].all())
        assert not isinstance(torch.arange(3), AskedFakeTensor)
    assert isinstance(batch["mask"], torch._subclasses.FakeTensor)


@pytest.mark.parametrize("first", [False, True])
def test_a_later_batch_of_the_larger_branch_is_held_to_the_budget(first: bool) -> None:
    budget = int(profile(Masked(), batch_of(padded=first)).peak_bytes * 1.01)
    batches = [batch_of(padded=first), *(batch_of(padded=False) for _ in range(3)), batch_of(padded=True)]
    trainer = Trainer(max_epochs=1, strategy=AMPStrategy(strategies="S1", device_memory=budget), **QUIET)
    loader: DataLoader[Batch] = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    if first:
        trainer.fit(Masked(), loader)
        assert any("values of 'mask'" in note for note in trainer.strategy.plan.notes)  # type: ignore[attr-defined]
        return
    with pytest.raises(StepOverBudget, match="reads other values of mask"):
        trainer.fit(Masked(), loader)
    assert trainer.global_step == 4
