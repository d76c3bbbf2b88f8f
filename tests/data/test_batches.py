"""Claim: whatever Lightning takes as a batch can be counted and compared; metrics are given back with their copies."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics import MetricTracker, SumMetric

from lightning_amp.data.sparse_counts import SparseCounts
from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.lightning.consistency.replicas import _print_of
from lightning_amp.lightning.steps.cells import GatherOver, count_cells, count_replicas_once
from tests.data.test_sparse_counts import CELLS, counts

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
