"""Train a few steps for `verify`: in one process, or as one of several ranks, and compare the results.

A global batch is split into contiguous parts whose sizes differ by one at most. In a batch {modality: mapping}, every
modality has its own number of cells and is split separately; otherwise the first dims of all tensors must be equal.

Rank 0 trains alone before it connects to the other ranks. It reads the batches from the user's data once; the ranks
use parts of the same batches. Files in a folder that all ranks can read:

    subject.pt          module and data from the user
    batches.pt          global batches
    one-float64.pt      record of the single process
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.utilities.apply_func import apply_to_collection  # type: ignore[attr-defined]
from lightning.pytorch import LightningDataModule, Trainer, seed_everything
from lightning.pytorch.plugins.environments import LightningEnvironment, TorchElasticEnvironment  # type: ignore[attr-defined]
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor

from lightning_amp._torch import AnyBatchNorm
from lightning_amp.data.files.directory import written_aside
from lightning_amp.data.sparse_counts import SparseCounts
from lightning_amp.errors import DataError
from lightning_amp.lightning.checkpoints.write_checkpoint import write_state
from lightning_amp.lightning.steps.loss_weight import count_cells, sizes_of
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.verification.compare import DTYPES, Precision, Record, Recorder, Report, common_factor, errors

CellValues = Tensor | SparseCounts | np.ndarray
"""Types whose first dim is the cell."""


def part_of(batch: Any, part: int, parts: int) -> Any:
    """Return the cells of one data rank."""
    if parts == 1:
        return batch
    sizes = sorted(sizes_of(batch))
    if count_cells(batch) is None:
        raise DataError(
            f"the batch cannot be split over {parts} ranks: its tensors have the first axes "
            f"{sizes!r}; allowed are tensors whose first axis is the sample, equally long in the "
            f"whole batch or in each modality of a batch {{modality: mapping}}: bring it into that "
            "form, or verify one data rank with model_parallel_size=devices"
        )
    if sizes[0] < parts:
        raise DataError(
            f"a batch of {sizes[0]!r} samples cannot be split over {parts} data ranks; every rank "
            f"needs a sample: give a batch of {parts} or more samples, or fewer devices"
        )

    def own(x: Any) -> Any:
        size, longer = divmod(len(x), parts)
        # the first parts have one more cell, as with torch.tensor_split
        start = part * size + min(part, longer)
        return x[start : start + size + (part < longer)]

    return _each(batch, own)


def converted(batch: Any, dtype: torch.dtype) -> Any:
    """Convert the floating point tensors of a batch to another dtype."""
    return _each(
        batch, lambda x: x if isinstance(x, np.ndarray) or not x.dtype.is_floating_point else x.to(dtype=dtype)
    )


def first_of(loaders: Any, steps: int) -> list[Any]:
    """Return the first batches, repeated if there are fewer; several loaders are combined as a Trainer does."""
    combined = loaders if isinstance(loaders, CombinedLoader) else CombinedLoader(loaders, "max_size_cycle")
    found = [batch for batch, _, _ in islice(combined, steps)]
    # ends the worker processes of the loaders
    combined.reset()
    if not found:
        raise DataError("a loader without batches was given; give one with at least one batch")
    return [found[step % len(found)] for step in range(steps)]


class RankLoader:
    """A training loader that serves one rank's part of global batches."""

    def __init__(self, batches: list[Any], *, ranks: int, place: Callable[[], tuple[int, int]]) -> None:
        """Store the batches; `place` returns data rank and number of data ranks, which are known after planning."""
        self._batches, self._place = batches, place
        cells = count_cells(batches[0])
        # cells per rank, for the plan's prediction; None if the number of cells is not known
        self.batch_size = None if cells is None else max(1, cells // ranks)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        return (part_of(batch, *self._place()) for batch in self._batches)

    def amp_example_batch(self) -> Any:
        """Return the first part, for planning: data ranks follow from the request at this time."""
        return part_of(self._batches[0], *self._place())


def _each(values: Any, change: Callable[[Any], Any]) -> Any:
    """Map everything that has cells in nested containers, as Lightning does when it moves a batch to a device."""
    return apply_to_collection(values, get_args(CellValues), lambda x: change(x) if x.shape else x)


QUIET: dict[str, Any] = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """What to train; `options` are those of AMPStrategy."""

    steps: int
    precisions: Sequence[Precision]
    options: Mapping[str, Any]
    timeout: float


def train_and_compare(rank: int, ranks: int, folder: Path, run: Training) -> list[Report]:
    """Train as one of the ranks in every precision; rank 0 first trains as the single process."""
    if rank == 0:
        for precision in run.precisions:
            train_one(folder, precision, run.steps)
    # rank 0 removes no files of the store, so that other ranks may connect at any time
    store = dist.FileStore(str(folder / "store"), ranks)  # type: ignore[attr-defined]
    wait = timedelta(seconds=run.timeout)
    store.set_timeout(wait)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=wait)
    return [train_rank(rank, ranks, folder, precision, run) for precision in run.precisions]


def train_one(folder: Path, precision: Precision, steps: int) -> None:
    """Train on the global batches in this process, with a Trainer without this package, and store the record."""
    one, *_ = _fit(folder, precision, steps)
    _keep(one, folder / f"one-{precision}.pt")


def train_rank(rank: int, ranks: int, folder: Path, precision: Precision, run: Training) -> Report:
    """Train as one of the ranks under the plan, and compare with the single process."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="localhost")
    strategy = AMPStrategy(**run.options)
    # buffers from a rank's own cells raise no error here, because they are compared and listed as suspects
    strategy.own_statistics = True
    record, place, given, module = _fit(folder, precision, run.steps, ranks=ranks, strategy=strategy)
    # written by rank 0 before it connected to other ranks
    one = torch.load(folder / f"one-{precision}.pt", weights_only=False)
    plan, sizes = strategy.plan, sizes_of(given)
    assert plan is not None, "there is a plan after a fit"
    shared = strategy.share_batch_statistics or place[1] == 1
    return Report(
        precision=precision,
        place=place,
        losses=record.losses,
        one_losses=one.losses,
        all_cells=count_cells(given) or 0,
        errors={
            kind: errors(getattr(record, kind), getattr(one, kind)) for kind in ("gradients", "parameters", "buffers")
        },
        factor=common_factor(record.gradients, one.gradients),
        draws=one.draws,
        differing_buffers=record.differing_buffers,
        unshared=[] if shared else [n for n, m in module.named_modules() if isinstance(m, AnyBatchNorm)],
        uneven=len(sizes) > 1 and any(n % place[1] for n in sizes),
        strategies=plan.strategies,
        mesh=(plan.mesh.data, plan.mesh.model),
    )


def _fit(
    folder: Path, precision: Precision, steps: int, *, ranks: int = 1, strategy: AMPStrategy | None = None
) -> tuple[Record, tuple[int, int], Any, torch.nn.Module]:
    """Train, and return the record, the rank's (data rank, data ranks), the first global batch and the module."""
    seed_everything(0, verbose=False)
    module, data = torch.load(folder / "subject.pt", map_location="cpu", weights_only=False)
    dtype = DTYPES[precision]
    # not `to(dtype)`, which would make complex parameters real
    module = module.double() if dtype == torch.float64 else module.float()
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_complex():
            tensor.data = tensor.data.to(torch.promote_types(dtype, torch.complex64))
    used: list[Any] = []

    # called when a loader is read, because the plan decides the data ranks, and is made after the loaders
    def place() -> tuple[int, int]:
        if strategy is None:
            return 0, 1
        kwargs = strategy.distributed_sampler_kwargs
        return kwargs["rank"], kwargs["num_replicas"]

    def loader() -> RankLoader:
        path = folder / "batches.pt"
        if not path.exists():
            _keep(first_of(given(), steps) if isinstance(data, LightningDataModule) else data, path)
        # read from the file on rank 0 too, so that all runs use the same batches, even if the user's loader is random
        used.extend(torch.load(path, weights_only=False))
        return RankLoader([converted(batch, dtype) for batch in used], ranks=ranks, place=place)

    recorder = Recorder()
    trainer = Trainer(
        **QUIET,
        accelerator="cpu",
        devices=ranks,
        precision="64-true" if dtype is torch.float64 else "32-true",
        strategy=strategy or "auto",
        plugins=[LightningEnvironment() if strategy is None else TorchElasticEnvironment()],
        callbacks=[recorder],
        max_epochs=1,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
    )
    if isinstance(data, LightningDataModule):
        given, data.train_dataloader = data.train_dataloader, loader  # type: ignore[method-assign]
        trainer.fit(module, datamodule=data)
    else:
        trainer.fit(module, loader())
    return recorder.record, place(), used[0], module


def _keep(value: Any, path: Path) -> None:
    try:
        with written_aside(path) as aside, aside.open("wb") as file:
            write_state(value, file)
    except DataError as error:
        raise DataError(f"{error}. TMPDIR says where verify keeps its files") from error
