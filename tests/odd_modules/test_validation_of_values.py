"""Claim: a validation that reads values, the Trainer or several loaders is planned to the byte, and leaves no trace."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_amp.errors import DoesNotFitError
from lightning_amp.footprint.bounded_step import StepOverBudget
from tests.odd_modules.test_whole_fit import Net, fitted, near, rows

pytestmark = pytest.mark.filterwarnings("ignore")


class Logs(Net):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.log("loss", loss.item())
        if not torch.isfinite(loss):
            raise ValueError("the loss is not finite")


class Masked(Net):
    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        found = self.net(batch)
        labelled = batch[:, 0] > 0
        self.log("loss", F.cross_entropy(found[labelled], batch[labelled, 1].gt(0).long()))


class Lists(Net):
    """Takes arrays and lists of values, and remembers them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = list[Any]()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        found = self.net(batch).argmax(-1)
        self.seen.append(found.numpy().sum())
        self.log("most", float(max(found.tolist())))


class Generates(Net):
    """Makes rows until a value says stop."""

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        while len(batch) < 4000:
            batch = torch.cat([batch, self.net(batch[-256:])])
            if len(batch) > 2500 and batch.sum() > -1e9:
                break
        self.log("loss", batch.mean())


KINDS = (Logs, Masked, Lists, Generates)


@pytest.mark.parametrize("kind", KINDS)
def test_a_validation_that_reads_values_is_counted(kind: type[Net]) -> None:
    module = kind()
    plan, peaks = fitted(module, rows((32, 16)), rows((1024, 16), n=2), budget="64MiB")
    assert plan.validation is not None
    assert plan.predicted_peak_bytes == plan.validation.peak_bytes == near(peaks["validation"])
    assert sum("the validation was counted for some batches, whose values" in note for note in plan.notes) == 1
    # two batches of the sanity check, and two of the validation
    assert len(getattr(module, "seen", range(4))) == 4
    assert all(name not in vars(Tensor) for name in ("tolist", "numpy"))


@pytest.mark.long
@pytest.mark.parametrize("kind", [Logs, Masked, Lists])
def test_it_runs_in_chunks_or_is_refused(kind: type[Net]) -> None:
    plan, peaks = fitted(kind(), rows((32, 16)), rows((1024, 16), n=2), budget="500KiB")
    assert plan.validation is not None
    assert plan.validation.rules
    assert plan.predicted_peak_bytes == near(peaks["validation"])
    assert peaks["validation"] <= 500 * 1024
    with pytest.raises(DoesNotFitError, match=r"in chunks, .* largest validation batch that fits is about \d+"):
        fitted(kind(), rows((32, 16)), rows((1024, 16), n=2), budget="200KiB")


def test_every_validation_batch_is_held_where_values_decide() -> None:
    class Few(Net):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.log("loss", self.net(batch[batch[:, 0] > (1.5 if batch_idx < 5 else -9.0)]).mean())

    with pytest.raises(StepOverBudget, match="values decide its shapes"):
        fitted(Few(), rows((32, 16)), rows((1024, 16), n=6), budget="220KiB", num_sanity_val_steps=0)


def test_all_loaders_that_are_read_in_turn_are_counted() -> None:
    class Two(Net):
        def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
            self.log("loss", self.loss(batch) if dataloader_idx else batch.sum())

    loaders = [rows((2048, 16), n=2), rows((1024, 16), n=2)]
    plan, peaks = fitted(Two(), rows((32, 16)), loaders, budget="64MiB")
    assert plan.validation is not None
    assert plan.validation.loader == 1
    assert plan.predicted_peak_bytes == near(peaks["validation"])
    chunked, within = fitted(Two(), rows((32, 16)), loaders, budget="500KiB")
    assert chunked.predicted_peak_bytes == near(within["validation"])
    with pytest.raises(DoesNotFitError, match=r"that fits is about \d+, of 1,024 \(loader 1\)"):
        fitted(Two(), rows((32, 16)), loaders, budget="200KiB")


def test_a_validation_step_may_read_the_trainer_and_the_logger() -> None:
    class Reads(Net):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            assert not self.trainer.training
            if not self.trainer.sanity_checking and self.logger is not None:
                self.logger.log_metrics({"loss": float(self.loss(batch))}, step=self.global_step)
            self.log("loss", self.loss(batch) * self.trainer.world_size)

    plan, peaks = fitted(Reads(), rows((32, 16)), rows((1024, 16), n=2), budget="64MiB")
    assert plan.predicted_peak_bytes == near(peaks["validation"])
