"""Read an example batch and the batch size from the Trainer's loaders, without side effects on the run.

For a map-style data set the loader's iterator is not used, because it may draw random numbers or start workers. The
first batch is made in this process, with the loader's `collate_fn`:

    sampler of torch    the first items of the data set; on other ranks than rank 0 the first of their part
    other samplers      the first indices of a copy of the sampler

The first batch of a stream is read and given to training first (read_ahead.py), unless the loader has a method
`amp_example_batch`, which returns a batch that training does not read.

The batch is made inside `without_side_effects` (no_side_effects.py), which restores settings and suppresses output. The
state of data set, sampler and `collate_fn` is copied (restore_state.py), so that counters and random generators do not
advance.

Known limits: side effects of an item outside the process, such as moving the position in an open file, happen once
more; lists and dictionaries longer than `restore_state.LONG` are not copied; `worker_init_fn` is not called.
"""

from collections.abc import Callable, Sized
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from lightning_amp._torch import tree_leaves, tree_map
from lightning_amp.errors import DataError
from lightning_amp.footprint.copies.no_side_effects import without_side_effects
from lightning_amp.footprint.copies.restore_state import copied_state
from lightning_amp.lightning._compat import request_dataloader
from lightning_amp.lightning.profiling.read_ahead import first_batch, is_stream, read_ahead
from lightning_amp.random_streams import drawn_between, isolated_random_streams, random_streams
from lightning_amp.techniques.contract.protocol import find_decoders

UNKNOWN = (
    "the batch size is not known: predicted for 1 sample; give the data module, or the training loader, an attribute"
    " batch_size, the samples per rank and step"
)

EVERY = slice(None)
CellsOrReason = tuple[int | None, str]
"""Samples per rank and step; or None, and what to do."""


def cells_per_step(trainer: pl.Trainer) -> CellsOrReason:
    """Return the samples (cells) per rank and step.

    The number is the attribute `batch_size` of the data module, the module or the loader, else that of the training
    loaders; the largest if there are several. The loaders are created only if the module has a decoder: otherwise the
    profile of its step determines the number.
    """
    source = trainer.fit_loop._data_source
    if (size := _largest(source.instance)) is not None:
        return size, ""
    if not source.is_module() or not trainer.training or not find_decoders(trainer.lightning_module):
        return None, UNKNOWN
    loaders, why = loaders_of(trainer)
    if (size := _largest(loaders)) is not None:
        return size, ""
    return None, f"{UNKNOWN} ({why}, before training)" if why else UNKNOWN


def loaders_of(trainer: pl.Trainer, loop: Any = None) -> tuple[object, str]:
    """Return the loaders of a loop, by default of training, and ""; or None and the reason.

    The loop's hook, such as `train_dataloader`, is called once, and the Trainer uses the same loaders. There are two
    exceptions. If the hook draws random numbers, the Trainer calls it again, where a plain run calls it. If a sampler
    is distributed already, the Trainer calls it again after planning, because the plan sets the number of replicas. All
    ranks must call this function, because the hook may communicate. With `reload_dataloaders_every_n_epochs` the hook
    is not called, and the result is (None, "").
    """
    source: Any = (trainer.fit_loop if loop is None else loop)._data_source
    if not source.is_module():
        return source.instance, ""
    if not source.is_defined() or getattr(trainer, "reload_dataloaders_every_n_epochs", False):
        return None, ""
    try:
        loaders, drew = _loaders(source)
    except Exception as error:
        # the hook may depend on a later hook; the Trainer raises errors that remain
        return (None, f"{type(source.instance).__name__}.{source.name}() gave {type(error).__name__}: {error}")
    # see the docstring: random draws, and samplers that depend on the plan
    samplers = [getattr(loader, "sampler", None) for loader in each(loaders)]
    if not drew and not any(isinstance(sampler, DistributedSampler) for sampler in samplers):

        def dataloader() -> object:
            # the Trainer's next call of the hook gives these loaders, once
            del source.dataloader
            return loaders

        source.dataloader = dataloader
    elif _streams(loaders):
        # a batch that is read from these loaders would be missing in those of the Trainer's own call
        return None, f"{type(source.instance).__name__}.{source.name}() draws random numbers, and gives a stream"
    return loaders, ""


def steps_of_run(trainer: pl.Trainer) -> float:
    """Return the training steps of a run, at most; inf if it ends by something else. All ranks must call it."""
    of_epoch = [len(loader) for loader in each(loaders_of(trainer)[0]) if isinstance(loader, Sized)]
    limit, epochs = trainer.limit_train_batches, trainer.max_epochs
    batches = max(of_epoch, default=inf)
    batches = min(batches, limit) if isinstance(limit, int) else batches * (limit or 0.0)
    steps = inf if epochs in (None, -1) else epochs * batches
    return min(steps, trainer.max_steps) if trainer.max_steps >= 0 else steps


def forget_loaders(trainer: pl.Trainer) -> None:
    """Drop loaders that the Trainer has not used, because the run has ended early; another run may use others."""
    loops = (trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop)
    for loop in (*loops, trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        vars(loop._data_source).pop("dataloader", None)


def _loaders(source: Any) -> tuple[object, bool]:
    """Return the hook's loaders, and whether it drew random numbers; random state is restored."""
    with isolated_random_streams():
        before = random_streams()
        return request_dataloader(source), bool(drawn_between(before, random_streams()))


def each(loaders: object) -> list[Any]:
    """Flatten nested loaders into a list."""
    return loaders.flattened if isinstance(loaders, CombinedLoader) else tree_leaves(loaders)


def _largest(loaders: object) -> int | None:
    parts = (part for one in each(loaders) for part in (one, getattr(one, "batch_sampler", None)))
    sizes = (getattr(part, "batch_size", None) for part in parts)
    return max((size for size in sizes if isinstance(size, int) and size >= 1), default=None)


def own_rows(trainer: pl.Trainer) -> slice:
    """Return the rows that the Trainer's distributed sampler gives this rank; rank 0's example has all of them."""
    rank = trainer.global_rank if trainer._accelerator_connector.use_distributed_sampler else 0
    return slice(rank, None, trainer.world_size) if rank else EVERY


def example_batch(loaders: object, why: str = "", *, own: slice = EVERY) -> Any:
    """Return the batch that one step reads from a loader, or from a dictionary, list or CombinedLoader of several.

    Args:
        loaders, why: As `loaders_of` returns them.
        own: Rows of the data set of which the batch is; only for torch's samplers, which the Trainer replaces.

    Raises:
        DataError: No batch can be read without consuming training data, or reading it raised an error.
    """
    if loaders is None:
        raise DataError(why or "the loader is created again every few epochs, or there is none")
    given = loaders.iterables if isinstance(loaders, CombinedLoader) else loaders
    return tree_map(partial(_example_of, own=own), given)


def read_streams_ahead(loaders: object) -> None:
    """Read the first batch of every stream among the loaders, and keep it for training (read_ahead.py).

    All ranks must call this function, because a stream may communicate. `example_batch` raises errors.
    """
    for loader in _streams(loaders):
        with suppress(DataError):
            read_ahead(loader)


def _streams(loaders: object) -> list[Any]:
    found = [] if loaders is None else each(loaders)
    return [loader for loader in found if not hasattr(loader, "amp_example_batch") and is_stream(loader)]


def _example_of(loader: Any, own: slice = EVERY) -> Any:
    if isinstance(loader, CombinedLoader):
        return example_batch(loader, own=own)
    if hasattr(loader, "amp_example_batch"):
        return loader.amp_example_batch()
    if is_stream(loader):
        return first_batch(loader)
    try:
        return _first_batch(loader, own)
    except Exception as error:
        raise DataError(
            f"no example batch could be read from {type(loader.dataset).__name__!r}, which raised "
            f"{type(error).__name__}: {error}"
        ) from error


def _rows(loader: DataLoader[Any], own: slice) -> range:
    rows = range(len(loader.dataset))  # type: ignore[arg-type]
    # a data set with fewer rows than ranks gives some of them again
    return rows[own] or rows


def _first_batch(loader: DataLoader[Any], own: slice) -> Any:
    # one memo for all copies: a sampler that holds the data set then holds the copy
    memo: dict[int, Any] = {}
    dataset, collate = copied_state(loader.dataset, memo), copied_state(loader.collate_fn, memo)
    batches = None if loader.batch_sampler is None else copied_state(loader.batch_sampler, memo)
    order = copied_state(loader.sampler, memo)
    with without_side_effects(dataset, collate, *memo.values()):
        torchs = type(order) in (SequentialSampler, RandomSampler)
        read = order if batches is None else batches
        index: Any
        if torchs and batches is None:
            index = _rows(loader, own)[0]
        elif torchs and type(batches) is BatchSampler:
            index = _rows(loader, own)[: batches.batch_size]
        elif (numbers := iter(read)) is read:
            raise TypeError(f"its order is an iterator ({type(read).__name__!r}), which can be read once only")
        else:
            index = next(numbers)
        if batches is None:
            return collate(dataset[index])
        index = list(index)
        # as torch's own fetcher does
        several: Callable[[Any], Any] | None = getattr(dataset, "__getitems__", None)
        return collate([dataset[i] for i in index] if several is None else several(index))
