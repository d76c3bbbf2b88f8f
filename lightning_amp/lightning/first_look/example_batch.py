"""One batch as the training loader would make it, without what the run notices: nothing drawn, nothing read ahead.

The loader's own iterator is not touched, for it may draw, start workers or read from a stream. Of a data set whose
items have numbers the first batch is made by hand, in this process, with the loader's `collate_fn`:

    no sampler but torch's    the first items, in the order of the data set
    another one               what a copy of it begins with

A loader of another kind may have a method `amp_example_batch`, which gives a batch that nobody misses.

Random numbers are as before, and data set, sampler and `collate_fn` are copies in what they remember of themselves
(`apart`): a count, or a random generator of their own, does not move on.

Known limits: what an item does outside of its process is done once more, such as moving the position in an open file;
a list or dictionary of a data set's that is longer than `SHARED` is not a copy; `worker_init_fn` is not called.
"""

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from lightning_amp.errors import DataError
from lightning_amp.random_streams import isolated_random_streams

SHARED = 64
"""Entries from which on a container is taken for data."""
GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
WAY_OUT = "give the loader a method amp_example_batch that returns a batch of the same shapes"
LEFT = (nn.Module, LightningModule, LightningDataModule, Trainer, torch.Tensor, np.ndarray, type)


def example_batch(loaders: object) -> Any:
    """The batch that one step reads of these loaders: one loader, or a dictionary, list or CombinedLoader of several.

    Raises:
        DataError: It cannot be had without reading what training reads; or making it raised something.
    """
    if isinstance(loaders, CombinedLoader):
        return example_batch(loaders.iterables)
    if isinstance(loaders, dict):
        return {name: example_batch(loader) for name, loader in loaders.items()}
    if isinstance(loaders, list | tuple):
        return type(loaders)([example_batch(loader) for loader in loaders])
    if hasattr(loaders, "amp_example_batch"):
        return loaders.amp_example_batch()
    _check(loaders)
    assert isinstance(loaders, DataLoader), "checked"
    try:
        with isolated_random_streams():
            return _first_batch(loaders)
    except Exception as error:
        raise DataError(
            f"a batch was to be made by hand of {type(loaders.dataset).__name__!r}, which raised"
            f" {type(error).__name__}: {error}"
        ) from error


def _check(loader: object) -> None:
    kind = type(loader)
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        raise DataError(
            f"the training loader is a {kind.__name__!r}, of which nothing can be read without training missing it;"
            f" {WAY_OUT}"
        )
    if isinstance(loader.dataset, IterableDataset):
        raise DataError(
            f"the data set is a stream ({type(loader.dataset).__name__!r}), of which nothing can be read without"
            f" training missing it; {WAY_OUT}"
        )


def _first_batch(loader: DataLoader[Any]) -> Any:
    memo: dict[int, Any] = {}
    dataset, collate = apart(loader.dataset, memo), apart(loader.collate_fn, memo)
    index = _first_index(loader, memo)
    if loader.batch_sampler is None:
        return collate(dataset[index])
    index = list(index)
    # as torch's own loader asks
    several: Callable[[Any], Any] | None = getattr(dataset, "__getitems__", None)
    return collate([dataset[i] for i in index] if several is None else several(index))


def _first_index(loader: DataLoader[Any], memo: dict[int, Any]) -> Any:
    """The number of an item, or numbers of the items of a batch."""
    batches, order = loader.batch_sampler, loader.sampler
    torchs = type(order) in (SequentialSampler, RandomSampler)
    if torchs and batches is None:
        return 0
    if torchs and type(batches) is BatchSampler:
        return range(min(batches.batch_size, len(loader.dataset)))  # type: ignore[arg-type]
    order = order if batches is None else batches
    if iter(order) is order:
        raise TypeError(f"its order is an iterator ({type(order).__name__!r}), which can be read once only")
    return next(iter(apart(order, memo)))


def apart(value: Any, memo: dict[int, Any]) -> Any:
    """A copy in what an object remembers of itself: attributes, small containers, random generators; shares the rest.

    Args:
        value: The object.
        memo: Copies by the id of what they are of; those of one memo refer to each other.
    """
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, GENERATORS):
        memo[id(value)] = _copied(value)
    elif isinstance(value, dict | list | tuple) and type(value) in (dict, list, tuple):
        if len(value) > SHARED:
            return value
        if isinstance(value, dict):
            memo[id(value)] = found = {}
            found.update({key: apart(part, memo) for key, part in value.items()})
        else:
            memo[id(value)] = type(value)([apart(part, memo) for part in value])
    elif _remembers(value):
        try:
            found = memo[id(value)] = copy.copy(value)
        except Exception:
            return value
        vars(found).update({name: apart(part, memo) for name, part in vars(value).items()})
    return memo.get(id(value), value)


def _copied(generator: Any) -> Any:
    return generator.clone_state() if isinstance(generator, torch.Generator) else copy.deepcopy(generator)


def _remembers(value: Any) -> bool:
    """Whether an object has attributes, and python's own way of being copied, which makes nothing else."""
    kind: Any = type(value)
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, LEFT)
        and not callable(getattr(kind, "__copy__", None))
        and kind.__reduce_ex__ is object.__reduce_ex__
        and kind.__reduce__ is object.__reduce__
        and not hasattr(kind, "__setstate__")
        # it may close a file that the copy shares
        and not hasattr(kind, "__del__")
        and getattr(kind, "__getstate__", None) is getattr(object, "__getstate__", None)
        and kind.__module__ != "builtins"
    )
