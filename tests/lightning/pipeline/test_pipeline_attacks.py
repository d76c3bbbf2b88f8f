"""Claim: a module that looks as if it could be stages and is not one is refused with the reason, and never trained
otherwise than by one process; what is unusual and can be stages is exact (float64, 1e-10).
"""

import gc
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import seed_everything
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_amp.data.cut_batch import cut
from lightning_amp.errors import DataError
from lightning_amp.lightning.faults.failure_watch import FailureWatch
from lightning_amp.techniques.pipeline.row import PipelineStages
from lightning_amp.techniques.pipeline.steps.pipelined_steps import PipelinedSteps
from tests.each import BEFORE_A_RELEASE
from tests.lightning.pipeline.attacks import EXACT, Net, Resets, Takes, batches
from tests.lightning.pipeline.pipeline_cases import trainer_of
from tests.lightning.pipeline.refused_attacks import REFUSED, Contrastive, Masked, Summed, Ticks
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks
Cases = list[tuple[type[Net], dict[str, Any]]]
SCHEDULES: tuple[dict[str, Any], ...] = (
    {"schedule": "1f1b", "micro_batches": 3},
    {"schedule": "gpipe", "micro_batches": 3},
    {"schedule": "interleaved", "micro_batches": 6},
)
EVERY = [0, *(pytest.param(n, marks=BEFORE_A_RELEASE) for n in (1, 2))]
UNCUT: Cases = [
    (Masked, {"micro_batches": 1}),
    *((kind, {"schedule": "gpipe"}) for kind in (Masked, Summed, Contrastive, Resets)),
]
"""Any loss, computed for the whole batch."""
SETTINGS: dict[str, dict[str, Any]] = {
    "check_finite=True": {"check_finite": True},
    "save_distributed_checkpoint=True": {"save_distributed_checkpoint": True},
    "rounds of unequal length": {"schedule": "interleaved", "micro_batches": 5},
}


def train(rank: tuple[int, int] | None, kind: Callable[[], Net], settings: dict[str, Any]) -> dict[str, Any]:
    """Three steps, with a validation after them."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    seed_everything(1, verbose=False)
    module, loader = kind(), DataLoader(batches(), batch_size=None)  # type: ignore[arg-type]
    trainer = trainer_of(rank, settings, {"num_sanity_val_steps": 0})
    trainer.fit(module, loader, loader)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"state": {n: v.clone() for n, v in module.state_dict().items()}, "logged": logged}


def trained(rank: int, ranks: int, cases: Cases) -> list[dict[str, Any]]:
    return [train((rank, ranks), kind, settings) for kind, settings in cases]


@pytest.mark.full
@pytest.mark.parametrize("schedule", EVERY)
def test_what_can_be_stages_is_exact(schedule: int, tmp_path: Path) -> None:
    cases = [(kind, SCHEDULES[schedule]) for kind in EXACT] + ([] if schedule else UNCUT)
    expected = [train(None, kind, {}) for kind, _ in cases]
    for found in run_ranks(trained, 2, tmp_path, cases, timeout=200):
        for (kind, _), run, one in zip(cases, found, expected, strict=True):
            for key, value in one["state"].items():
                assert torch.allclose(run["state"][key], value, rtol=0, atol=1e-10), f"{kind.__name__}: {key}"
            assert run["logged"] == pytest.approx(one["logged"], abs=1e-10), kind.__name__


def refused(rank: int, ranks: int, folder: Path, cases: Cases) -> list[tuple[str, bool]]:
    """What was said of each, and whether the module is as it was."""
    found = []
    dist.barrier()
    for n, (kind, settings) in enumerate(cases):
        # a rank that is refused leaves the others, whose next message fails; the watch would end the process
        dist.destroy_process_group()
        gc.collect()
        store = dist.FileStore(str(folder / f"store{n}"), ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=15))
        module, said = kind(), ""
        before = {key: value.clone() for key, value in module.state_dict().items()}
        with patch.object(FailureWatch, "tell", lambda *_: None):
            try:
                train((rank, ranks), lambda module=module: module, settings)
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
        # of another rank's blocks a run that has ended has no values
        own = [(key, value) for key, value in module.state_dict().items() if not value.isnan().any()]
        found.append((said, all(torch.equal(value, before[key]) for key, value in own)))
        # its trainer holds the groups, whose connections would stay open and let the other rank wait for its timeout
        del module, own
    return found


@pytest.mark.full
def test_what_cannot_is_refused(tmp_path: Path) -> None:
    cases = [(words, kind, SCHEDULES[0]) for kind, words in REFUSED.items()]
    cases += [(words, Net, settings) for words, settings in SETTINGS.items()]
    of_ranks = run_ranks(refused, 2, tmp_path, tmp_path, [case[1:] for case in cases], timeout=200)
    for (words, kind, _), *found in zip(cases, *of_ranks, strict=True):
        said = [text for text, _ in found]
        assert all(said), f"{kind.__name__} was trained: {said}"
        # of what one rank alone has found the others learn
        enough = all if kind is Ticks else any
        assert enough(words in text for text in said), f"{kind.__name__}: {said}"
        # whose step changes it by itself
        assert all(unchanged for _, unchanged in found) or kind is Ticks, kind.__name__


def test_batches_without_a_number_draw_anew() -> None:
    seeds, module = list[int](), Takes()
    trainer: Any = Mock(current_epoch=0)
    module.trainer = trainer
    with patch.object(
        PipelinedSteps, "_train", lambda self, _, name, *given: seeds.append(self._seed(name, given[1:], 0))
    ):
        stages: Any = Mock(spans=(), forward_only=())
        steps = PipelinedSteps(module, {}, stages, Mock(), PipelineStages(), data_rank=0)
        for trainer.current_epoch in (0, 0, 1):
            module.training_step({})
        steps.undo()
    assert len({*seeds}) == 3


@dataclass
class Named:
    x: Tensor
    names: list[Any]


def test_a_batch_is_cut_by_samples_or_refused() -> None:
    parts, sizes = cut({"x": torch.arange(7), "scale": torch.tensor(2.0), "name": "a"}, 3)
    assert sizes == [2, 2, 3]
    assert [len(part["x"]) for part in parts] == sizes
    assert all(part["scale"] == 2.0 and part["name"] == "a" for part in parts)
    assert cut([torch.arange(2)], 5)[1] == [1, 1]
    (first, _), _ = cut(Named(torch.arange(7), [torch.tensor(1), "a"]), 2)
    assert (len(first.x), first.names) == (3, [1, "a"])
    for odd in (
        {"x": torch.arange(7), "edges": torch.ones(2, 9)},
        {"x": torch.arange(7), "names": list("abcdefg")},
        Named(torch.arange(7), list("abcdefg")),
        Named(torch.arange(7), list(torch.arange(7))),
        {"x": torch.arange(7), "graph": object()},
        {"scale": torch.tensor(2.0)},
    ):
        with pytest.raises(DataError, match="micro-batches"):
            cut(odd, 3)
