"""Claim: the cells per step are read wherever the training loader comes from, without changing the run, and where they
cannot be read the plan says what to do; one cell is too few for batch normalisation, which the first step says.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer, seed_everything
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, random_split

from lightning_amp.errors import DataError
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from tests.lightning.strategy.strategy_cases import trainer_of
from tests.optimised import Optimised
from tests.ranks import run_ranks
from tests.techniques.sharded_cases import Case, Model

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]

CELLS = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))


def sampled() -> DataLoader[Any]:
    return DataLoader(CELLS, batch_sampler=BatchSampler(SequentialSampler(CELLS), 3, drop_last=False))  # type: ignore[arg-type]


def split() -> DataLoader[Any]:
    kept, _ = random_split(CELLS, [8, 4])  # type: ignore[arg-type]
    return DataLoader(kept, batch_size=4, shuffle=True)


def raises() -> DataLoader[Any]:
    if Own.started:
        return split()
    raise AttributeError("no dataset yet")


class Own(Optimised, by=torch.optim.SGD, lr=0.1):
    started = False

    def __init__(self, loader: Callable[[], Any], *layers: nn.Module) -> None:
        super().__init__()
        self.loader = loader
        self.layers = nn.Sequential(nn.Linear(4, 2), *layers)
        # of a module without one the cells would predict nothing
        self.decoder = Model(Case(dim=8)).decoder
        self.seen: list[Any] = []

    def train_dataloader(self) -> Any:
        return self.loader()

    def on_fit_start(self) -> None:
        Own.started = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        cells = batch if isinstance(batch, torch.Tensor) else next(iter(batch.values()))
        self.seen.append(cells)
        return self.layers(cells).square().mean()


class Data(LightningDataModule):
    def train_dataloader(self) -> Any:
        return split()


LOADERS: dict[str, tuple[Callable[[], Any], int | None]] = {
    "plain": (split, 4),
    "of a batch sampler": (sampled, 3),
    "two of unlike sizes": (lambda: {"a": split(), "b": sampled()}, 4),
    "combined": (lambda: CombinedLoader({"a": sampled()}, "max_size"), 3),
    "ready batches": (lambda: DataLoader(CELLS.split(6), batch_size=None), 6),  # type: ignore[arg-type]
    "not there yet": (raises, None),
}


def trainer_on(strategy: Any, rank: int = 0, ranks: int = 1) -> Trainer:
    sampler = strategy == "auto" or ranks > 1
    return trainer_of(strategy, rank=rank, ranks=ranks, max_steps=-1, use_distributed_sampler=sampler)


def planned(loader: Callable[[], Any], **data: Any) -> Any:
    """The plan of a run, which reads the cells of a plain one in their order."""
    seen, ours = [], AMPStrategy()
    for strategy in (ours, "auto"):
        Own.started = strategy == "auto"
        module = Own(loader)
        seed_everything(3)
        trainer_on(strategy).fit(module, **data)
        seen.append(torch.cat(module.seen))
    assert torch.equal(*seen), "another order of cells"
    return ours.plan


@pytest.mark.parametrize("name", LOADERS)
def test_the_plan_knows_the_cells_or_says_what_to_do(name: str) -> None:
    loader, size = LOADERS[name]
    plan = planned(loader)
    told = [note for note in plan.notes if "the batch size is not known" in note]
    assert (plan.batch_size, len(told)) == ((1, 1) if size is None else (size, 0))
    if size is None:
        assert "give the data module, or the training loader, an attribute batch_size" in told[0]
    if name == "not there yet":
        assert "Own.train_dataloader() gave AttributeError: no dataset yet" in told[0]


def test_the_cells_of_a_data_module_are_known() -> None:
    assert planned(split, datamodule=Data()).batch_size == 4


class Counting(Own):
    def __init__(self, draws: bool) -> None:
        super().__init__(lambda: DataLoader(CELLS, batch_size=2))  # type: ignore[arg-type]
        self.draws, self.calls, self.drawn = draws, 0, 0.0

    def train_dataloader(self) -> Any:
        self.calls += 1
        self.drawn = float(torch.rand(())) if self.draws else 0.0
        return super().train_dataloader()


def test_the_hook_is_called_once_and_draws_where_a_plain_run_draws() -> None:
    found = []
    for draws, strategy in ((False, AMPStrategy()), (True, AMPStrategy()), (True, "auto")):
        torch.manual_seed(0)
        module = Counting(draws)
        trainer_on(strategy).fit(module)
        found.append((module.calls, module.drawn))
    still, drawing, plain = found
    assert still[0] == plain[0] == 1
    assert drawing[1] == plain[1]


def normalised(rank: int, ranks: int, n: int, options: dict[str, Any]) -> tuple[int, str]:
    """Steps taken with batches of n cells, and what was said."""
    module = Own(lambda: DataLoader(CELLS, batch_size=n), nn.BatchNorm1d(2))  # type: ignore[arg-type]
    trainer = trainer_on(AMPStrategy(**options), rank, ranks)
    try:
        trainer.fit(module)
    except DataError as error:
        return trainer.global_step, str(error)
    return trainer.global_step, ""


@pytest.mark.ranks
@pytest.mark.parametrize(("ranks", "options"), [(1, {}), (2, {"share_batch_statistics": False})])
def test_one_cell_is_too_few_for_batch_normalisation(ranks: int, options: Any, tmp_path: Path) -> None:
    for steps, text in run_ranks(normalised, ranks, tmp_path, 1, options):
        assert steps == 0
        assert "train on one value per channel, which has no variance" in text
        assert "set batch_size to 2 or more" in text


@pytest.mark.ranks
def test_two_ranks_of_one_cell_are_enough_for_shared_statistics(tmp_path: Path) -> None:
    assert [steps for steps, _ in run_ranks(normalised, 2, tmp_path, 1, {})] == [6, 6]
