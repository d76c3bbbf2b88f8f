"""Claim: from files to weights, 2 ranks train the reference model as 1 rank does with the same global batch.

Double precision, dropout, sampled latents, an adversary, batch normalisation, balanced cells and strategies S3 and S4
on the ranks, none of it on one process: the same loss and weights up to rounding.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

from lightning_amp.data.loading.datamodule import SingleCellDataModule
from lightning_amp.data.prepare.synthetic import synthesize
from lightning_amp.errors import PlanError
from lightning_amp.lightning.callbacks.memory_monitor import StratumMemoryMonitor
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.models.glue import GLUE
from lightning_amp.planning.policies.make_plan import plan
from lightning_amp.profiling.read_profile import profile
from tests.any_module import QUIET
from tests.lightning.strategy.strategy_cases import RunningRanks
from tests.ranks import run_ranks

GLOBAL_BATCH = 12


class Losses(Callback):
    """The mean loss of all ranks after every step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        loss = trainer.callback_metrics["loss"].detach().clone()
        self.values.append(float(trainer.strategy.reduce(loss)))


class Nudge(Callback):
    """Weights that differ in their last place: what rounding makes of them is what rounding may make of ranks."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in pl_module.parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.mul_(1 + 2**-52 * noise)


def train(data_dir: Path, ranks: int, rank: int, *, nudged: bool = False, **settings: Any) -> dict[str, Any]:
    torch.use_deterministic_algorithms(True)
    seed_everything(3)
    strategy = AMPStrategy(**settings)
    losses = Losses()
    trainer = Trainer(
        **QUIET,
        accelerator="cpu",
        precision="64-true",
        devices=ranks,
        max_epochs=3,
        limit_val_batches=0,
        strategy=strategy,
        plugins=[RunningRanks(rank, ranks)],
        callbacks=[losses, Nudge()] if nudged else [losses],
    )
    model = GLUE(latent_dim=8, hidden_dim=16, window=8, edges_per_step=64, align_burnin=2)
    data = SingleCellDataModule(data_dir, batch_size=GLOBAL_BATCH // ranks, val_fraction=0.0)
    trainer.fit(model, data)
    made = strategy.plan
    assert made is not None, "there is a plan after a fit"
    return {
        "losses": losses.values,
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "strategies": made.strategies,
        "balanced": strategy.balance_cells,
        "in_force": made.balance_cells,
    }


def on_rank(rank: int, ranks: int, data_dir: Path, settings: dict[str, Any]) -> dict[str, Any]:
    return train(data_dir, ranks, rank, **settings)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("end_to_end") / "data"
    synthesize(out, cells=40, rna_cells=30, bins=40, strata=4, genes=30, seed=2)
    return out


@pytest.fixture(scope="module")
def runs(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """One process, then both ranks."""
    settings = {"strategies": "S1,S3,S4", "balance_cells": True}
    (one,) = run_ranks(
        on_rank, 1, tmp_path_factory.mktemp("one"), data_dir, {"strategies": "S1", "balance_cells": False}, timeout=120
    )
    return [one, *run_ranks(on_rank, 2, tmp_path_factory.mktemp("two"), data_dir, settings, timeout=120)]


@pytest.mark.ranks
def test_losses_of_every_step_agree(runs: list[dict[str, Any]]) -> None:
    one, *ranks = runs
    for rank in ranks:
        assert rank["losses"] == pytest.approx(one["losses"], rel=1e-9)


@pytest.mark.ranks
def test_weights_and_batch_statistics_agree(runs: list[dict[str, Any]], data_dir: Path, tmp_path: Path) -> None:
    """To what rounding makes of one process: RMSprop's first steps divide rounding by rounding."""
    one, *ranks = runs
    (nudged,) = run_ranks(on_rank, 1, tmp_path, data_dir, {"balance_cells": False, "nudged": True}, timeout=120)
    rounding = furthest(nudged["state"], one["state"])
    assert 0 < rounding < 1e-8
    for rank in ranks:
        assert list(rank["state"]) == list(one["state"])
        assert furthest(rank["state"], one["state"]) < 20 * rounding


def furthest(state: dict[str, Any], other: dict[str, Any]) -> float:
    """Largest distance of two states, in units of a tensor's largest entry where that is above 1."""
    pairs = ((value.double(), other[name].double()) for name, value in state.items())
    return max(float((a - b).abs().max() / b.abs().max().clamp_min(1)) for a, b in pairs)


@pytest.mark.ranks
def test_ranks_are_bitwise_equal(runs: list[dict[str, Any]]) -> None:
    _, first, second = runs
    assert all(torch.equal(first["state"][name], second["state"][name]) for name in first["state"])


def test_prescribed_strategies_without_an_installer_stop_the_run(data_dir: Path) -> None:
    model = GLUE(latent_dim=8, window=8)
    strategy = AMPStrategy(strategies="S1,S5", model_parallel_size=1)
    trainer = Trainer(**QUIET, accelerator="cpu", devices=1, strategy=strategy, max_epochs=1)
    with pytest.raises(PlanError, match="S5 split a module over the model axis"):
        trainer.fit(model, SingleCellDataModule(data_dir, batch_size=4))


def test_a_run_that_is_predicted_not_to_fit_is_refused_or_says_so_before_it_starts(data_dir: Path) -> None:
    short = r"out of memory at stratum 0: .* per rank of 20.0 KiB; use smaller batches"
    with pytest.warns(UserWarning, match=short):
        trained = fitted(AMPStrategy(device_memory="20KiB", unfit="train"), data_dir, max_steps=1)
    assert trained.global_step > 0
    for named in (AMPStrategy(device_memory="20KiB"), AMPStrategy(device_memory="20KiB", unfit="refuse")):
        with pytest.raises(PlanError, match=rf"{short}.*Nothing was trained: .*unfit='train'"):
            fitted(named, data_dir, max_steps=1)
    # where nobody named a memory it is the machine's, of which others may give some back
    assert AMPStrategy().unfit == "train"


def fitted(strategy: AMPStrategy, data_dir: Path, **options: Any) -> Trainer:
    defaults = {"accelerator": "cpu", "devices": 1, "max_steps": 4, "limit_val_batches": 0}
    trainer = Trainer(**QUIET, **{**defaults, **options}, strategy=strategy)
    trainer.fit(GLUE(latent_dim=8, window=8), SingleCellDataModule(data_dir, batch_size=4))
    return trainer


def test_a_given_plan_is_predicted_anew_for_the_run(data_dir: Path) -> None:
    """Its own figures were for other cells and another latent dimension."""
    made = plan(profile(data_dir), devices=1, strategies="S1,S3", batch_size=64, device_memory="1GiB")
    strategy = AMPStrategy(plan=made, device_memory="2GiB")
    fitted(strategy, data_dir)
    assert strategy.plan is not None
    assert strategy.plan.rules == made.rules
    assert (strategy.plan.batch_size, strategy.plan.budget_bytes) == (4, 2 * 2**30)
    assert strategy.plan.predicted_peak_bytes < made.predicted_peak_bytes


@pytest.mark.parametrize("precision", ["32-true", "64-true"])
def test_the_peak_of_a_step_is_predicted(data_dir: Path, precision: Any) -> None:
    """To 5 % after every stratum, to 10 % for the step, in the precision of the run."""
    monitor = StratumMemoryMonitor(plot=False, dirpath=data_dir.parent / precision)
    fitted(AMPStrategy(), data_dir, precision=precision, callbacks=[monitor])
    rows = monitor.table()
    assert len(rows) == 5
    assert all(row["ratio"] == pytest.approx(1, abs=0.05) for row in rows[:-1])
    assert rows[-1]["ratio"] == pytest.approx(1, abs=0.1)


def test_the_reference_model_can_be_tested(data_dir: Path) -> None:
    trainer = fitted(AMPStrategy(), data_dir)
    results = trainer.test(trainer.lightning_module, SingleCellDataModule(data_dir, batch_size=4), verbose=False)
    assert results[0]["test_loss"] > 0
