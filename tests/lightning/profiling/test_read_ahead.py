"""Claim: the step of a stream is profiled with the stream's first batch, which training reads first: `iter` is called
once an epoch, no batch is lost or seen twice, and the run is bit-equal to one without the strategy.
"""

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_amp import AMPStrategy
from lightning_amp.errors import PlanError
from lightning_amp.lightning.profiling.read_ahead import read_ahead
from lightning_amp.random_streams import drawn_between, isolated_random_streams, random_streams
from tests.lightning.profiling.stream_cases import (
    FEATURES,
    STREAMS,
    Batches,
    Net,
    Rows,
    Sees,
    Validated,
    equal_with,
    fitted,
)
from tests.lightning.strategy.strategy_cases import trainer_of

# Lightning's own words on streams with a length, on loaders of which one has none, and on one process with a group
pytestmark = pytest.mark.filterwarnings(
    "ignore:Your `IterableDataset` has `__len__`",
    "ignore:Found .* dataloader",
    "ignore:You requested to overfit",
    "ignore:It is recommended to use `self.log",
)


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda: None, []),
        (random.random, ["random"]),
        (np.random.rand, ["numpy.random"]),
        (np.random.seed, ["numpy.random"]),
        (lambda: torch.rand(1), ["torch.random"]),
    ],
)
def test_a_stream_that_has_drawn_is_named(draw: Any, name: list[str]) -> None:
    with isolated_random_streams():
        before = random_streams()
        draw()
        assert drawn_between(before, random_streams()) == name
    assert drawn_between(before, random_streams()) == []


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


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("stream", ["samples", "random", "not torch's"])
def test_with_every_feature_of_a_trainer(stream: str, feature: str) -> None:
    assert equal_with(stream, feature) == "equal"


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


def test_the_same_loader_for_training_and_validation() -> None:
    found, _ = fitted(loader := DataLoader(Rows(), batch_size=None), AMPStrategy(), loader, Validated, max_epochs=1)
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
