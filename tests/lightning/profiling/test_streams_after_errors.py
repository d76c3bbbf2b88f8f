"""Claim: what a look at the data has drawn is taken back also where the data raise an error."""

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from lightning_amp.errors import DataError
from lightning_amp.lightning.profiling import loaders
from lightning_amp.lightning.profiling.loaders import example_batch
from lightning_amp.lightning.steps.cells import OwnCells
from tests.lightning.strategy.strategy_cases import same


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
