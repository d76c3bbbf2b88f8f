"""Claim: a validation batch that is larger than those before runs within the budget, in chunks where it needs them, or
the run ends before it, with a word; its numbers are those without a budget.
"""

import weakref
from itertools import islice
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_amp.errors import DoesNotFitError
from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from tests.lightning.strategy.strategy_cases import trainer_of
from tests.optimised import Optimised
from tests.techniques.chunk.small_blocks import Attention

WIDTH, LONGEST = 8, 128
pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:The number of training batches")


class Reader(Optimised, by=torch.optim.Adam, lr=0.01):
    """Attention over sequences; notes the losses of its validation, and the bytes of each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block, self.head = Attention(WIDTH).double(), nn.Linear(WIDTH, 1).double()
        self.most, self.losses = dict[int, int](), list[Tensor]()

    def loss(self, batch: Tensor) -> Tensor:
        return self.head(self.block(batch)).square().mean()  # type: ignore[no-any-return]

    def validation_step(self, batch: Tensor, batch_idx: int, dataloader_idx: int = 0) -> None:
        with LiveBytes() as live:
            loss = self.loss(batch)
        self.most[batch.shape[1]] = max(self.most.get(batch.shape[1], 0), live.peak)
        self.losses.append(loss.detach().clone())


class Unread(IterableDataset[Tensor]):
    """Batches of one length that cannot be read ahead."""

    def __init__(self, length: int) -> None:
        self._batches = iter(batches(length, length))

    def __iter__(self) -> Any:
        return islice(self._batches, 1)


def batches(*lengths: int) -> list[Tensor]:
    draws = torch.Generator().manual_seed(1)
    return [torch.randn(1, n, WIDTH, generator=draws, dtype=torch.float64) for n in lengths]


class Counts(DummyLogger):
    """Counts how often hyperparameters are logged."""

    n_logged = 0

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        self.n_logged += 1


class Alive(Callback):
    """Counts validation batches that are alive while a later epoch trains."""

    n_alive = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.n_alive += sum(one() is not None for one in VALIDATED)


VALIDATED = list["weakref.ref[Tensor]"]()


def run(strategy: Any, *lengths: int, val: Any = None, **options: Any) -> tuple[Reader, Any]:
    """Train with short batches, and validate with batches of the given lengths after each of two epochs."""
    module = Reader()
    trainer = trainer_of(strategy, max_epochs=2, num_sanity_val_steps=0, **options)
    trainer.fit(module, loader(batches(16, 16)), loader(batches(*lengths)) if val is None else val)
    return module, getattr(trainer.strategy, "plan", None)


def loader(data: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_size=None)


def needed() -> int:
    """Bytes of the longest batch without chunks."""
    _, plan = run(AMPStrategy(device_memory="1GiB"), LONGEST)
    assert plan.validation is not None
    assert not plan.validation.rules
    return plan.validation.peak_bytes


@pytest.mark.parametrize("lengths", [(16, LONGEST, 32, LONGEST), (LONGEST, 16), (16, 48, 96, LONGEST)])
def test_a_longer_validation_batch_runs_in_chunks(lengths: tuple[int, ...]) -> None:
    plain, _ = run("auto", *lengths)
    budget = int(0.6 * needed())
    module, plan = run(AMPStrategy(device_memory=budget), *lengths)
    for one, other in zip(module.losses, plain.losses, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)
    assert plan.validation.rules
    assert plan.predicted_peak_bytes == plan.validation.peak_bytes <= budget
    assert module.most[LONGEST] < 0.7 * plain.most[LONGEST]


class Drawn(Unread):
    """Batches of falling and rising lengths, which nothing else holds."""

    def __iter__(self) -> Any:
        for n in (16, 96, 48, LONGEST):
            (batch,) = batches(n)
            VALIDATED.append(weakref.ref(batch))
            yield batch


def test_larger_batches_leave_nothing_behind() -> None:
    VALIDATED.clear()
    logger, alive = Counts(), Alive()
    val = loader(Drawn(16))
    _, plan = run(AMPStrategy(device_memory=int(0.6 * needed())), val=val, logger=logger, callbacks=[alive])
    assert plan.validation.rules
    assert VALIDATED
    # the first one stays, with which the validation was counted late
    assert alive.n_alive <= 2
    assert logger.n_logged <= 2


def test_a_longer_validation_batch_that_needs_no_chunks_is_predicted() -> None:
    _, plan = run(AMPStrategy(device_memory="1GiB"), 16, LONGEST)
    assert plan.validation.peak_bytes < needed(), "far below the budget nothing is counted"
    _, plan = run(AMPStrategy(device_memory=int(1.05 * needed())), 16, LONGEST)
    assert plan.predicted_peak_bytes == plan.validation.peak_bytes == needed()
    assert not plan.validation.rules


def test_a_validation_batch_that_fits_in_no_chunks_ends_the_run_before_it() -> None:
    with pytest.raises(DoesNotFitError, match="with batch 1, which is larger than those before") as error:
        run(AMPStrategy(device_memory="128KiB"), 16, 8 * LONGEST)
    assert "validation_step" in str(error.value)


def test_a_loader_that_cannot_be_read_ahead_is_counted_when_its_first_batch_comes() -> None:
    _, plan = run(AMPStrategy(device_memory=int(0.6 * needed())), val=[loader(batches(16)), loader(Unread(LONGEST))])
    assert plan.validation.rules
    assert plan.validation.loader == 1
