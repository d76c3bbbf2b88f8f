"""Claim: parameters that are split in groups of ranks, and are the same in each, train the numbers of one process."""

import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor

from lightning_amp.footprint.profile_module import profile_module
from lightning_amp.footprint.run.run_settings import UNDER_AMP
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.techniques.contract.sharded_parameter import local
from lightning_amp.techniques.fsdp.bytes_of_ranks import fsdp_peak_bytes
from lightning_amp.techniques.fsdp.look import units_of
from tests.lightning.strategy.fsdp_features import (
    Blocks,
    Found,
    Norms,
    Several,
    loader,
    saved,
    trained,
    trainer_of,
    ways,
)
from tests.lightning.strategy.strategy_cases import Case, Normalised
from tests.lightning.strategy.test_fsdp import close, same_checkpoint, went_on
from tests.ranks import CountCollectives, run_ranks
from tests.techniques.fsdp.test_fsdp_bytes import measured, module_and_batch

CELLS = [(3, 1, 2, 2), (1, 4, 1, 2), (2, 2, 2, 2), (4, 1, 1, 2), (1, 1, 2, 2), (2, 1, 1, 1), (3, 2, 1, 2)]
"""Of each rank, step by step; seven steps make a short last window of three."""
WAYS = {
    "accumulated and clipped by norm": Case(
        Blocks, cells=CELLS, trainer={"accumulate_grad_batches": 3, "gradient_clip_val": 0.3}
    ),
    "by hand": Case(Several, cells=CELLS),
    "normalised": Case(Normalised, cells=CELLS),
}
ONE = "epoch=0.ckpt"


def groups(**options: Any) -> AMPStrategy:
    return AMPStrategy(strategies="fsdp", fsdp_ranks=2, **options)


def single(rank: int | None, ranks: int) -> tuple[dict[str, Tensor], list[float]]:
    """In single precision other operations divide the sums, of which AdamW would not notice a factor: norms do."""
    module, norms = Blocks().float(), Norms()
    batches = WAYS["by hand"].batches(rank)
    data = [{"rna": {key: value.float() for key, value in batch["rna"].items()}} for batch in batches]
    options: dict[str, Any] = {"precision": "32-true", "max_epochs": 1, "callbacks": [norms]}
    trainer_of(rank or 0, ranks, groups(), **options).fit(module, loader(data))
    return trained(module), norms.found


class Counted(Callback):
    """Collectives of the third step, and the sizes of what this rank keeps."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.rows: dict[str, tuple[int, ...]] = {}

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self._mode = CountCollectives().__enter__()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            self._mode.__exit__(None, None, None)
            self.counts = self._mode.counts
            self.rows = {name: tuple(local(p).shape) for name, p in module.named_parameters()}


class SkipsInOneGroup(Blocks):
    """The ranks of the second group leave a block out, alike."""

    def through(self, x: Tensor) -> Tensor:
        x = self.first(x)
        skipped = 1 if self.trainer.global_rank > 1 else None
        for k, block in enumerate(self.blocks):
            x = x if k == skipped else x + block(x)
        return x


class Drifts(Blocks):
    """Rank 3 changes its rows by itself, between steps."""

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.global_rank == 3 and self.trainer.global_step == 1:
            with torch.no_grad():
                local(self.blocks[0][0].bias).add_(0.1)


def told(rank: int, module: Blocks, strategy: AMPStrategy, **options: Any) -> str:
    """The error, or the warnings, of a short run."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            trainer_of(rank, 4, strategy, max_epochs=1, **options).fit(module, loader(WAYS["by hand"].batches(rank)))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            dist.barrier()
    return " ".join(str(warning.message) for warning in caught)


def four(rank: int, ranks: int, folder: Path) -> Found:
    """In groups, with rows in the host's memory for the second epoch, and what is told."""
    warnings.simplefilter("ignore")
    found: Found = {
        "ways": ways(rank, 4, WAYS, groups),
        "single": single(rank, 4),
        "peak": measured(rank, 4, ("stack",), fsdp_ranks=2)["stack"],
        "saved": saved(rank, 4, folder / "groups", groups()),
        "refused": told(rank, SkipsInOneGroup(), groups()),
        "three": told(rank, Blocks(), AMPStrategy(strategies="fsdp", fsdp_ranks=3)),
    }
    counts = Counted()
    found["drifts"] = told(rank, Drifts(), groups(), callbacks=[counts])
    found |= {"counts": dict(counts.counts), "rows": counts.rows}
    start, on_host = folder / "groups" / ONE, groups(fsdp_offload=True, save_distributed_checkpoint=True)
    return found | {"on the host": saved(rank, 4, folder / "host", on_host, resume=start)}


pytestmark = [pytest.mark.ranks, pytest.mark.exhaustive, pytest.mark.release, pytest.mark.filterwarnings("ignore")]
OF_STEP = 16
"""Sums that a step without groups sends too."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hsdp")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Found:
    return {"ways": ways(None, 1, WAYS), "single": single(None, 1), "saved": saved(0, 1, folder / "plain")}


@pytest.fixture(scope="module")
def runs(plain: Found, folder: Path) -> list[Found]:
    return run_ranks(four, 4, folder, folder, timeout=240)


@pytest.mark.parametrize("name", WAYS)
def test_a_way_to_optimise_gives_what_one_process_gives(plain: Found, runs: list[Found], name: str) -> None:
    for rank, found in enumerate(runs):
        close(found["ways"][name], plain["ways"][name], f"{name}, rank {rank}")


def test_single_precision_differs_by_rounding(plain: Found, runs: list[Found]) -> None:
    state, norms = plain["single"]
    for found, found_norms in (run["single"] for run in runs):
        assert found_norms == pytest.approx(norms, rel=1e-3)
        torch.testing.assert_close(found, state, rtol=1e-4, atol=1e-5)


def test_a_rank_has_its_rows_of_the_group_and_one_sum_of_each_unit_is_sent_between_groups(
    plain: Found, runs: list[Found]
) -> None:
    for rank, found in enumerate(runs):
        assert found["rows"]["blocks.0.0.weight"] == ((4, 5), (3, 5))[rank % 2], "of 7"
        assert found["rows"]["shift"] == ((1, 1), (0, 1))[rank % 2], "of 1"
        assert found["rows"]["scale"] == (), "it has no dimension and is whole"
        # three blocks that are used, and the root, which is gathered once
        sent = {name: found["counts"][name] for name in ("_allgather_base_", "alltoall_base_", "allreduce_")}
        assert sent == {"_allgather_base_": 2 * 3 + 1, "alltoall_base_": 4, "allreduce_": 4 + OF_STEP}


def test_the_predicted_peak_is_the_measured_one(runs: list[Found]) -> None:
    module, batch = module_and_batch("stack")
    predicted = fsdp_peak_bytes(profile_module(module, batch, run_settings=UNDER_AMP), units_of(module), 2)
    most = max(found["peak"] for found in runs)
    assert abs(predicted - most) <= 0.05 * most, f"predicted {predicted:,}, measured {most:,}"


def test_two_epochs_with_a_checkpoint_between_them(folder: Path, plain: Found, runs: list[Found]) -> None:
    for rank, report in enumerate(runs):
        for job in ("saved", "on the host"):
            went_on(report[job], plain["saved"], f"{job}, rank {rank}")
    written = {path.name for path in (folder / "host/epoch=1.ckpt").glob("__*") if path.stat().st_size}
    assert written == {"__0_0.distcp", "__1_0.distcp"}, "of the first group alone"
    for name in (ONE, "epoch=1.ckpt"):
        found, expected = (torch.load(folder / run / name, weights_only=True) for run in ("groups", "plain"))
        same_checkpoint(found, expected, name)


def test_what_cannot_be_and_groups_that_drift_apart_are_told(runs: list[Found]) -> None:
    for found in runs:
        assert "'blocks.1', rank 2 gathers the parameters of 'blocks.2'" in found["refused"]
        assert "fsdp_ranks=3 is not supported, found 4 ranks" in found["three"]
    first, *others = (found["drifts"] for found in runs)
    for words in ("parameters differ between ranks", "'blocks.0.0.bias' by", "on ranks [3]"):
        assert words in first
    assert not any("differ between ranks" in other for other in others), "it is said once"
