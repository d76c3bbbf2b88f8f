"""Claim: a fit stays within a named budget in all of its phases, or ends with a word: validation, late optimisers, what
batches keep, longer rows, more work later.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, StochasticWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_amp.errors import DoesNotFitError
from lightning_amp.footprint.bounded_step import StepOverBudget
from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.footprint.run.foreseen import copies_in_callbacks
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.reports.plan_report import plan_report
from tests.any_module import QUIET
from tests.lightning.strategy.strategy_cases import trainer_of
from tests.optimised import Optimised
from tests.ranks import run_ranks

pytestmark = pytest.mark.filterwarnings("ignore")


class Peaks(pl.Callback):
    """Most bytes alive of each phase, from the start of the fit."""

    def __init__(self) -> None:
        self.live, self.of, self.counts = LiveBytes(), dict[str, int](), False

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        self.live.watch([*module.parameters(), *module.buffers(), [t for _, t in copies_in_callbacks(trainer)]])
        self.live.__enter__()
        self.counts = True

    def _note(self, phase: str) -> None:
        self.of[phase] = max(self.of.get(phase, 0), self.live.peak)
        self.live.reset_peak()

    def on_train_batch_end(self, *_: Any) -> None:
        self._note("training")

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self._note("sanity check" if trainer.sanity_checking else "validation")

    def close(self) -> None:
        if self.counts:
            self.live.__exit__(None, None, None)


class Net(Optimised, by=torch.optim.Adam, lr=0.01):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 16))

    def loss(self, batch: Tensor) -> Tensor:
        return self.net(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("loss", self.loss(batch))


class Rows(Dataset[Tensor]):
    """Batches with some shapes, which do not exist before they are asked for."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        self.shapes = shapes

    def __len__(self) -> int:
        return len(self.shapes)

    def __getitem__(self, k: int) -> Tensor:
        return torch.randn(self.shapes[k], generator=torch.Generator().manual_seed(k))


def rows(*shapes: tuple[int, ...], n: int = 6) -> Any:
    """Batches with these shapes; the last one repeats."""
    return DataLoader(Rows([*shapes, *[shapes[-1]] * (n - len(shapes))]), batch_size=None)


def fitted(
    module: Any, train: Any, validation: Any = None, *, budget: str | int, callbacks: Any = (), **options: Any
) -> tuple[Plan, dict[str, int]]:
    """Fit for one epoch; return the plan and the peaks of the phases."""
    peaks, torchs = Peaks(), {"max_epochs": 1, **QUIET, **options}
    strategy = AMPStrategy(device_memory=budget)
    trainer = pl.Trainer(accelerator="cpu", devices=1, strategy=strategy, callbacks=[*callbacks, peaks], **torchs)
    try:
        trainer.fit(module, train, validation)
    finally:
        peaks.close()
    assert strategy.plan is not None
    return strategy.plan, peaks.of


def near(n_bytes: int) -> Any:
    """Logged values, of a few bytes, are in no prediction of a validation."""
    return pytest.approx(n_bytes, abs=100)


# --- validation ---


def test_a_validation_of_four_times_the_training_step_is_planned() -> None:
    """It is predicted to the byte, runs in chunks where it does not fit, and else is refused before training."""
    plan, peaks = fitted(Net(), rows((32, 16)), rows((1024, 16)), budget="64MiB")
    assert plan.validation is not None
    assert plan.predicted_peak_bytes == plan.validation.peak_bytes == near(peaks["validation"])
    assert plan.training_bytes == near(peaks["training"])
    assert peaks["validation"] > 4 * peaks["training"]
    assert plan.largest_phase == "validation_step"
    assert "(fits, in validation_step)" in plan_report(plan)
    assert Plan.from_json(plan.to_json()) == plan
    budget = peaks["validation"] * 2 // 3
    chunked, within = fitted(Net(), rows((32, 16)), rows((1024, 16)), budget=budget)
    assert chunked.validation is not None
    assert chunked.validation.rules
    assert chunked.strategies == ()
    assert chunked.predicted_peak_bytes == near(within["validation"])
    assert within["validation"] <= budget
    assert within["training"] == peaks["training"]
    assert Plan.from_json(chunked.to_json()) == chunked
    with pytest.raises(
        DoesNotFitError, match=r"validation_step is predicted to need .* in chunks, .* that fits is about \d+"
    ):
        fitted(Net(), rows((32, 16)), rows((1024, 16)), budget=peaks["training"] + 5000)


def test_the_largest_validation_batch_fits() -> None:
    class Outside(Net):
        """What takes the memory is no module's, so that it cannot run in chunks."""

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.log("loss", (batch @ batch.T).exp().sum())

    with pytest.raises(DoesNotFitError, match=r"largest validation batch that fits is (\d+), of 512") as error:
        fitted(Outside(), rows((32, 16)), rows((512, 16)), budget="300KiB")
    n = int(str(error.value).partition("that fits is ")[2].partition(",")[0])
    plan, peaks = fitted(Outside(), rows((32, 16)), rows((n, 16)), budget="300KiB")
    assert plan.predicted_peak_bytes == near(peaks["validation"])
    assert peaks["validation"] <= 300 * 1024
    with pytest.raises(DoesNotFitError):
        fitted(Outside(), rows((32, 16)), rows((n + 1, 16)), budget="300KiB")


class Stream:
    """Cannot be read ahead, for it has no attributes to note what was read."""

    __slots__ = ("rows",)

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.ones(self.rows, 16) for _ in range(3))


def test_a_validation_that_cannot_be_read_ahead_is_counted_when_its_first_batch_comes() -> None:
    class Noting(Net):
        steps = 0

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.steps += 1

    module = Noting()
    with pytest.raises(DoesNotFitError, match="It was counted with its first batch, which could not be read before"):
        fitted(module, rows((32, 16)), Stream(1024), budget="150KiB")
    assert module.steps == 0
    plan, _ = fitted(Net(), rows((32, 16)), Stream(256), budget="900KiB")
    assert plan.validation is not None
    assert plan.predicted_peak_bytes <= 900 * 1024


def test_a_validation_that_is_not_counted_is_watched() -> None:
    class Reads(Net):
        """Reads what training has logged, which there is not before."""

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            self.log("train", loss)
            return loss

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.log("loss", self.loss(batch) - self.trainer.callback_metrics["train"])

    with pytest.raises(StepOverBudget, match="allowed are 300 KiB"):
        fitted(Reads(), rows((32, 16)), rows((4096, 16)), budget="300KiB", num_sanity_val_steps=0)
    plan, _ = fitted(Reads(), rows((32, 16)), rows((64, 16)), budget="300KiB", num_sanity_val_steps=0)
    assert any("the validation is not a part of the predicted peak" in note for note in plan.notes)


# --- batches after the first ones ---


class Attention(Optimised, by=torch.optim.SGD, lr=0.01):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def loss(self, batch: Tensor) -> Tensor:
        x = self.layer(batch)
        return ((x @ x.transpose(-1, -2)).softmax(-1) @ x).square().mean()


class WorksMoreLater(Net):
    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch.repeat(32, 1) if self.global_step >= 3 else batch)


class KeepsLosses(Net):
    """Accumulates by hand: the graphs of four batches are alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization, self.kept = False, list[Tensor]()

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.kept.append(self.loss(batch))
        if len(self.kept) == 4:
            optimizer.zero_grad()
            self.manual_backward(torch.stack(self.kept).sum())
            optimizer.step()
            self.kept = []


class StepsRarely(Net):
    """Accumulates by hand: the first step is in batch 4."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch))
        if batch_idx % 4 == 3:
            # more than its state
            self.manual_backward(self.loss(batch.repeat(16, 1)))
            optimizer.step()
            optimizer.zero_grad()


LATER: dict[str, tuple[Callable[[], Any], Any, str, str]] = {
    "longer rows of as many values": (
        Attention,
        rows((32, 8, 8), (32, 8, 8), (1, 256, 8)),
        "120KiB",
        r"batch 2, which is larger than those before \(\[1, 256, 8\]",
    ),
    "more work later": (WorksMoreLater, rows((32, 16)), "300KiB", "4 batches ran before it"),
    "losses are kept": (KeepsLosses, rows((64, 16)), "280KiB", "of activations"),
    "a first step in batch 4": (StepsRarely, rows((32, 16)), "300KiB", "of activations"),
}


@pytest.mark.parametrize("name", LATER)
def test_a_later_batch_beyond_the_budget_ends_with_a_word(name: str) -> None:
    make, train, budget, words = LATER[name]
    with pytest.raises((StepOverBudget, DoesNotFitError), match=words):
        fitted(make(), train, budget=budget)
    fitted(make(), train, budget="64MiB")


# --- state that the first steps do not have ---


class StepsLate(Net):
    """Parameters are updated from batch 4 on."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        if batch_idx < 3:
            closure()
        else:
            optimizer.step(closure)


class Adversarial(Net):
    """The generator steps once in four batches, first in batch 4."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization, self.critic = False, nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for k, optimizer in enumerate(self.optimizers()):
            if k == 0 or batch_idx % 4 == 3:
                self.toggle_optimizer(optimizer)
                optimizer.zero_grad()
                self.manual_backward((-1) ** k * self.critic(self.net(batch)).mean())
                optimizer.step()
                self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.critic.parameters()), torch.optim.AdamW(self.net.parameters())


class Newton(Net, by=torch.optim.LBFGS, history_size=8, max_iter=3):
    """Its history grows over several steps."""


class Plain(Net, by=torch.optim.SGD, lr=0.01):
    """Has no state."""


LATE: dict[str, tuple[type[Net], Any, str]] = {
    "an optimiser that steps late": (StepsLate, None, "'Adam' has not stepped in the counted batches"),
    "a generator that steps late": (Adversarial, None, "'AdamW' has not stepped in the counted batches"),
    "LBFGS": (Newton, None, "its history at its longest"),
    "averaged weights": (Plain, lambda: EMAWeightAveraging(), "EMAWeightAveraging holds copies of the module"),
    "stochastic averages": (
        Plain,
        lambda: StochasticWeightAveraging(0.01, swa_epoch_start=1),
        "StochasticWeightAveraging holds copies of the module",
    ),
}


@pytest.mark.parametrize("name", LATE)
def test_state_that_comes_later_is_foreseen(name: str) -> None:
    make, callback, words = LATE[name]
    callbacks = [] if callback is None else [callback()]
    plan, peaks = fitted(make(), rows((8, 16), n=8), budget="64MiB", callbacks=callbacks, max_epochs=3)
    assert peaks["training"] == pytest.approx(plan.predicted_peak_bytes, rel=0.05)
    assert peaks["training"] <= plan.predicted_peak_bytes + 100
    assert any(words in note for note in plan.notes)
    with pytest.raises(DoesNotFitError):
        fitted(make(), rows((8, 16)), budget=f"{peaks['training'] * 9 // 10}B", callbacks=callbacks and [callback()])


def test_an_optimizer_that_cannot_be_foreseen_is_named() -> None:
    class Reads(torch.optim.Adam):
        def step(self, closure: Any = None) -> Any:
            if self.param_groups[0]["params"][0].sum().item() > 1e9:
                raise ValueError
            return super().step(closure)

    class Named(StepsLate, by=Reads):
        pass

    plan, _ = fitted(Named(), rows((8, 16), n=2), budget="64MiB")
    assert any("'Reads' has not stepped" in note and "in no count" in note for note in plan.notes)


class StepsEveryFour(StepsRarely):
    """Accumulates four batches by hand, of which two are counted."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch))
        if batch_idx % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()


def on_rank(rank: int, ranks: int) -> tuple[int, int]:
    """Predicted and measured peak under fsdp."""
    peaks, strategy = Peaks(), AMPStrategy(strategies="S1,fsdp")
    trainer = trainer_of(strategy, rank=rank, ranks=ranks, max_steps=-1, max_epochs=1, callbacks=[peaks])
    try:
        trainer.fit(StepsEveryFour(), rows((4, 16), n=16))
    finally:
        peaks.close()
    assert strategy.plan is not None
    return strategy.plan.predicted_peak_bytes, peaks.of["training"]


@pytest.mark.ranks
def test_accumulation_by_hand_under_fsdp(tmp_path: Path) -> None:
    for predicted, measured in run_ranks(on_rank, 2, tmp_path):
        assert predicted == pytest.approx(measured, rel=0.05)


def validated(rank: int, ranks: int) -> tuple[Plan, dict[str, int]]:
    """A validation that fits in chunks only."""
    peaks, strategy = Peaks(), AMPStrategy(device_memory="450KiB")
    options: dict[str, Any] = {"max_epochs": 1, "callbacks": [peaks], "use_distributed_sampler": False}
    trainer = trainer_of(strategy, rank=rank, ranks=ranks, max_steps=-1, **options)
    try:
        trainer.fit(Net(), rows((32, 16)), rows((1024, 16), n=2))
    finally:
        peaks.close()
    assert strategy.plan is not None
    return strategy.plan, peaks.of


@pytest.mark.ranks
def test_ranks_validate_in_the_same_chunks(tmp_path: Path) -> None:
    for plan, peaks in run_ranks(validated, 2, tmp_path):
        assert plan.validation is not None
        assert plan.validation.rules
        assert peaks["validation"] <= 450 * 1024
        assert plan.validation.peak_bytes == pytest.approx(peaks["validation"], rel=0.01)
