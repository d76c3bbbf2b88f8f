"""The cells of a step depend on (seed, epoch, step) and the global batch alone; whatever Lightning takes as a batch can
be counted and compared."""

from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torchmetrics import MetricTracker, SumMetric

from lightning_amp.data.batch import draw_keys
from lightning_amp.data.loading.dataset import MultiModalDataset, StepIndices
from lightning_amp.data.loading.sampler import StepLoader, StepSampler
from lightning_amp.data.sparse_counts import SparseCounts
from lightning_amp.errors import DataError
from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.lightning.consistency.replicas import _print_of
from lightning_amp.lightning.steps.cells import GatherOver, count_replicas_once
from lightning_amp.lightning.steps.loss_weight import count_cells
from tests.any_module import QUIET
from tests.data.test_sparse_counts import CELLS, counts
from tests.optimised import Optimised

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec.* is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning"),
]


def depths(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(8, 0.8, n).round()


CONTACTS = {"hic": depths(53), "rna": depths(31, 1)}


def ranks(n: int, batch_size: int, *, epoch: int = 0, **options: Any) -> list[list[StepIndices]]:
    found = []
    for rank in range(n):
        sampler = StepSampler(CONTACTS, batch_size, num_replicas=n, rank=rank, **options)
        sampler.set_epoch(epoch)
        found.append(list(sampler))
    return found


def union(steps: tuple[StepIndices, ...], modality: str) -> list[int]:
    return sorted(row for step in steps if modality in step.rows for row in step.rows[modality].tolist())


@pytest.mark.parametrize("balanced", [False, True])
def test_global_batch_does_not_depend_on_the_number_of_ranks(balanced: bool) -> None:
    alone = ranks(1, 8, epoch=3)[0]
    for n in (2, 4):
        split = list(zip(*ranks(n, 8 // n, epoch=3, balance=balanced), strict=True))
        assert len(split) == len(alone)
        for steps, whole in zip(split, alone, strict=True):
            for modality in CONTACTS:
                assert union(steps, modality) == sorted(whole.rows[modality].tolist())
            assert {step.draw_key for step in steps} == {whole.draw_key}


@pytest.mark.parametrize("balanced", [False, True])
def test_batches_are_full_and_equal_and_cover_every_cell(balanced: bool) -> None:
    steps = ranks(3, 5, balance=balanced)
    assert {len(s) for s in steps} == {4}  # ceil(53 / 15)
    for modality, contacts in CONTACTS.items():
        sizes = {len(step.rows[modality]) for rank in steps for step in rank}
        seen = np.concatenate([step.rows[modality] for rank in steps for step in rank])
        assert sizes == {5}
        assert set(seen.tolist()) == set(range(len(contacts)))
        counts = np.bincount(seen)
        assert counts.max() - counts.min() <= 1  # no cell twice more often than another


def test_order_is_a_function_of_seed_and_epoch() -> None:
    def rows(seed: int, epoch: int) -> list[list[int]]:
        return [step.rows["hic"].tolist() for step in ranks(1, 8, seed=seed, epoch=epoch)[0]]

    assert rows(0, 0) == rows(0, 0)
    assert rows(0, 0) != rows(0, 1)
    assert rows(0, 0) != rows(1, 0)
    fixed = [ranks(1, 8, shuffle=False, epoch=epoch)[0][0].rows["hic"].tolist() for epoch in (0, 1)]
    assert fixed == [list(range(8))] * 2


def test_balance_is_closer_to_equal_than_dealing() -> None:
    def spread(balanced: bool) -> float:
        steps = zip(*ranks(4, 3, balance=balanced), strict=True)
        sums = np.array([[CONTACTS["hic"][step.rows["hic"]].sum() for step in rank] for rank in steps])
        return float((sums.max(axis=1) / sums.mean(axis=1)).mean())

    assert spread(True) < 1.25 < spread(False)


def test_evaluation_takes_every_cell_once_in_order() -> None:
    steps = list(zip(*ranks(3, 4, cycle=False), strict=True))
    assert len(steps) == 5  # ceil(53 / 12)
    for modality, contacts in CONTACTS.items():
        rows = [row for step in steps for rank in step for row in rank.rows.get(modality, np.empty(0)).tolist()]
        assert rows == list(range(len(contacts)))
    present = [[sorted(rank.rows) for rank in step] for step in steps]
    assert present == [[["hic", "rna"]] * 3] * 3 + [[["hic"]] * 3] * 2  # rna has run out, on all ranks alike


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(DataError, match=r"modalities without cells: \['rna'\] of \['hic', 'rna'\]"):
        StepSampler({"hic": depths(3), "rna": depths(0)}, 2)
    with pytest.raises(DataError, match="modalities without cells"):
        StepSampler({}, 2)


class Echo(MultiModalDataset):
    """Returns the rows themselves instead of reading cells."""

    def __init__(self) -> None:
        super().__init__({})

    def __getitem__(self, step: StepIndices) -> Any:
        draw = torch.from_numpy(draw_keys(step.draw_key, "hic", step.rows["hic"]))
        return {"hic": {"index": torch.from_numpy(step.rows["hic"]), "draw": draw}}


class Recorder(Optimised, by=torch.optim.SGD, lr=0.1):
    """Notes the cells of each step; stops as a crash would in front of the step `crash_at`."""

    def __init__(self, crash_at: int | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[tuple[int, list[int], list[int]]] = []
        self.crash_at = crash_at

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.crash_at == self.global_step:
            raise RuntimeError("crash")
        cells = batch["hic"]
        self.seen.append((self.current_epoch, cells["index"].tolist(), cells["draw"].tolist()))
        return self.weight * 0


def fit(folder: Path, module: Recorder, *, ckpt: Path | None = None, workers: int = 0, **options: Any) -> pl.Trainer:
    checkpoints = [
        ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1),
        ModelCheckpoint(folder, filename="end-{epoch}", every_n_epochs=1, save_top_k=-1),
    ]
    given = QUIET | {"enable_checkpointing": True} | options
    trainer = pl.Trainer(accelerator="cpu", devices=1, max_epochs=3, callbacks=checkpoints, **given)
    loader = StepLoader(Echo(), StepSampler({"hic": depths(19)}, 4), num_workers=workers)
    trainer.fit(module, loader, ckpt_path=ckpt)
    return trainer


@pytest.mark.long
@pytest.mark.parametrize(("crash_at", "workers"), [(3, 2), (5, 0), (9, 0)], ids=lambda value: str(value))
def test_interrupted_run_sees_exactly_the_remaining_cells(tmp_path: Path, crash_at: int, workers: int) -> None:
    whole = Recorder()
    fit(tmp_path / "whole", whole)
    assert len(whole.seen) == 15
    assert sorted(chain(*(cells for epoch, cells, _ in whole.seen if epoch == 1))) != list(range(19))

    first, second = Recorder(crash_at), Recorder()
    with pytest.raises(RuntimeError, match="crash"):
        fit(tmp_path, first, workers=workers)
    assert first.seen == whole.seen[:crash_at]
    fit(tmp_path, second, ckpt=tmp_path / f"step={crash_at}.ckpt", workers=workers)
    assert second.seen == whole.seen[crash_at:]


@pytest.mark.parametrize("at", [2, 3])
def test_epochs_cut_short_resume_too(tmp_path: Path, at: int) -> None:
    whole, rest = Recorder(), Recorder()
    fit(tmp_path, whole, limit_train_batches=3)
    fit(tmp_path, rest, ckpt=tmp_path / f"step={at}.ckpt", limit_train_batches=3)
    assert len(whole.seen) == 9
    assert rest.seen == whole.seen[at:]


def test_state_counts_what_was_delivered_not_what_was_prefetched() -> None:
    loader = StepLoader(Echo(), StepSampler({"hic": depths(40)}, 4), num_workers=1)
    batches = iter(loader)
    assert loader.state_dict() == {"epoch": 0, "step": 0, "global_batch": 4}
    seen = [next(batches)["hic"]["index"].tolist() for _ in range(3)]
    state = loader.state_dict()
    assert state == {"epoch": 0, "step": 3, "global_batch": 4}
    del batches

    again = StepLoader(Echo(), StepSampler({"hic": depths(40)}, 4))
    again.load_state_dict(state)
    assert again.state_dict() == state
    rest = [batch["hic"]["index"].tolist() for batch in again]
    assert sorted(chain(*seen, *rest)) == list(range(40))
    assert again.state_dict() == {"epoch": 1, "step": 0, "global_batch": 4}


def test_state_carries_over_to_another_number_of_ranks() -> None:
    alone = StepLoader(Echo(), StepSampler({"hic": depths(40)}, 8))
    list(zip(alone, range(2), strict=False))
    state = alone.state_dict()
    cells: list[int] = []
    for rank in range(2):
        loader = StepLoader(Echo(), StepSampler({"hic": depths(40)}, 4, num_replicas=2, rank=rank))
        loader.load_state_dict(state)
        cells += chain(*(batch["hic"]["index"].tolist() for batch in loader))
    whole = [batch["hic"]["index"].tolist() for batch in StepLoader(Echo(), StepSampler({"hic": depths(40)}, 8))]
    assert sorted(cells) == sorted(chain(*whole[state["step"] :]))


def test_state_of_another_global_batch_is_refused_in_mid_epoch_only() -> None:
    loader = StepLoader(Echo(), StepSampler({"hic": depths(40)}, 4, num_replicas=2, rank=0))
    with pytest.raises(DataError, match=r"mid-epoch \(epoch 1, step 3\) with 4 cells.*this run has 8 \(2"):
        loader.load_state_dict({"epoch": 1, "step": 3, "global_batch": 4})
    loader.load_state_dict({"epoch": 1, "step": 0, "global_batch": 4})
    assert loader.state_dict() == {"epoch": 1, "step": 0, "global_batch": 8}


ROWS = [torch.ones(2), torch.ones(3)]
KINDS: dict[str, Any] = {
    "nested": lambda by: torch.nested.nested_tensor([by * row for row in ROWS]),
    "jagged": lambda by: torch.nested.nested_tensor([by * row for row in ROWS], layout=torch.jagged),
    "other byte order": lambda by: by * np.ones(3, dtype=">f4"),
    "long double": lambda by: by * np.ones(3, dtype=np.longdouble),
    "one number": lambda by: np.array(by),
    "read only": lambda by: np.broadcast_to(np.full(1, by), (5,)),
    "backwards": lambda by: np.arange(by, by + 5)[::-1],
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_is_told_from_another(kind: str) -> None:
    first, same, other = ({"x": KINDS[kind](by)} for by in (1.0, 1.0, 2.0))
    assert _print_of(first) == _print_of(same) != _print_of(other)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_rows_of_any_length_are_cells() -> None:
    for kind in ("nested", "jagged"):
        assert count_cells({"x": KINDS[kind](1.0), "y": torch.ones(2, 4), "z": torch.ones(())}) == 2


def test_copies_of_metrics_are_given_back_too() -> None:
    axis: Any = SimpleNamespace(size=lambda: 2)
    mesh: Any = {"data": SimpleNamespace(), "model": axis}
    own, left = SumMetric(dist_sync_fn=lambda value, group: [value]), SumMetric()
    left.dist_sync_fn = GatherOver(mesh["data"])
    module = nn.ModuleDict({"tracked": MetricTracker(SumMetric(), maximize=True), "own": own, "left": left})
    undo = count_replicas_once(module, mesh)
    module["tracked"].increment()  # type: ignore[operator]
    others = [metric for metric in module.modules() if isinstance(metric, SumMetric) and metric is not own]
    assert len(others) == 3
    assert all(type(metric.dist_sync_fn) is GatherOver for metric in others)
    undo()
    assert all(metric.dist_sync_fn is None for metric in others)
    assert own.dist_sync_fn is not None
    left.dist_sync_fn = GatherOver(mesh["data"])
    axis.size = lambda: 1
    count_replicas_once(module, mesh)
    assert left.dist_sync_fn is None, "of a run on another mesh"


def test_what_reads_a_batch_reads_sparse_counts() -> None:
    x = SparseCounts.from_dense(counts())
    assert count_cells({"hic": {"x": x}}) == CELLS
    assert count_cells([x, torch.zeros(CELLS, 2)]) == CELLS
    assert count_cells([x, torch.zeros(2)]) is None
    live = LiveBytes()
    live.watch([{"hic": {"x": x}}])
    assert live.current == sum(tensor.nbytes for tensor in x.tensors()) == 24 * len(x.value)
    before = _print_of({"x": x})
    x[:, :3]
    assert _print_of({"x": x}) == before, "whatever was looked up of it"
    for part in ("row", "column", "value"):
        other = SparseCounts.from_dense(counts())
        getattr(other, part)[3] += 1
        assert _print_of({"x": other}) != before, part
