"""Claim: under `strategy="amp"` a run reads the cells of a plain run, whatever the number of ranks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Sampler

from lightning_amp import AMPStrategy
from lightning_amp.errors import DataError
from lightning_amp.lightning.steps.cells import OwnCells
from tests.lightning.conformance.cases import CELLS, STRATA, Site
from tests.lightning.conformance.data import Cells
from tests.lightning.steps.order_cases import (
    IN_ORDER,
    RANKS,
    SHUFFLED,
    dealt,
    grouped,
    read,
    resumed,
    same,
    some,
    union,
)
from tests.lightning.strategy.strategy_cases import Small, fitted
from tests.ranks import run_ranks

STAGES = ("fit", "validate", "test", "predict")
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    site = Site(strategies="", folder=tmp_path_factory.mktemp("plain"))
    found: dict[str, Any] = {name: read(site, make(CELLS)) for name, make in (IN_ORDER | SHUFFLED).items()}
    return found | {"resumed": resumed(site, CELLS)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("order")
    return run_ranks(dealt, RANKS, folder, folder, timeout=200)


@pytest.mark.ranks
@pytest.mark.parametrize("name", IN_ORDER)
def test_ranks_together_read_the_batches_of_a_plain_run(
    plain: dict[str, Any], ranks: list[dict[str, Any]], name: str
) -> None:
    # Lightning cannot put a sampler into these, in prediction every rank reads all
    stages = STAGES[: 3 if name.startswith("batches of one's own") else 4]
    for stage in stages:
        assert union([rank[name][stage] for rank in ranks]) == [sorted(step) for step in plain[name][stage]], stage
    assert all(same(rank[name]["weights"], plain[name]["weights"]) for rank in ranks)


@pytest.mark.ranks
@pytest.mark.parametrize("name", SHUFFLED)
def test_ranks_together_read_every_cell_of_a_loader_that_shuffles_once_an_epoch(
    ranks: list[dict[str, Any]], name: str
) -> None:
    steps = union([rank[name]["fit"] for rank in ranks])
    epochs = [[cell for step in part for cell in step] for part in (steps[:4], steps[4:])]
    assert [sorted(epoch) for epoch in epochs] == [list(range(32))] * 2
    assert epochs[0] != epochs[1]


@pytest.mark.ranks
def test_overfit_batches_reads_the_same_cells_in_every_epoch(ranks: list[dict[str, Any]]) -> None:
    steps = union([rank["overfit"]["fit"] for rank in ranks])
    assert steps == [list(range(8)), list(range(8, 16))] * 2


@pytest.mark.ranks
def test_a_resumed_run_goes_on_where_a_plain_one_does(plain: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    assert union([rank["resumed"] for rank in ranks]) == [sorted(step) for step in plain["resumed"]]


@pytest.mark.ranks
def test_items_that_are_batches_are_dealt_one_by_one(ranks: list[dict[str, Any]]) -> None:
    steps = union([rank["whole batches"]["fit"] for rank in ranks])
    assert steps == [list(range(8)), list(range(8, 16)), sorted([*range(16, 20)] * 2)] * 2


@pytest.mark.full
@pytest.mark.ranks
def test_a_model_group_reads_what_one_device_reads(plain: dict[str, Any], tmp_path: Path) -> None:
    """Also where rank 0 alone has drawn numbers between the epochs."""
    for found in run_ranks(grouped, RANKS, tmp_path, STRATA, timeout=200):
        for name, own in found.items():
            assert {s: own[s] for s in STAGES} == {s: plain[name][s] for s in STAGES}, name


def test_one_cell_for_two_ranks_is_read_by_both_with_a_warning() -> None:
    shares = [OwnCells(DataLoader(some(25), batch_size=4), num_replicas=2, rank=rank) for rank in (0, 1)]
    with pytest.warns(UserWarning, match="last batch has 1 samples for 2 ranks"):
        first, second = map(list, shares)
    assert len(first) == len(second) == len(shares[0]) == 4
    assert first[-1] == second[-1] == [24]


class Apart(Sampler[int]):
    """Draws from numbers that nobody seeds."""

    def __iter__(self) -> Any:
        return iter(np.random.default_rng().permutation(16).tolist())

    def __len__(self) -> int:
        return 16


def apart(rank: int, ranks: int, batched: bool) -> str:
    given = {"batch_sampler": BatchSampler(Apart(), 4, False)} if batched else {"sampler": Apart(), "batch_size": 4}
    try:
        fitted(Small(), DataLoader(torch.randn(16, 4), **given), AMPStrategy(), rank=rank, ranks=ranks)
    except DataError as error:
        return str(error)
    return ""


@pytest.mark.ranks
@pytest.mark.parametrize("batched", [False, True])
def test_orders_that_differ_between_ranks_are_refused(batched: bool, tmp_path: Path) -> None:
    for said in run_ranks(apart, 2, tmp_path, batched, timeout=120):
        assert said.startswith("the ranks draw different orders from 'Apart', so that some samples would be read by")


def test_an_order_without_a_length_is_refused() -> None:
    class Endless(Sampler[int]):
        def __iter__(self) -> Any:
            return iter(int, 1)

    for loader in (DataLoader(Cells(), sampler=Endless()), DataLoader(Cells(), batch_size=None, sampler=Endless())):
        with pytest.raises(DataError, match=r"2 ranks .* sampler has no length \(.*'Endless'.*give it a __len__, or"):
            OwnCells(loader, num_replicas=2, rank=0)
