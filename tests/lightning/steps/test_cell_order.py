"""Claim: under `strategy="amp"` a run reads the cells of a plain run, whatever the number of ranks."""

import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, Subset, SubsetRandomSampler

from lightning_amp import AMPStrategy
from lightning_amp.errors import DataError
from lightning_amp.lightning.steps.cells import OwnCells
from tests.lightning.conformance.cases import CELLS, STRATA, Batch, Site, Tiny
from tests.lightning.conformance.data import Backwards, Cells, Reversed
from tests.lightning.strategy.model_axis_cases import DrawsOnRankZero
from tests.lightning.strategy.strategy_cases import Small, fitted
from tests.ranks import run_ranks

pytestmark = pytest.mark.timeout(300)

Steps = list[list[int]]
RANKS = 2


def some(n_cells: int) -> Subset[Batch]:
    return Subset(Cells(), range(n_cells))


class Pairs(Sampler[list[int]]):
    """Batches of its own making: neither a sampler nor a batch size to be asked for."""

    def __init__(self, size: int, n_cells: int = 32) -> None:
        self.size, self.n_cells = size, n_cells

    def __iter__(self) -> Iterator[list[int]]:
        return (
            list(range(start, min(start + self.size, self.n_cells)))[::-1]
            for start in range(0, self.n_cells, self.size)
        )

    def __len__(self) -> int:
        return -(-self.n_cells // self.size)


IN_ORDER: dict[str, Callable[[int], DataLoader[Any]]] = {
    "even": lambda size: DataLoader(Cells(), batch_size=size),
    "uneven end": lambda size: DataLoader(some(27), batch_size=size),
    "uneven end, a whole share": lambda size: DataLoader(some(29), batch_size=size),
    "drop_last": lambda size: DataLoader(some(31), batch_size=size, drop_last=True),
    "a sampler of one's own": lambda size: DataLoader(Cells(), batch_size=size, sampler=Backwards()),
    "a batch sampler": lambda size: DataLoader(
        Cells(), batch_sampler=Reversed(Backwards(), batch_size=size, drop_last=True)
    ),
    "torch's batch sampler": lambda size: DataLoader(some(27), batch_sampler=BatchSampler(range(27), size, False)),
    "batches of one's own": lambda size: DataLoader(Cells(), batch_sampler=Pairs(size)),
    "batches of one's own, uneven": lambda size: DataLoader(some(27), batch_sampler=Pairs(size, 27)),
}
SHUFFLED: dict[str, Callable[[int], DataLoader[Any]]] = {
    "shuffle=True": lambda size: DataLoader(Cells(), batch_size=size, shuffle=True),
    "a random subset": lambda size: DataLoader(Cells(), batch_size=size, sampler=SubsetRandomSampler(range(32))),
    "batches at random": lambda size: DataLoader(
        Cells(), batch_sampler=BatchSampler(RandomSampler(range(32)), size, False)
    ),
}


class Reader(Tiny):
    """Notes the cells of every step by stage."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, Steps] = {"fit": [], "validate": [], "test": [], "predict": []}

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        self.seen["fit"].append(batch["cell"].tolist())
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.seen["validate"].append(batch["cell"].tolist())

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self.seen["test"].append(batch["cell"].tolist())

    def predict_step(self, batch: Batch, batch_idx: int) -> Any:
        self.seen["predict"].append(batch["cell"].tolist())
        return 0


def quietly(run: Callable[[], None]) -> None:
    """Without Lightning's advice about loaders."""
    logger = logging.getLogger("lightning.pytorch")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run()
    finally:
        logger.setLevel(before)


def read(site: Site, loader: DataLoader[Any], **options: Any) -> dict[str, Any]:
    seed_everything(7, verbose=False)
    module = Reader()
    trainer = site.trainer(use_distributed_sampler=True, callbacks=[DrawsOnRankZero()], **options)
    quietly(lambda: trainer.fit(module, loader, loader))
    quietly(lambda: trainer.test(module, loader, verbose=False) and None)
    quietly(lambda: trainer.predict(module, loader, return_predictions=False) and None)
    return {**module.seen, "weights": module.encoder.weight.detach().clone()}


def resumed(site: Site, size: int) -> Steps:
    """What is read after a checkpoint of the second epoch's second step."""
    folder = site.folder / f"{site.strategies}-{site.ranks}"
    seed_everything(7, verbose=False)
    options: dict[str, Any] = {"use_distributed_sampler": True, "enable_checkpointing": True}
    kept = ModelCheckpoint(dirpath=folder, every_n_train_steps=6, save_top_k=-1, filename="{step}")
    first = site.trainer(**options, callbacks=[kept], max_steps=6, max_epochs=-1)
    quietly(lambda: first.fit(Reader(), IN_ORDER["even"](size)))
    module, again = Reader(), site.trainer(**options, max_epochs=3)
    quietly(lambda: again.fit(module, IN_ORDER["even"](size), ckpt_path=str(folder / "step=6.ckpt")))
    return module.seen["fit"]


def dealt(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    """What a rank of the data axis reads."""
    site = Site(strategies="S1", rank=rank, ranks=ranks, folder=folder)
    size = CELLS // ranks
    found: dict[str, Any] = {name: read(site, make(size)) for name, make in (IN_ORDER | SHUFFLED).items()}
    found["whole batches"] = read(site, whole_batches())
    found["overfit"] = read(site, SHUFFLED["shuffle=True"](size), overfit_batches=2)
    found["resumed"] = resumed(site, size)
    return found


def whole_batches(n_batches: int = 5) -> DataLoader[Any]:
    """Items that are batches, of which the loader makes none."""
    columns = Cells().columns
    items = [{name: value[4 * i :][:4] for name, value in columns.items()} for i in range(n_batches)]
    return DataLoader(items, batch_size=None)  # type: ignore[arg-type]


def grouped(rank: int, ranks: int, strategies: str) -> dict[str, Any]:
    """What a rank of the model axis reads of loaders that draw."""
    site = Site(strategies=strategies, rank=rank, ranks=ranks, model_ranks=ranks)
    return {name: read(site, make(CELLS)) for name, make in SHUFFLED.items()}


def union(parts: list[Steps]) -> Steps:
    """The cells of each step over ranks."""
    return [sorted(cell for part in step for cell in part) for step in zip(*parts, strict=True)]


def same(mine: Tensor, theirs: Tensor) -> bool:
    return bool(((mine - theirs).norm() <= 1e-9 * theirs.norm()).item())


STAGES = ("fit", "validate", "test", "predict")


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
@pytest.mark.parametrize(("name", "last"), [("overfit", []), ("whole batches", [sorted([*range(16, 20)] * 2)])])
def test_overfit_batches_are_the_same_in_every_epoch_and_items_that_are_batches_are_dealt_one_by_one(
    ranks: list[dict[str, Any]], name: str, last: list[list[int]]
) -> None:
    assert union([rank[name]["fit"] for rank in ranks]) == [list(range(8)), list(range(8, 16)), *last] * 2


@pytest.mark.ranks
def test_a_resumed_run_goes_on_where_a_plain_one_does(plain: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    assert union([rank["resumed"] for rank in ranks]) == [sorted(step) for step in plain["resumed"]]


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
