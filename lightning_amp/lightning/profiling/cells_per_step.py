"""Determine cells per rank and step before training, from the source of the training loader."""

import pickle
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DistributedSampler

from lightning_amp._torch import tree_leaves
from lightning_amp.lightning._compat import request_dataloader
from lightning_amp.random_streams import isolated_random_streams
from lightning_amp.techniques.contract.protocol import find_decoders

if TYPE_CHECKING:
    import lightning.pytorch as pl

UNKNOWN = (
    "the batch size is not known: predicted for 1 sample; give the data module, or the training loader, an attribute"
    " batch_size, the samples per rank and step"
)

Cells = tuple[int | None, str]
"""How many, or None and what to do."""


def cells_per_step(trainer: "pl.Trainer") -> Cells:
    """Cells per rank and step.

    An attribute `batch_size` of the data module, the module or the loader tells; else the training loaders are asked
    for. Of several loaders the largest counts. Without a decoder in the module none are: the cells would predict
    nothing, and the profile of its step counts them itself.
    """
    source = trainer.fit_loop._data_source
    # a data module may be given for its plan in addition to loaders
    for owner in (getattr(trainer, "datamodule", None), source.instance):
        if sizes := _sizes(owner):
            return max(sizes), ""
    if not source.is_module() or not trainer.training or not find_decoders(trainer.lightning_module):
        return None, UNKNOWN
    loaders, why = training_loaders(trainer)
    if sizes := _sizes(loaders):
        return max(sizes), ""
    return None, f"{UNKNOWN} ({why}, before training)" if why else UNKNOWN


def training_loaders(trainer: "pl.Trainer") -> tuple[object, str]:
    """What the run will read in training; None and why, "" where nothing went wrong.

    A fit's hook `train_dataloader` is called, and the Trainer takes what it gave. It calls the hook again where that
    draws random numbers, which must be drawn where a plain run draws them; and where a sampler has been distributed to
    ranks by now, for how many of them have a batch of their own is up to the plan. Every rank calls this, for the hook
    may communicate. A hook that is called every few epochs may give other loaders each time: it is not called.
    """
    return loaders_of(trainer.fit_loop._data_source, trainer)


def loaders_of(source: Any, trainer: "pl.Trainer") -> tuple[object, str]:
    """The same of the source of any loop."""
    if not source.is_module():
        return source.instance, ""
    if not source.is_defined() or getattr(trainer, "reload_dataloaders_every_n_epochs", False):
        return None, ""
    try:
        loaders, drew = _loaders(source)
    except Exception as error:
        # it may read what a hook makes that comes later; what is really wrong with it, the Trainer will say
        return (
            None,
            f"{type(source.instance).__name__}.{source.name}() gave {type(error).__name__}: {error}",
        )
    if not drew and not any(map(_is_dealt, _each(loaders))):
        _hand_over(source, loaders)
    return loaders, ""


def _loaders(source: Any) -> tuple[object, bool]:
    """What the hook gives, and whether it has drawn random numbers, which are as they were before."""
    with isolated_random_streams():
        before = _drawn()
        return request_dataloader(source), _drawn() != before


def _drawn() -> tuple[bytes, ...]:
    numbers = pickle.dumps((np.random.get_state(), random.getstate()))
    return torch.get_rng_state().numpy().tobytes(), numbers


def _hand_over(source: Any, loaders: object) -> None:
    """Let the Trainer's next call of the hook give these loaders."""

    def dataloader() -> object:
        del source.dataloader
        return loaders

    source.dataloader = dataloader


def _each(loaders: object) -> list[Any]:
    return loaders.flattened if isinstance(loaders, CombinedLoader) else tree_leaves(loaders)


def _is_dealt(loader: object) -> bool:
    return isinstance(getattr(loader, "sampler", None), DistributedSampler)


def _sizes(loaders: object) -> list[int]:
    told = [
        getattr(part, "batch_size", None)
        for one in _each(loaders)
        for part in (one, getattr(one, "batch_sampler", None))
    ]
    return [size for size in told if isinstance(size, int) and size >= 1]
