"""Claim: signals, warnings that are given once, and breakpoints of a profiled step are those of the run around it; what
a look at the data has drawn is taken back also where the data raise an error.
"""

import random
import signal
import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.trainer.connectors import callback_connector
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_amp._torch import FakeTensor, TorchDispatchMode
from lightning_amp.errors import DataError
from lightning_amp.lightning.profiling import loaders
from lightning_amp.lightning.profiling.loaders import example_batch
from lightning_amp.lightning.steps.cells import OwnCells
from tests.lightning.profiling.test_no_side_effects import forget_what_was_said, trainer_of
from tests.lightning.strategy.strategy_cases import same
from tests.optimised import Optimised


class Profiled(Optimised, by=torch.optim.SGD, lr=0.1):
    """Does something in its first step, which is that of the profile."""

    def __init__(self, does: Callable[[], Any]) -> None:
        super().__init__()
        self.net, self.does = nn.Linear(3, 3), does

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.does()
        return self.net(batch).sum()


class Ends(pl.Callback):
    """Knows how its run has ended."""

    def __init__(self) -> None:
        self.found: list[BaseException] = []
        self.trains = False

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.trains = True

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self.found.append(exception)


CELLS: Any = torch.ones(4, 3)


def test_an_interrupt_during_the_profile_ends_the_run_that_it_belongs_to() -> None:
    ends, before = Ends(), signal.getsignal(signal.SIGINT)
    # ignored where the tests run in the background of a shell
    signal.signal(signal.SIGINT, signal.default_int_handler)
    trainer = trainer_of(callbacks=[ends])
    try:
        with pytest.raises(SystemExit) as ended:
            trainer.fit(Profiled(partial(signal.raise_signal, signal.SIGINT)), DataLoader(CELLS, batch_size=2))
    finally:
        signal.signal(signal.SIGINT, before)
    assert ended.value.code == 130
    assert [type(one) for one in ends.found] == [KeyboardInterrupt]
    assert not ends.trains
    assert trainer.interrupted


def test_what_lightning_says_once_is_said_after_a_profile() -> None:
    class Skips(Profiled):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.log("n", 1.0, on_epoch=True)

    said = ("`training_step` returned `None`", "Trying to infer the `batch_size` from an ambiguous collection")
    forget_what_was_said()
    trainer = trainer_of()
    batches = [{"a": torch.ones(2, 3), "b": torch.ones(5)}] * 2
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer.fit(Skips(print), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    for text in said:
        assert [str(one.message)[: len(text)] for one in warned].count(text) == 1, text


def test_torchs_kernels_say_once_what_a_profile_has_met() -> None:
    class Transposes(Profiled):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.net(batch).reshape(1, 2, 3).T.sum()

    trainer = trainer_of()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        trainer.fit(Transposes(print), DataLoader(CELLS, batch_size=2))
    assert len([one for one in warned if "The use of `x.T` on tensors" in str(one.message)]) == 1


@pytest.mark.parametrize("of_data", [False, True])
def test_what_collates_a_batch_does_not_remember_the_one_of_the_profile(of_data: bool) -> None:
    class Collates:
        collated = 0

        def collate(self, cells: list[Tensor]) -> Tensor:
            self.collated += 1
            return torch.stack(cells)

        def train_dataloader(self) -> Any:
            return DataLoader(CELLS, batch_size=2, collate_fn=self.collate)

    class Model(*([] if of_data else [Collates]), Profiled):  # type: ignore[misc]
        pass

    class Data(Collates, pl.LightningDataModule):
        pass

    module, data = Model(print), Data()
    trainer = trainer_of()
    trainer.fit(module, datamodule=data if of_data else None)
    assert (data if of_data else module).collated == 2
    assert trainer.strategy.plan.diagnosis is not None, "the step was profiled"  # type: ignore[union-attr]


def test_loaders_of_a_fit_that_failed_are_not_those_of_the_next() -> None:
    class Hooked(Profiled):
        def train_dataloader(self) -> Any:
            return DataLoader(torch.zeros(4, 3), batch_size=2)

        def on_fit_start(self) -> None:
            raise ValueError("before it reads its loader")

    trainer, seen = trainer_of(), list[float]()
    with pytest.raises(ValueError, match="before it reads"):
        trainer.fit(Hooked(int))

    class Reads(Profiled):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            seen.append(float(batch.sum()))

    trainer.fit(Reads(int), DataLoader(CELLS, batch_size=2))
    assert seen == [6.0, 6.0]


def test_hooks_that_are_set_on_a_data_module_get_no_fake_tensors() -> None:
    batches: list[Any] = []

    def keep(batch: Any, dataloader_idx: int) -> Any:
        batches.append(batch)
        return batch

    data = pl.LightningDataModule()
    data.train_dataloader = lambda: DataLoader(CELLS, batch_size=2)  # type: ignore[method-assign]
    data.on_before_batch_transfer = keep  # type: ignore[method-assign]
    trainer_of().fit(Profiled(print), datamodule=data)
    assert [type(batch) for batch in batches] == [Tensor, Tensor]


def test_nobody_is_asked_in_a_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A breakpoint of a step is for the step that trains."""
    asked: list[int] = []
    monkeypatch.setattr("sys.breakpointhook", lambda: asked.append(1))
    trainer_of().fit(Profiled(breakpoint), DataLoader(CELLS, batch_size=2))
    assert len(asked) == 2


def test_who_sees_every_trainer_or_every_operator_sees_no_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Callbacks that a package adds, and a mode that is on around the fit."""
    batches: list[Any] = []

    class Adds(pl.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            batches.append(batch)

    class Sees(TorchDispatchMode):
        n_fakes = n_operators = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            self.n_operators += 1
            self.n_fakes += isinstance(result, FakeTensor)
            return result

    monkeypatch.setattr(callback_connector, "_load_external_callbacks", lambda _: [Adds()])
    trainer = trainer_of()
    with Sees() as sees:
        trainer.fit(Profiled(print), DataLoader(CELLS, batch_size=2))
    assert [type(batch) for batch in batches] == [Tensor, Tensor]
    assert sees.n_operators > 10
    assert sees.n_fakes == 0


def draw_and_fail(*_: Any) -> Any:
    torch.rand(1), np.random.rand(), random.random()
    raise ValueError("no data yet")


class Fails(Dataset[Any]):
    __getitem__ = draw_and_fail

    def __len__(self) -> int:
        return 4


class InNoOrder(Sampler[int]):
    __iter__ = draw_and_fail

    def __len__(self) -> int:
        return 4


def streams() -> tuple[Any, ...]:
    kind, numbers, *rest = np.random.get_state()
    return torch.get_rng_state(), kind, torch.from_numpy(np.array(numbers)), *rest, random.getstate()


LOOKS: dict[str, Callable[[], Any]] = {
    "an item": lambda: example_batch(DataLoader(Fails(), batch_size=2)),
    "an order": lambda: list(OwnCells(DataLoader(Fails(), sampler=InNoOrder()), num_replicas=2, rank=0)),
    "a loader": lambda: loaders._loaders(SimpleNamespace(name="train", instance=None)),
}


@pytest.mark.parametrize("look", LOOKS)
def test_streams_are_put_back(look: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaders, "request_dataloader", draw_and_fail)
    before = streams()
    with pytest.raises((DataError, ValueError), match="no data yet"):
        LOOKS[look]()
    assert same(streams(), before)
