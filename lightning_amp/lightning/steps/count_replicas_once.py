"""Count metrics once per model group, whose ranks see the same cells.

A torchmetrics Metric gathers its states over the data axis instead of over all ranks: sums, counts and concatenations
hold every cell once, and every rank computes the same value. It learns this from its `dist_sync_fn`, not by its
`process_group`, because a mesh can be deep-copied with the metric (`MetricTracker`, `clone`) and a process group
cannot.

`self.log(..., sync_dist=True)` reduces over all ranks. A mean, a maximum and a minimum are the same whether a cell
comes once or M times; a sum is divided by M, the ranks of a model group.

Known limits: metrics that are no children of the module are not found; `metric.sync()` called by hand without a group
gathers from all ranks.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors


@dataclass(frozen=True, eq=False, slots=True)
class GatherOver:
    """A metric's `dist_sync_fn`: every rank's tensor, of the ranks of one mesh axis."""

    mesh: DeviceMesh

    def __call__(self, value: Tensor, group: object = None) -> list[Tensor]:
        """Gather; `group` is the metric's `process_group`, which is None where this is installed."""
        return gather_all_tensors(value, group=self.mesh.get_group())


def count_replicas_once(module: nn.Module, mesh: DeviceMesh) -> Callable[[], None]:
    """Let the metrics of a module gather over the data axis of a mesh; returns what takes it back.

    Metrics with a `process_group` or a `dist_sync_fn` of the user's are left as they are.
    """
    # a copy of another run's metric, which was no child of the module at that run's end
    _take_back(module)
    if mesh["model"].size() > 1:
        for metric in _metrics(module):
            if metric.process_group is None and metric.dist_sync_fn is None:
                metric.dist_sync_fn = GatherOver(mesh["data"])
    return partial(_take_back, module)


def _metrics(module: nn.Module) -> Iterator[Metric]:
    return (child for child in module.modules() if isinstance(child, Metric))


def _take_back(module: nn.Module) -> None:
    """Of copies that were made meanwhile, too."""
    for metric in _metrics(module):
        if isinstance(metric.dist_sync_fn, GatherOver):
            metric.dist_sync_fn = None


def unrounded(value: Tensor, reduce_op: str) -> Tensor:
    """Before a reduction: a mean of integers is not an integer."""
    mean = reduce_op.lower() in ("mean", "avg")
    integer = not (value.is_floating_point() or value.is_complex())
    return value.to(torch.get_default_dtype()) if mean and integer else value


def counted_once(value: Tensor, reduce_op: str, *, model_ranks: int) -> Tensor:
    """After a reduction over all ranks: every rank of a model group has added the same cells."""
    if reduce_op.lower() != "sum" or model_ranks == 1:
        return value
    return (value / model_ranks).to(value.dtype)
