"""Claim: the reference model is planned from its files: a step is predicted, and what cannot be is refused or said.

Ranks train it as one process does in tests/lightning/strategy/test_model_axis.py.
"""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer

from lightning_amp.data.loading.datamodule import SingleCellDataModule
from lightning_amp.data.prepare.synthetic import synthesize
from lightning_amp.errors import PlanError
from lightning_amp.lightning.callbacks.memory_monitor import StratumMemoryMonitor
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.models.glue import GLUE
from lightning_amp.planning.policies.make_plan import plan
from lightning_amp.profiling.read_profile import profile
from tests.lightning.strategy.strategy_cases import trainer_of


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("end_to_end") / "data"
    synthesize(out, cells=40, rna_cells=30, bins=40, strata=4, genes=30, seed=2)
    return out


def test_prescribed_strategies_without_an_installer_stop_the_run(data_dir: Path) -> None:
    with pytest.raises(PlanError, match="S5 split a module over the model axis"):
        fitted(AMPStrategy(strategies="S1,S5", model_parallel_size=1), data_dir)


@pytest.mark.long
def test_a_run_that_is_predicted_not_to_fit_is_refused_or_says_so_before_it_starts(data_dir: Path) -> None:
    short = r"out of memory at stratum 0: .* per rank of 20.0 KiB; the step requires at least "
    with pytest.warns(UserWarning, match=short):
        trained = fitted(AMPStrategy(device_memory="20KiB", on_predicted_oom="warn"), data_dir, max_steps=1)
    assert trained.global_step > 0
    for named in (AMPStrategy(device_memory="20KiB"), AMPStrategy(device_memory="20KiB", on_predicted_oom="refuse")):
        with pytest.raises(PlanError, match=rf"{short}.*Nothing was trained: .*on_predicted_oom='warn'"):
            fitted(named, data_dir, max_steps=1)
    # where nobody named a memory it is the machine's, of which others may give some back
    assert AMPStrategy().on_predicted_oom == "warn"


def fitted(strategy: AMPStrategy, data_dir: Path, **options: Any) -> Trainer:
    trainer = trainer_of(strategy, **{"max_steps": 4, "max_epochs": None, "limit_val_batches": 0} | options)
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
