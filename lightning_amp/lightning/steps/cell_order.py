"""Assign the cells of user-defined loaders to ranks in the order of a plain run.

Lightning puts a distributed sampler, which shuffles in training, into every loader of a strategy of several ranks, also
where there is one. Here a single data rank reads the loader as it is. Of one that does not shuffle, rank r of R reads

    cells[r::R],        cells = the loader's next R batches, of b cells each

so that together they read the batch of a plain run with a batch size of R b, at uneven ends and with drop_last too.
A loader with torch's RandomSampler has Lightning's sampler, as under ddp, and so have all in prediction.

Known limits: where the last batch has fewer cells than there are ranks, one of them is read more than once, with a
warning; an order drawn by a sampler of another kind is one order on all ranks, but not a plain run's.
"""

import copy
import os
import random
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from lightning.pytorch.trainer.states import RunningStage
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Sampler

from lightning_amp.errors import DataError
from lightning_amp.lightning._compat import DataConnector, rank_zero_warn
from lightning_amp.random_streams import isolated_random_streams


class CellOrder(DataConnector):
    """The part of a Trainer that chooses the sampler of every loader."""

    def _requires_distributed_sampler(self, dataloader: DataLoader[Any]) -> bool:
        several = self._share()["num_replicas"] > 1
        return several and super()._requires_distributed_sampler(dataloader)

    def _prepare_dataloader(self, dataloader: object, shuffle: bool, mode: RunningStage) -> object:
        if (
            not isinstance(dataloader, DataLoader)
            or mode == RunningStage.PREDICTING
            or not self._requires_distributed_sampler(dataloader)
            or _permutes(dataloader)
        ):
            return super()._prepare_dataloader(dataloader, shuffle, mode)
        own = OwnCells(dataloader, **self._share())
        read = "sampler" if dataloader.batch_sampler is None else "batch_sampler"
        # as `sampler` it receives the epoch
        return _with(dataloader, **{"sampler": own, read: own})

    def _share(self) -> dict[str, int]:
        kwargs = self.trainer.distributed_sampler_kwargs
        assert kwargs is not None, "every AMPStrategy has them"
        return kwargs


class OwnCells(DistributedSampler[Any]):
    """This rank's part of every batch, or of every R items where the loader makes no batches."""

    def __init__(self, loader: DataLoader[Any], *, num_replicas: int, rank: int) -> None:
        """Share what `loader` reads.

        Raises:
            DataError: The loader's order has no length, so that nobody knows which step is the last.
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
        self.order = order

    def set_epoch(self, epoch: int) -> None:
        """Tell it to the user's own sampler as well."""
        super().set_epoch(epoch)
        _tell_epoch(self.order, epoch)
        _tell_epoch(getattr(self.order, "sampler", None), epoch)

    def __len__(self) -> int:
        whole, rest = divmod(len(self.order), self.num_replicas)
        return whole + bool(rest and not self._drops())

    def __iter__(self) -> Iterator[Any]:
        found = iter(self._drawn())
        for _ in range(len(self)):
            group = [*islice(found, self.num_replicas)]
            cells = [*chain.from_iterable(group)] if self.batched else group
            if len(cells) < self.num_replicas:
                rank_zero_warn(
                    f"The last batch has {len(cells)} samples for {self.num_replicas} ranks of the data axis, so its"
                    " last sample is read by several of them and counts more than once. With drop_last=True, or another"
                    " batch_size, every sample counts once."
                )
            mine = cells[self.rank :: self.num_replicas] or cells[-1:]
            yield mine if self.batched else mine[0]

    def _drops(self) -> bool:
        return self.batched and bool(getattr(self.order, "drop_last", False))

    def _drawn(self) -> list[Any]:
        """All that the loader would read: what is drawn at random must be one order on all ranks."""
        with isolated_random_streams():
            torch.default_generator.manual_seed(self.seed + self.epoch)
            np.random.seed((self.seed + self.epoch) % 2**32)
            random.seed(self.seed + self.epoch)
            return list(self.order)


class SameDraws(Sampler[Any]):
    """A sampler that draws from the ranks' own random numbers, which are made the same before every epoch."""

    def __init__(self, sampler: Any, agree: Callable[[], None]) -> None:
        self.sampler, self.agree = sampler, agree

    def set_epoch(self, epoch: int) -> None:
        """Called on all ranks, before they draw."""
        self.agree()
        _tell_epoch(self.sampler, epoch)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)


def with_same_draws(loader: object, agree: Callable[[], None]) -> object:
    """Let the ranks of a model group draw the same order; `agree`, a collective, gives them the same random numbers.

    Anything but torch's loaders is returned as it is.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.sampler, DistributedSampler):
        return loader
    return _with(loader, sampler=SameDraws(loader.sampler, agree))


def _permutes(loader: DataLoader[Any]) -> bool:
    """Whether its order is a new permutation of the data set in every epoch."""
    sampler = loader.sampler
    if not isinstance(sampler, RandomSampler) or sampler.replacement:
        return False
    return sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]


def _with(loader: DataLoader[Any], **samplers: Any) -> DataLoader[Any]:
    """A copy that reads in another order; the user's own loader stays as it is."""
    changed = copy.copy(loader)
    # torch lets nobody set them, and a loader of another class cannot be made anew without knowing its arguments
    changed.__dict__.update(samplers, _iterator=None)
    return changed


def _tell_epoch(sampler: object, epoch: int) -> None:
    tell = getattr(sampler, "set_epoch", None)
    if callable(tell):
        tell(epoch)
