"""Small LightningModules made of parts and one function, which say nothing of ranks."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "use_distributed_sampler": False,
    "max_epochs": 1,
}
ROWS = 4
"""Rows of a batch, over all ranks."""


class Small(pl.LightningModule):
    """Trained by SGD, which shows a gradient of the wrong size where Adam would not.

    Attributes:
        losses: Of all steps.

    Args:
        parts: What attributes are made by, in this order: modules, parameters, buffers, anything.
        call: The module and the batch -> the loss, or an output that is trained towards 1.
    """

    def __init__(self, parts: Mapping[str, Callable[[], Any]], call: Callable[[Any, Any], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name, make in parts.items():
            setattr(self, name, make())
        self.call, self.losses = call, list[Tensor]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss."""
        found = self.call(self, batch)
        loss = (found - 1).square().mean() if found.dim() else found
        self.losses.append(loss.detach().clone())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        """Decay shows a gradient of zeros in the place of none."""
        return torch.optim.SGD(self.parameters(), 0.05, 0.9, weight_decay=0.01)


class Attack(NamedTuple):
    """A harmless-looking module.

    Attributes:
        name: Of what it does.
        make: The module.
        batch: Tensors whose dim 0 has `ROWS` rows.
        drawn: Whether random numbers of split features are others than those of whole ones.
        by_rows: Whether ranks of data differ from one process by nature, as in a loss over pairs of rows or random
            numbers: it is then compared with plain data parallelism on as many ranks.
    """

    name: str
    make: Callable[[], pl.LightningModule]
    batch: Callable[[], Any]
    by_rows: bool = False
    drawn: bool = False


def features(*shape: int) -> Callable[[], Tensor]:
    """Rows of normal numbers."""
    return lambda: torch.randn(ROWS, *shape).double()


def words(*shape: int, most: int = 9) -> Callable[[], Tensor]:
    """Rows of whole numbers."""
    return lambda: torch.randint(most, (ROWS, *shape))


def both(*makers: Callable[[], Any]) -> Callable[[], tuple[Any, ...]]:
    """A batch of several tensors."""
    return lambda: tuple(make() for make in makers)


def par(*shape: int) -> Callable[[], nn.Parameter]:
    """A parameter of normal numbers."""
    return lambda: nn.Parameter(torch.randn(shape) * 0.5)


def buf(*shape: int) -> Callable[[], nn.Buffer]:
    """A buffer of normal numbers."""
    return lambda: nn.Buffer(torch.randn(shape))


def lin(inner: int, out: int, **given: Any) -> Callable[[], nn.Linear]:
    """A linear layer."""
    return lambda: nn.Linear(inner, out, **given)


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
    kind = type("Small", (Small,), dict(hooks or {}))
    return Attack(name, lambda: kind(parts, call), batch, by_rows or drawn, drawn)
