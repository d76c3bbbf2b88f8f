"""Distribute the samples (cells) of loaders over ranks, and reduce metrics without duplicates.

Order: with several ranks, Lightning adds a distributed sampler to every loader, which shuffles in training, even if
the data axis has one rank. Here, a single data rank reads the loader unchanged. If the loader does not shuffle, rank r
of R data ranks reads

    cells[r::R],        cells = the loader's next R batches, of b cells each

Together the ranks read the batch of a plain run with batch size R b, also with incomplete batches and drop_last. A
loader with torch's RandomSampler gets Lightning's sampler, as under DDP. In prediction every loader does.

Metrics: a torchmetrics Metric gathers its states over the data axis instead of over all ranks. Sums, counts and
concatenations then contain every cell once, and every rank computes the same value. This uses the metric's
`dist_sync_fn`, not `process_group`, because a mesh can be deep-copied with the metric (`MetricTracker`, `clone`) and a
process group cannot. `self.log(..., sync_dist=True)` reduces over all ranks, where every cell occurs M times, once per
rank of a model group: this does not change a mean, a maximum or a minimum, and a sum is divided by M.

Known limits: if the last batch has fewer cells than ranks, one cell is read more than once, with a warning. A random
order of another kind of sampler is equal on all ranks, but differs from that of a plain run. Metrics that are not
children of the module are not detected. `metric.sync()` called by hand without a group gathers from all ranks.
"""

import copy
import os
import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, Sampler, SequentialSampler
from torchmetrics import Metric
from torchmetrics.utilities.distributed import gather_all_tensors

from lightning_amp.errors import DataError
from lightning_amp.lightning._compat import DataConnector, rank_zero_warn
from lightning_amp.random_streams import isolated_random_streams


class CellOrder(DataConnector):
    """A DataConnector that chooses the sampler of every loader; replaces the class of the Trainer's connector."""

    def _requires_distributed_sampler(self, dataloader: DataLoader[Any]) -> bool:
        return self._share()["num_replicas"] > 1 and super()._requires_distributed_sampler(dataloader)

    def _prepare_dataloader(self, dataloader: object, shuffle: bool, mode: RunningStage) -> object:
        if (
            not isinstance(dataloader, DataLoader)
            or mode == RunningStage.PREDICTING
            or not self._requires_distributed_sampler(dataloader)
            or _permutes(dataloader.sampler, dataloader.dataset)
        ):
            return super()._prepare_dataloader(dataloader, shuffle, mode)
        run = self.trainer.strategy
        own = OwnCells(
            dataloader, same=lambda n: run.reduce_boolean_decision(run.broadcast(n) == n, all=True), **self._share()
        )
        read = "sampler" if dataloader.batch_sampler is None else "batch_sampler"
        # also as `sampler`, because Lightning passes the epoch to it
        return _with(dataloader, **{"sampler": own, read: own})

    def _share(self) -> dict[str, int]:
        kwargs = self.trainer.distributed_sampler_kwargs
        assert kwargs is not None, "every AMPStrategy has them"
        return kwargs


class OwnCells(DistributedSampler[Any]):
    """Sample this rank's part of every batch, or of every R items if the loader makes no batches."""

    def __init__(
        self, loader: DataLoader[Any], *, num_replicas: int, rank: int, same: Callable[[int], bool] | None = None
    ) -> None:
        """Distribute what `loader` reads; `same`, a collective of all ranks, returns whether their values are equal.

        Raises DataError: the loader's order has no length, which is required to know the last step.
        """
        self.batched = loader.batch_sampler is not None
        order: Any = loader.batch_sampler if self.batched else loader.sampler
        try:
            len(order)
        except TypeError as error:
            raise DataError(
                f"{num_replicas} ranks cannot share the samples of a loader whose sampler has no length"
                f" ({error}); give it a __len__, or Trainer(use_distributed_sampler=False) with a sampler"
                " that makes the shares itself, by trainer.distributed_sampler_kwargs"
            ) from None
        seed = int(os.environ.get("PL_GLOBAL_SEED", "0"))
        super().__init__(order, num_replicas=num_replicas, rank=rank, shuffle=False, seed=seed)
        self.order, self._same = order, same
        self._next: tuple[int, list[Any]] | None = None
        """Epoch and order, stored by `set_epoch` until they are read."""

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch to the user's sampler, and draw the epoch's order; Lightning calls this on all ranks.

        Raises:
            DataError: The ranks have drawn different orders, so that samples would be missed or repeated.
        """
        super().set_epoch(epoch)
        _tell_epoch(self.order, epoch)
        _tell_epoch(getattr(self.order, "sampler", None), epoch)
        # a batch sampler of another class may draw random numbers itself
        drawing = self.order.sampler if type(self.order) is BatchSampler else self.order
        if self._same is None or isinstance(drawing, SequentialSampler):
            return
        if self._next is not None and self._next[0] == epoch:
            return
        self._next = epoch, self._drawn()
        text = repr(self._next[1])
        # without a __repr__, the text has an object's address, which differs between ranks
        if not self._same(0 if " at 0x" in text else zlib.crc32(text.encode())):
            raise DataError(
                f"the ranks draw different orders from {type(drawing).__name__!r}, so that some samples would be read"
                " by several of them and others by none; let it draw from the random numbers of torch, numpy or random,"
                " or seed its generator in set_epoch(epoch); one that makes the shares itself requires"
                " Trainer(use_distributed_sampler=False)"
            )

    def __len__(self) -> int:
        whole, rest = divmod(len(self.order), self.num_replicas)
        drops = self.batched and bool(getattr(self.order, "drop_last", False))
        return whole + bool(rest and not drops)

    def __iter__(self) -> Iterator[Any]:
        known, self._next = self._next, None
        found = iter(known[1] if known is not None and known[0] == self.epoch else self._drawn())
        for _ in range(len(self)):
            group = [*islice(found, self.num_replicas)]
            cells = [*chain.from_iterable(group)] if self.batched else group
            if len(cells) < self.num_replicas:
                rank_zero_warn(
                    f"The last batch has {len(cells)} samples for {self.num_replicas} ranks of the data axis, so its"
                    " last sample is read by several of them and counts more than once. With drop_last=True, or another"
                    " batch_size, every sample counts once."
                )
            # R batches of the loader are one step of R ranks, of which this rank reads every R-th cell
            mine = cells[self.rank :: self.num_replicas] or cells[-1:]
            yield mine if self.batched else mine[0]

    def _drawn(self) -> list[Any]:
        """Return the loader's order of this epoch, drawn with a seed that is equal on all ranks."""
        with isolated_random_streams():
            torch.default_generator.manual_seed(self.seed + self.epoch)
            np.random.seed((self.seed + self.epoch) % 2**32)
            random.seed(self.seed + self.epoch)
            return list(self.order)


class SameDraws(Sampler[Any]):
    """A sampler that draws from the ranks' random streams, which are made equal before every epoch."""

    def __init__(self, sampler: Any, agree: Callable[[], None]) -> None:
        self.sampler, self.agree = sampler, agree

    def set_epoch(self, epoch: int) -> None:
        """Make the random streams equal; called on all ranks before they draw."""
        self.agree()
        _tell_epoch(self.sampler, epoch)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)


def with_same_draws(loader: object, agree: Callable[[], None]) -> object:
    """Make the ranks of a model group draw the same order; `agree` is a collective that makes random streams equal.

    Objects other than torch's loaders are returned unchanged.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.sampler, DistributedSampler):
        return loader
    return _with(loader, sampler=SameDraws(loader.sampler, agree))


def _permutes(order: object, dataset: Any) -> bool:
    """Whether the order is a random permutation of the data set."""
    return isinstance(order, RandomSampler) and not order.replacement and order.num_samples == len(dataset)


def _with(loader: DataLoader[Any], **samplers: Any) -> DataLoader[Any]:
    """Copy the loader with other samplers; the user's loader does not change."""
    changed = copy.copy(loader)
    # torch forbids setting them, and a subclass cannot be created without knowing its arguments
    changed.__dict__.update(samplers, _iterator=None)
    return changed


def _tell_epoch(sampler: object, epoch: int) -> None:
    tell = getattr(sampler, "set_epoch", None)
    if callable(tell):
        tell(epoch)


@dataclass(frozen=True, eq=False, slots=True)
class GatherOver:
    """A metric's `dist_sync_fn` that gathers a tensor over the ranks of one mesh axis."""

    mesh: DeviceMesh

    def __call__(self, value: Tensor, group: object = None) -> list[Tensor]:
        """Gather; `group` is the metric's `process_group`, which is None for these metrics."""
        return gather_all_tensors(value, group=self.mesh.get_group())


def count_replicas_once(module: nn.Module, mesh: DeviceMesh) -> Callable[[], None]:
    """Make the metrics of a module gather over the data axis of a mesh; return an undo.

    Metrics with a user's `process_group` or `dist_sync_fn` do not change.
    """
    # a metric copied in an earlier run may still gather over that run's mesh
    _take_back(module)
    if mesh["model"].size() > 1:
        for metric in _metrics(module):
            if metric.process_group is None and metric.dist_sync_fn is None:
                metric.dist_sync_fn = GatherOver(mesh["data"])
    return partial(_take_back, module)


def _metrics(module: nn.Module) -> Iterator[Metric]:
    return (child for child in module.modules() if isinstance(child, Metric))


def _take_back(module: nn.Module) -> None:
    """Remove `GatherOver` from the module's metrics, including copies made during the run."""
    for metric in _metrics(module):
        if isinstance(metric.dist_sync_fn, GatherOver):
            metric.dist_sync_fn = None


def unrounded(value: Tensor, reduce_op: str) -> Tensor:
    """Convert an integer before a mean, whose result is not an integer."""
    mean = reduce_op.lower() in ("mean", "avg")
    integer = not (value.is_floating_point() or value.is_complex())
    return value.to(torch.get_default_dtype()) if mean and integer else value


def counted_once(value: Tensor, reduce_op: str, *, model_ranks: int) -> Tensor:
    """Divide a sum over all ranks by the model ranks, each of which has added the same cells."""
    if reduce_op.lower() != "sum" or model_ranks == 1:
        return value
    # true division would convert integers to the default dtype, which may round
    integer = not (value.is_floating_point() or value.is_complex())
    return value // model_ranks if integer else value / model_ranks
