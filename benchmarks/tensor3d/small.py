"""Small LightningModules made of parts and one function, which say nothing of ranks."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import lightning.pytorch as pl
from torch import Tensor

from tests.odd_modules.collection.row import odd

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
    "max_epochs": 1,
}


class Attack(NamedTuple):
    """A harmless-looking module.

    Attributes:
        name: Of what it does.
        make: The module.
        batch: Tensors whose dim 0 has `SAMPLES` rows.
        drawn: Whether random numbers of split features are others than those of whole ones.
        by_rows: Whether ranks of data differ from one process by nature, as in a loss over pairs of rows or random
            numbers: it is then compared with plain data parallelism on as many ranks.
    """

    name: str
    make: Callable[[], pl.LightningModule]
    batch: Callable[[], Any]
    by_rows: bool = False
    drawn: bool = False


def attack(
    name: str,
    batch: Callable[[], Any],
    call: Callable[[Any, Any], Tensor],
    by_rows: bool = False,
    hooks: Mapping[str, Callable[..., Any]] | None = None,
    drawn: bool = False,
    **parts: Callable[[], Any],
) -> Attack:
    """An attack by parts and a function; `hooks` are methods of the LightningModule."""
    one = odd(batch, call, by_rows, hooks, drawn, **parts)
    return Attack(name, one.make, one.batch, one.by_rows, one.drawn)
