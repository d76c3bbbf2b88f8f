"""Claim: a module on a grid of ranks trains as one process does, in float64; what is not supported is refused."""

import warnings
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import LambdaCallback
from torch.utils.data import DataLoader

from lightning_amp import AMPStrategy
from lightning_amp.lightning.profiling import dry_steps
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.techniques.tensor3d.grid_seconds import GridCost
from tests.any_module import QUIET, Meter
from tests.each import BEFORE_A_RELEASE
from tests.lightning.strategy.strategy_cases import RunningRanks
from tests.ranks import run_ranks
from tests.techniques.tensor3d.cases import CASES, Case

Grid = tuple[int, int, int]


def run(
    case: Case,
    grid: Grid | None = None,
    rank: int = 0,
    ranks: int = 1,
    *,
    options: Any = None,
    ckpt: str | None = None,
    save: str = "",
    dtype: torch.dtype = torch.float64,
    **given: Any,
) -> dict[str, Any]:
    """Three steps with a validation; without a grid on one process, without the strategy."""
    warnings.simplefilter("ignore")
    seed_everything(3, verbose=False)
    batches = [case.batch() for _ in range(3)]
    batches = [batch.to(dtype) if batch.is_floating_point() else batch for batch in batches]
    strategy: dict[str, Any] = {"devices": 1}
    if grid is not None:
        x, y, z = grid
        # where z splits samples its ranks have the same
        same = x * y * (z if "sequence_dim" in (options or {}) else 1)
        samplers = ranks // same
        rows = max(1, 4 // max(1, samplers))
        batches = [batch[rank // same * rows :][:rows] for batch in batches]
        made = AMPStrategy(**{"strategies": "tensor3d", "tensor_grid": grid, **(options or {})})
        strategy = {"strategy": made, "devices": ranks, "plugins": [RunningRanks(rank, ranks)]}
    loader, meter = DataLoader(batches, batch_size=None), Meter()  # type: ignore[arg-type]
    trainer = Trainer(
        **{
            **QUIET,
            "accelerator": "cpu",
            "max_epochs": 1,
            "num_sanity_val_steps": 1,
            "callbacks": [meter],
            "use_distributed_sampler": False,
            **strategy,
            **given,
        }
    )
    module = case.module().to(dtype)
    shapes = {name: p.shape for name, p in module.named_parameters()}
    parameters = [*module.parameters()]
    if save:
        # at the end of the fit parameters are whole
        trainer.callbacks.append(LambdaCallback(on_train_epoch_end=lambda t, _: t.save_checkpoint(save)))
    trainer.fit(module, loader, loader, ckpt_path=ckpt)
    assert all(a is b for a, b in zip(parameters, module.parameters(), strict=True)), "parameters stay"
    assert shapes == {name: p.shape for name, p in module.named_parameters()}
    assert not [name for name in vars(module) if name.endswith("_step")], "the module is as it was"
    plan = getattr(trainer.strategy, "plan", None)
    return {
        "losses": torch.stack(module.losses),
        "state": {name: value.clone() for name, value in module.state_dict().items()},
        "valid": float(trainer.callback_metrics["valid"]),
        "plan": None if plan is None else plan.to_json(),
        "peak": meter.live.peak,
    }


def same(ranks: list[dict[str, Any]], right: dict[str, Any]) -> list[dict[str, Any]]:
    """Losses over all rows, metrics and parameters of all ranks are those of one process."""
    losses = torch.stack([one["losses"] for one in ranks]).mean(0)
    torch.testing.assert_close(losses, right["losses"], rtol=1e-10, atol=0)
    for one in ranks:
        assert one["valid"] == pytest.approx(right["valid"], rel=1e-10)
        torch.testing.assert_close(one["state"], right["state"], rtol=1e-10, atol=1e-10)
    return ranks


def as_predicted(ranks: list[dict[str, Any]], what: object) -> Plan:
    """The plan, whose peak the ranks have."""
    plan = Plan.from_json(ranks[0]["plan"])
    peak = max(one["peak"] for one in ranks)
    assert peak == pytest.approx(plan.predicted_peak_bytes, rel=0.05, abs=4096), what
    return plan


CACHED = {"options": {"tensor_cache": "1MiB"}}


ROWS: list[tuple[str, Grid]] = [
    *((name, (2, 2, 1)) for name in CASES),
    *((name, (2, 1, 2)) for name in ("gpt", "separable")),
    ("convolutional", (1, 2, 1)),
]
"""Every module over x and y; over z, with its averages, and on copies of a grid those of most operators."""


def on_grids(rank: int, ranks: int, rows: list[tuple[str, Grid]]) -> dict[Any, Any]:
    """With the roles of x and y as planned, also where it is faster to exchange them."""

    def as_planned(costs: list[GridCost], budget: int | None) -> list[GridCost]:
        return [cost for cost in costs if not cost.exchanged]

    with patch.object(dry_steps, "ranked", as_planned):
        return {
            (name, grid): run(CASES[name], grid, rank, ranks, **(CACHED if (name, grid) == ("gpt", (1, 1, 2)) else {}))
            for name, grid in rows
        }


@pytest.mark.ranks
@pytest.mark.parametrize(("ranks", "rows"), [
    pytest.param(4, ROWS, id="few"),
    pytest.param(2, [*product(CASES, [(2, 1, 1), (1, 2, 1), (1, 1, 2)])], id="2", marks=BEFORE_A_RELEASE),
    pytest.param(4, [*product(CASES, [(2, 2, 1), (2, 1, 2), (1, 2, 1)])], id="4", marks=BEFORE_A_RELEASE),
])  # fmt: skip
def test_modules_train_as_one_process_does(tmp_path: Path, ranks: int, rows: list[tuple[str, Grid]]) -> None:
    """Losses, parameters and metrics, with the predicted peak, once with a cache; a grid of two ranks on four has two
    copies.
    """
    found = run_ranks(on_grids, ranks, tmp_path, rows)
    rights = {name: run(case) for name, case in CASES.items()}
    for name, grid in rows:
        as_predicted(same([one[name, grid] for one in found], rights[name]), (name, grid))
