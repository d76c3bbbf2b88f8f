"""Cells per rank and step, read before training from what the training loader will come from."""

from typing import TYPE_CHECKING

from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.seed import isolate_rng
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    import lightning.pytorch as pl

UNKNOWN = (
    "the cells per step are not known: predicted for 1 cell; give the data module, or the training loader, an"
    " attribute batch_size, the cells per rank and step"
)

Cells = tuple[int | None, str]
"""How many, or None and what to do."""


def cells_per_step(trainer: "pl.Trainer") -> Cells:
    """Cells per rank and step.

    An attribute `batch_size` of the data module, the module or the loader tells; else a fit's `train_dataloader` is
    called, one more time than the Trainer does, without an effect on random numbers. Every rank calls this, for the
    hook may communicate. Of several loaders the largest counts. A hook that is to be called every few epochs may give
    other loaders each time: it is left alone.

    Args:
        trainer: Its data is attached.
    """
    source = trainer.fit_loop._data_source
    # a data module may be given for its plan beside loaders
    for owner in (getattr(trainer, "datamodule", None), source.instance):
        if sizes := _sizes(owner):
            return max(sizes), ""
    given = not (source.is_module() and source.is_defined())
    if given or not trainer.training or getattr(trainer, "reload_dataloaders_every_n_epochs", False):
        return None, UNKNOWN
    try:
        with isolate_rng(include_cuda=False):
            sizes = _sizes(source.dataloader())
    except Exception as error:
        # it may read what a hook makes that comes later; what is really wrong with it, the Trainer will say
        why = f"{type(source.instance).__name__}.train_dataloader() gave {type(error).__name__}: {error}"
        return None, f"{UNKNOWN} ({why}, before training)"
    return (max(sizes), "") if sizes else (None, UNKNOWN)


def _sizes(loaders: object) -> list[int]:
    each = loaders.flattened if isinstance(loaders, CombinedLoader) else tree_leaves(loaders)
    told = [
        getattr(part, "batch_size", None)
        for one in each
        for part in (one, getattr(one, "batch_sampler", None))
    ]
    return [size for size in told if isinstance(size, int) and size >= 1]
