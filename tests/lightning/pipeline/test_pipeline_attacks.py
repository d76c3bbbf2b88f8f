"""Claim: a module that looks as if it could be stages and is not one is refused with the reason, and never trained
otherwise than by one process; what is unusual and can be stages is exact (float64, 1e-10).
"""

import gc
import logging
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import seed_everything
from torch.utils.data import DataLoader

from lightning_amp.lightning.faults.failure_watch import FailureWatch
from tests.lightning.pipeline import manual_steps
from tests.lightning.pipeline.attacks import EXACT, Net, batches
from tests.lightning.pipeline.pipeline_cases import trainer_of
from tests.lightning.pipeline.refused_attacks import REFUSED
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks
Kinds = tuple[type[Net], ...]
SCHEDULES: tuple[dict[str, Any], ...] = (
    {"schedule": "1f1b", "micro_batches": 3},
    {"schedule": "gpipe", "micro_batches": 3},
    {"schedule": "interleaved", "micro_batches": 6},
)
EVERY = [0, *(pytest.param(n, marks=[pytest.mark.exhaustive, pytest.mark.release]) for n in (1, 2))]


def train(rank: tuple[int, int] | None, kind: type[Net], settings: dict[str, Any]) -> dict[str, Any]:
    """Three steps, with a validation after them."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    seed_everything(1, verbose=False)
    module, loader = kind(), DataLoader(batches(), batch_size=None)  # type: ignore[arg-type]
    trainer = trainer_of(rank, settings, {"num_sanity_val_steps": 0})
    trainer.fit(module, loader, loader)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"state": {n: v.clone() for n, v in module.state_dict().items()}, "logged": logged}


def trained(rank: int, ranks: int, schedule: int, kinds: Kinds) -> dict[str, Any]:
    return {kind.__name__: train((rank, ranks), kind, SCHEDULES[schedule]) for kind in kinds}


@pytest.mark.parametrize("schedule", EVERY)
@pytest.mark.parametrize("kinds", [EXACT, manual_steps.EXACT], ids=["automatic", "manual"])
def test_what_can_be_stages_is_exact(kinds: Kinds, schedule: int, tmp_path: Path) -> None:
    expected = {kind.__name__: train(None, kind, {}) for kind in kinds}
    for found in run_ranks(trained, 2, tmp_path, schedule, kinds, timeout=200):
        for name, run in found.items():
            for key, value in expected[name]["state"].items():
                assert torch.allclose(run["state"][key], value, rtol=0, atol=1e-10), f"{name}: {key}"
            assert run["logged"] == pytest.approx(expected[name]["logged"], abs=1e-10), name


def refused(rank: int, ranks: int, folder: Path, schedule: int, kinds: Kinds) -> dict[str, str]:
    found = {}
    dist.barrier()
    for n, kind in enumerate(kinds):
        # a rank that is refused leaves the others, whose next message fails; the watch would end the process
        dist.destroy_process_group()
        gc.collect()
        store = dist.FileStore(str(folder / f"store{n}"), ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=15))
        with patch.object(FailureWatch, "tell", lambda *_: None):
            found[kind.__name__] = said_of((rank, ranks), kind, SCHEDULES[schedule])
    return found


def said_of(rank: tuple[int, int], kind: type[Net], settings: dict[str, Any]) -> str:
    try:
        train(rank, kind, settings)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.full
@pytest.mark.parametrize("table", [REFUSED, manual_steps.REFUSED], ids=["automatic", "manual"])
def test_what_cannot_is_refused(table: dict[type[Net], str], tmp_path: Path) -> None:
    both = run_ranks(refused, 2, tmp_path, tmp_path, 0, tuple(table), timeout=200)
    said = {kind.__name__: [found[kind.__name__] for found in both] for kind in table}
    trained = [name for name, of_ranks in said.items() if not all(of_ranks)]
    assert not trained
    others = {
        kind.__name__: said[kind.__name__]
        for kind, words in table.items()
        if not any(words in one for one in said[kind.__name__])
    }
    assert not others, "\n".join(f"{name}: {of_ranks}" for name, of_ranks in others.items())
