"""Make one batch as the training loader would, and determine its cells, without side effects on the run.

The loader's own iterator is not touched, for it may draw, start workers or read from a stream. Of a data set whose
items have numbers the first batch is made by hand, in this process, with the loader's `collate_fn`:

    no sampler but torch's    the first items, in the order of the data set
    another one               what a copy of it begins with

A loader of another kind may have a method `amp_example_batch`, which gives a batch that nobody misses.

This is done as a guest (guest.py), and data set, sampler and `collate_fn` are copies in what they remember of
themselves (as_before.py): a count, or a random generator, does not move on.

Known limits: what an item does outside of its process is done once more, such as moving the position in an open file;
a list or dictionary of a data set's that is longer than `as_before.LONG` is not a copy; `worker_init_fn` is not called.
"""

import pickle
import random
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from lightning_amp._torch import tree_leaves, tree_map
from lightning_amp.errors import DataError
from lightning_amp.footprint.copies.as_before import apart
from lightning_amp.footprint.copies.guest import as_guest
from lightning_amp.lightning._compat import request_dataloader
from lightning_amp.random_streams import isolated_random_streams
from lightning_amp.techniques.contract.protocol import find_decoders

UNKNOWN = (
    "the batch size is not known: predicted for 1 sample; give the data module, or the training loader, an attribute"
    " batch_size, the samples per rank and step"
)

Cells = tuple[int | None, str]
"""How many, or None and what to do."""


def cells_per_step(trainer: pl.Trainer) -> Cells:
    """Cells per rank and step.

    An attribute `batch_size` of the data module, the module or the loader tells; else the training loaders are asked
    for. Of several loaders the largest counts. Without a decoder in the module none are: the cells would predict
    nothing, and the profile of its step counts them itself.
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
    """What the run will read in a loop, by default in training; None and why, "" where nothing went wrong.

    The loop's hook, such as `train_dataloader`, is called, and the Trainer takes what it gave. It calls the hook again
    where that draws random numbers, which must be drawn where a plain run draws them; and where a sampler has been
    distributed to ranks by now, for how many of them have a batch of their own is up to the plan. Every rank calls
    this, for the hook may communicate. A hook that is called every few epochs may give other loaders each time: it is
    not called.
    """
    source: Any = (trainer.fit_loop if loop is None else loop)._data_source
    if not source.is_module():
        return source.instance, ""
    if not source.is_defined() or getattr(trainer, "reload_dataloaders_every_n_epochs", False):
        return None, ""
    try:
        loaders, drew = _loaders(source)
    except Exception as error:
        # it may read what a hook makes that comes later; what is really wrong with it, the Trainer will say
        return (None, f"{type(source.instance).__name__}.{source.name}() gave {type(error).__name__}: {error}")
    # draws must be made where a plain run makes them, and a distributed sampler is of a plan that is not made yet
    samplers = [getattr(loader, "sampler", None) for loader in each(loaders)]
    if not drew and not any(isinstance(sampler, DistributedSampler) for sampler in samplers):

        def dataloader() -> object:
            # the Trainer's next call of the hook gives these loaders, once
            del source.dataloader
            return loaders

        source.dataloader = dataloader
    return loaders, ""


def forget_loaders(trainer: pl.Trainer) -> None:
    """Drop loaders that the Trainer was to take and has not: the run has ended before, and another may read others."""
    loops = (trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop)
    for loop in (*loops, trainer.validate_loop, trainer.test_loop, trainer.predict_loop):
        vars(loop._data_source).pop("dataloader", None)


def _loaders(source: Any) -> tuple[object, bool]:
    """What the hook gives, and whether it has drawn random numbers, which are as they were before."""
    with isolated_random_streams():
        before = _drawn()
        return request_dataloader(source), _drawn() != before


def _drawn() -> tuple[bytes, ...]:
    # not one pickle of all, which differs with the objects that a tensor's storage happens to share
    numbers = pickle.dumps((np.random.get_state(), random.getstate()))
    return torch.get_rng_state().numpy().tobytes(), numbers


def each(loaders: object) -> list[Any]:
    """The loaders of any nesting."""
    return loaders.flattened if isinstance(loaders, CombinedLoader) else tree_leaves(loaders)


def _largest(loaders: object) -> int | None:
    parts = (part for one in each(loaders) for part in (one, getattr(one, "batch_sampler", None)))
    sizes = (getattr(part, "batch_size", None) for part in parts)
    return max((size for size in sizes if isinstance(size, int) and size >= 1), default=None)


WAY_OUT = "give the loader a method amp_example_batch that returns a batch of the same shapes"


def example_batch(loaders: object, why: str = "") -> Any:
    """The batch that one step reads of these loaders: one loader, or a dictionary, list or CombinedLoader of several.

    Args:
        loaders, why: As `loaders_of` returns them.

    Raises:
        DataError: It cannot be had without reading what training reads; or making it raised something.
    """
    if loaders is None:
        raise DataError(why or "the loader is made anew every few epochs, or there is none")
    return tree_map(_example_of, loaders.iterables if isinstance(loaders, CombinedLoader) else loaders)


def _example_of(loader: Any) -> Any:
    if isinstance(loader, CombinedLoader):
        return example_batch(loader)
    if hasattr(loader, "amp_example_batch"):
        return loader.amp_example_batch()
    kind = type(loader).__name__
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        raise DataError(
            f"the training loader is a {kind!r}; a batch that is read from it before training would be missing in"
            f" training. {WAY_OUT}"
        )
    if isinstance(loader.dataset, IterableDataset):
        raise DataError(
            f"the data set is a stream ({type(loader.dataset).__name__!r}); a batch that is read from it before"
            f" training would be missing in training. {WAY_OUT}"
        )
    try:
        return _first_batch(loader)
    except Exception as error:
        raise DataError(
            f"no example batch could be read from {type(loader.dataset).__name__!r}, which raised "
            f"{type(error).__name__}: {error}"
        ) from error


def _first_batch(loader: DataLoader[Any]) -> Any:
    # one for all, so that a sampler that holds the data set holds its copy
    memo: dict[int, Any] = {}
    dataset, collate = apart(loader.dataset, memo), apart(loader.collate_fn, memo)
    batches = None if loader.batch_sampler is None else apart(loader.batch_sampler, memo)
    order = apart(loader.sampler, memo)
    with as_guest(dataset, collate, *memo.values()):
        torchs = type(order) in (SequentialSampler, RandomSampler)
        read = order if batches is None else batches
        index: Any
        if torchs and batches is None:
            index = 0
        elif torchs and type(batches) is BatchSampler:
            index = range(min(batches.batch_size, len(loader.dataset)))  # type: ignore[arg-type]
        elif (numbers := iter(read)) is read:
            raise TypeError(f"its order is an iterator ({type(read).__name__!r}), which can be read once only")
        else:
            index = next(numbers)
        if batches is None:
            return collate(dataset[index])
        index = list(index)
        # as torch's own loader asks
        several: Callable[[Any], Any] | None = getattr(dataset, "__getitems__", None)
        return collate([dataset[i] for i in index] if several is None else several(index))
