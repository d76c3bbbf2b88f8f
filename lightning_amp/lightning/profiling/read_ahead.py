"""Read the first batch of a stream before training, and give it to training first.

`iter` is called once: the loader's next iterator continues the one that was read from, and its first batch is the one
that was read. A second batch is not read. So nothing is lost, nothing is seen twice, and workers are started once.

The random streams of the process are put back after reading. Where the loader is iterated in the same random state,
they are set to what they were after reading, as if it had happened there: a run that draws nothing in between, for
example in a sanity check, is bit-equal to a run without the read.

Known limits: the batch is read in the strategy's `setup`, before `on_fit_start`. `next(loader)`, for a loader that is
its own iterator, skips the batch; `iter(loader)` does not.
"""

import copy
from collections.abc import Iterator
from types import new_class
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_amp.errors import DataError
from lightning_amp.lightning._compat import add_worker_seeds, rank_zero_only
from lightning_amp.random_streams import drawn_between, random_streams, set_random_streams

WAY_OUT = "give the loader a method amp_example_batch that returns a batch of the same shapes"


def is_stream(loader: Any) -> bool:
    """Whether the first batch of a loader can be had from the loader's iterator only."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return True
    return _class_of(loader).__iter__ is not DataLoader.__iter__


def read_ahead(loader: Any) -> None:
    """Read the first batch of a stream, which the loader gives to whoever iterates it next; once for each loader.

    Raises:
        DataError: The loader is empty, raised an error, or is a generator or another built-in.
    """
    if _is_given(loader):
        _read(loader)


def first_batch(loader: Any) -> Any:
    """Return a copy of the first batch of a stream, which is read ahead.

    Raises:
        DataError: As `read_ahead`, or the batch cannot be copied.
    """
    read_ahead(loader)
    try:
        return copy.deepcopy(loader.amp_first.batch)
    except Exception as error:
        raise DataError(
            f"the first batch of a {_class_of(loader).__name__!r} cannot be copied ({type(error).__name__}: {error}),"
            f" but the step is profiled with a copy; {WAY_OUT}"
        ) from error


def _class_of(loader: Any) -> Any:
    """Return the user's class of a loader, which reading ahead replaces for a while."""
    return getattr(type(loader), "amp_class", type(loader))


def _is_given(loader: Any) -> bool:
    """Whether `loader` has no first batch to give; a loader that Lightning made of another has none."""
    return _class_of(loader) is type(loader) or "amp_first" not in vars(loader) or loader.amp_first.taken


def _read(loader: Any) -> None:
    if _class_of(loader) is not type(loader):
        _give_class_back(loader)
    kind = type(loader)
    if isinstance(loader, Tensor) or not hasattr(loader, "__dict__"):
        raise DataError(
            f"the training loader is a {kind.__name__!r}; a batch that is read from it before training would be"
            " missing in training. Give a loader that starts anew when it is iterated, such as torch's DataLoader"
        )
    # as Lightning does later: the seeds of workers, with seed_everything(workers=True)
    add_worker_seeds(loader, getattr(rank_zero_only, "rank", 0))
    before = random_streams()
    try:
        state = loader.state_dict() if hasattr(loader, "state_dict") else None
        batches = iter(loader)
        begun = random_streams()
        batch = next(batches)
        loader.amp_first = FirstBatch(batches, batch, state, (before, begun, random_streams()))
    except StopIteration:
        raise DataError(f"the training loader, a {kind.__name__!r}, is empty: it has given no batch") from None
    except Exception as error:
        raise DataError(
            f"no example batch could be read from a {kind.__name__!r}, which raised {type(error).__name__}: {error}"
        ) from error
    finally:
        set_random_streams(before)
    # Python looks `__iter__` up in the class; whoever checks the type still finds the user's class
    added = {"amp_class": kind, "__module__": kind.__module__, "__iter__": _iterate}
    added |= {name: method for name, method in STATE.items() if hasattr(kind, name)}
    loader.__class__ = new_class(kind.__name__, (kind,), exec_body=lambda body: body.update(added))


def _give_class_back(loader: Any) -> None:
    loader.__class__ = _class_of(loader)
    vars(loader).pop("amp_first", None)


def _iterate(self: Any) -> Iterator[Any]:
    if _is_given(self):
        _give_class_back(self)
        return iter(self)
    first = self.amp_first
    # Lightning iterates some loaders once to check that it can, and drops the iterator
    first.begin()
    return first.batches(self)  # type: ignore[no-any-return]


def _load_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
    # the run goes on elsewhere in the stream, so that the batch that was read is not its next
    _give_class_back(self)
    return self.load_state_dict(*args, **kwargs)


def _state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
    if not _is_given(self):
        # training has read nothing yet
        return self.amp_first.state
    _give_class_back(self)
    return self.state_dict(*args, **kwargs)


STATE = {"load_state_dict": _load_state_dict, "state_dict": _state_dict}


class FirstBatch:
    """The first batch of a loader, and the iterator that gives the others; `taken` once an iterator has given it.

    `state`: the loader's `state_dict` before reading. `streams`: the random streams before `iter`, after it, and after
    the first batch.
    """

    def __init__(self, others: Iterator[Any], batch: Any, state: Any, streams: tuple[Any, Any, Any]) -> None:
        self.batch, self.state, self.taken = batch, state, False
        self._others, self._streams = others, streams

    def begin(self) -> None:
        """Set the random streams as `iter` did."""
        _advance(*self._streams[:2])

    def batches(self, loader: Any) -> Iterator[Any]:
        """Yield all batches of the stream, the first one first, and give the loader its class again."""
        if self.taken:
            raise RuntimeError("another iterator of this loader has taken its first batch; call iter(loader) again")
        self.taken = True
        _give_class_back(loader)
        _advance(*self._streams[1:])
        batch, self.batch = self.batch, None
        yield batch
        del batch
        yield from self._others

    def __deepcopy__(self, memo: dict[int, Any]) -> "FirstBatch":
        """Return one that is taken: a copied loader reads its own stream from the beginning."""
        copied = FirstBatch(iter(()), None, None, self._streams)
        copied.taken = True
        return copied


def _advance(before: Any, after: Any) -> None:
    """Set the random streams to `after` if nothing has drawn since `before`."""
    if not drawn_between(before, random_streams()):
        set_random_streams(after)
