"""Claim: the step of a stream is profiled with the stream's first batch, which training reads first: `iter` is called
once an epoch, no batch is lost or seen twice, and the run is bit-equal to one without the strategy.
"""

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_amp import AMPStrategy
from lightning_amp.errors import PlanError
from lightning_amp.lightning.profiling.read_ahead import read_ahead
from tests.lightning.strategy.strategy_cases import trainer_of

ROWS, WIDTH = 6, 8
# Lightning's own words on streams with a length, and on several loaders of which one has none
pytestmark = pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__`", "ignore:Found .* dataloader")


class Rows(IterableDataset[Tensor]):
    """A stream that counts its passes, shuffles with torch's and Python's numbers, and is shared by workers."""

    def __init__(self, n: int | None = 4, *, draws: bool = False) -> None:
        self.n, self.draws, self.passes = n, draws, 0

    def __iter__(self) -> Iterator[Tensor]:
        self.passes += 1
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        k = first
        while self.n is None or k < self.n:
            noise = torch.rand(()).item() + random.random() if self.draws else 0.0
            yield torch.full((ROWS, WIDTH), 0.1 * k + noise)
            k += step


class Sized(Rows):
    def __len__(self) -> int:
        assert self.n is not None, "it ends"
        return self.n


class Batches:
    """A loader that is not torch's, with a state."""

    def __init__(self, n: int = 4) -> None:
        self.n, self.at, self.passes = n, 0, 0

    def __iter__(self) -> Iterator[Tensor]:
        self.passes += 1
        while self.at < self.n:
            self.at += 1
            yield torch.full((ROWS, WIDTH), 0.1 * (self.at - 1))
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Joined(DataLoader[Any]):
    """Reads other loaders, as those of scvi-tools do."""

    def __init__(self) -> None:
        self.loaders = [DataLoader(Rows(4), batch_size=None), DataLoader(Rows(2), batch_size=None)]
        super().__init__(torch.zeros(4, 1))  # type: ignore[arg-type]

    def __iter__(self) -> Any:
        return (a + b for a, b in zip(*self.loaders, strict=False))


class Once(Batches):
    """A loader that is its own iterator."""

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Tensor:
        if self.at == self.n:
            raise StopIteration
        self.at += 1
        return torch.full((ROWS, WIDTH), 0.1 * self.at)


class Sees(Callback):
    """Notes the batches on the module; no part of the profiled step."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        parts = list(batch.values()) if isinstance(batch, dict) else [batch]
        module.seen += [round(float(part.flatten()[0]), 6) for part in parts]


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = (nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(4))
        self.net = nn.Sequential(*layers, nn.Dropout(0.2))
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = list(batch.values()) if isinstance(batch, dict) else [batch]
        # the first batch of a stream is the run's: a profile may not change it
        return torch.stack([self.net(part.mul_(1.0)).square().mean() for part in parts]).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())


def fitted(loader: Any, strategy: Any, val: Any = None, **options: Any) -> tuple[Net, Trainer]:
    torch.manual_seed(1)
    random.seed(1)
    options = {"max_epochs": 2, "max_steps": -1, "callbacks": [Sees()], **options}
    module, trainer = Net(), trainer_of(strategy, **options)
    trainer.fit(module, loader, val)
    return module, trainer


STREAMS: dict[str, Callable[[], Any]] = {
    "without a length": lambda: DataLoader(Rows(), batch_size=None),
    "with a length": lambda: DataLoader(Sized(), batch_size=None),
    "samples": lambda: DataLoader(Rows(), batch_size=2),
    "random": lambda: DataLoader(Rows(draws=True), batch_size=None),
    "random, with a length": lambda: DataLoader(Sized(draws=True), batch_size=None),
    "workers": lambda: DataLoader(Rows(draws=True), batch_size=None, num_workers=2),
    "workers that stay": lambda: DataLoader(Rows(draws=True), batch_size=None, num_workers=1, persistent_workers=True),
    "joined": Joined,
    "not torch's": Batches,
    "its own iterator": Once,
    "two": lambda: {"a": DataLoader(Rows(), batch_size=None), "b": Batches(3)},
}


@pytest.mark.parametrize("name", STREAMS)
def test_training_is_bit_equal_and_the_step_is_counted(name: str) -> None:
    loader = STREAMS[name]()
    plain, _ = fitted(STREAMS[name](), "auto")
    found, trainer = fitted(loader, AMPStrategy())
    assert found.seen == plain.seen
    assert len(found.seen) >= 4
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), plain.parameters(), strict=True))
    strategy: Any = trainer.strategy
    assert strategy.plan.uncounted == ""
    assert strategy.plan.predicted_peak_bytes > 0
    if name == "not torch's":
        assert type(loader) is Batches
        # Lightning iterates loaders that are not torch's once more, to check that it can
        assert loader.passes == 2


def test_an_endless_stream_within_a_budget_and_limited_epochs() -> None:
    plain, trainer = fitted(DataLoader(Rows(None), batch_size=None), AMPStrategy(), max_steps=5, max_epochs=-1)
    assert plain.seen == [0.0, 0.1, 0.2, 0.3, 0.4]
    strategy: Any = trainer.strategy
    budget = strategy.plan.predicted_peak_bytes
    found, trainer = fitted(
        DataLoader(Rows(None), batch_size=None), AMPStrategy(device_memory=f"{budget}B"), limit_train_batches=3
    )
    assert found.seen == [0.0, 0.1, 0.2] * 2
    strategy = trainer.strategy
    assert strategy.plan.fits


def test_a_stream_that_was_refused_loses_nothing() -> None:
    loader = DataLoader(Rows(), batch_size=None)
    with pytest.raises(PlanError):
        fitted(loader, AMPStrategy(device_memory="1KiB"))
    found, _ = fitted(loader, AMPStrategy(), max_epochs=1)
    assert found.seen == [0.0, 0.1, 0.2, 0.3]
    assert loader.dataset.passes == 1  # type: ignore[attr-defined]
    # a loader that nothing was trained with still gives everything
    with pytest.raises(PlanError):
        fitted(loader, AMPStrategy(device_memory="1KiB"))
    assert len(list(loader)) == len(list(loader)) == 4
    assert type(loader) is DataLoader


class Validated(Net):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


def test_the_same_loader_for_training_and_validation(monkeypatch: Any) -> None:
    monkeypatch.setitem(globals(), "Net", Validated)
    found, _ = fitted(loader := DataLoader(Rows(), batch_size=None), AMPStrategy(), loader, max_epochs=1)
    assert found.seen == [0.0, 0.1, 0.2, 0.3]


class Saves(Net):
    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == 2:
            self.trainer.save_checkpoint(self.path)


def test_a_run_that_is_resumed_goes_on_where_the_loader_was(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(Saves, "path", tmp_path / "a.ckpt", raising=False)
    trainer_of("auto", max_steps=-1).fit(Saves(), Batches())
    seen = []
    for strategy in ("auto", AMPStrategy()):
        module, trainer = Net(), trainer_of(strategy, max_epochs=2, max_steps=-1, callbacks=[Sees()])
        trainer.fit(module, loader := Batches(), ckpt_path=tmp_path / "a.ckpt", weights_only=False)
        seen.append(module.seen)
        assert loader.at == 0
    assert seen[0] == seen[1]
    assert seen[0][0] > 0.0


def test_the_state_of_a_loader_is_that_of_training() -> None:
    loader = Batches()

    class Asks(Net):
        def on_train_start(self) -> None:
            self.state = loader.state_dict()

    states = []
    for strategy in ("auto", AMPStrategy()):
        module, trainer = Asks(), trainer_of(strategy, max_epochs=1, max_steps=-1)
        trainer.fit(module, loader)
        states.append(module.state)
    assert states[0] == states[1]


def test_a_generator_is_left_alone() -> None:
    found, trainer = fitted((batch for batch in list(Batches())), AMPStrategy(), max_epochs=1)
    strategy: Any = trainer.strategy
    assert "a 'generator'" in strategy.plan.uncounted
    assert len(found.seen) == 4


def test_a_copy_of_a_loader_reads_for_itself() -> None:
    loader = Batches()
    read_ahead(loader)
    copied = copy.deepcopy(loader)
    assert [float(batch[0, 0]) for batch in loader] == [float(batch[0, 0]) for batch in Batches()]
    assert len(list(copied)) == 3
