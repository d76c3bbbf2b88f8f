"""Make one batch as the training loader would, without side effects on the run: no random draws, no read-ahead.

The loader's own iterator is not touched, for it may draw, start workers or read from a stream. Of a data set whose
items have numbers the first batch is made by hand, in this process, with the loader's `collate_fn`:

    no sampler but torch's    the first items, in the order of the data set
    another one               what a copy of it begins with

A loader of another kind may have a method `amp_example_batch`, which gives a batch that nobody misses.

This is done as a guest (guest.py), and data set, sampler and `collate_fn` are copies in what they remember of
themselves (apart.py): a count, or a random generator, does not move on.

Known limits: what an item does outside of its process is done once more, such as moving the position in an open file;
a list or dictionary of a data set's that is longer than `apart.LONG` is not a copy; `worker_init_fn` is not called.
"""

from collections.abc import Callable
from typing import Any

from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from lightning_amp.errors import DataError
from lightning_amp.footprint.copies.apart import apart
from lightning_amp.footprint.copies.guest import as_guest

WAY_OUT = "give the loader a method amp_example_batch that returns a batch of the same shapes"


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
        return _first_batch(loaders)
    except Exception as error:
        raise DataError(
            f"no example batch could be read from {type(loaders.dataset).__name__!r}, which raised "
            f"{type(error).__name__}: {error}"
        ) from error


def _check(loader: object) -> None:
    kind = type(loader)
    if not isinstance(loader, DataLoader) or type(loader).__iter__ is not DataLoader.__iter__:
        raise DataError(
            f"the training loader is a {kind.__name__!r}; a batch that is read from it before "
            f"training would be missing in training. {WAY_OUT}"
        )
    if isinstance(loader.dataset, IterableDataset):
        raise DataError(
            f"the data set is a stream ({type(loader.dataset).__name__!r}); a batch that is read "
            f"from it before training would be missing in training. {WAY_OUT}"
        )


def _first_batch(loader: DataLoader[Any]) -> Any:
    memo: dict[int, Any] = {}
    dataset, collate = apart(loader.dataset, memo), apart(loader.collate_fn, memo)
    batches = None if loader.batch_sampler is None else apart(loader.batch_sampler, memo)
    order = apart(loader.sampler, memo)
    with as_guest(dataset, collate, *memo.values()):
        index = _first_index(loader, batches, order)
        if batches is None:
            return collate(dataset[index])
        index = list(index)
        # as torch's own loader asks
        several: Callable[[Any], Any] | None = getattr(dataset, "__getitems__", None)
        return collate([dataset[i] for i in index] if several is None else several(index))


def _first_index(loader: DataLoader[Any], batches: Any, order: Any) -> Any:
    """The number of an item, or numbers of the items of a batch; the samplers are copies."""
    torchs = type(order) in (SequentialSampler, RandomSampler)
    if torchs and batches is None:
        return 0
    if torchs and type(batches) is BatchSampler:
        return range(min(batches.batch_size, len(loader.dataset)))  # type: ignore[arg-type]
    order = order if batches is None else batches
    numbers = iter(order)
    if numbers is order:
        raise TypeError(f"its order is an iterator ({type(order).__name__!r}), which can be read once only")
    return next(numbers)
