"""A row of the collection: an odd module, its batches, what techniques say of it; and parts to make rows of."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

TECHNIQUES = (
    *("recompute", "chunk", "replay", "offload", "logits", "early_update", "host_optimizer"),
    *("data", "fsdp", "sequence", "tensor3d", "pipeline"),
)
LAZY = "must have its shape before training starts"
UNCAPTURED = "uses a tensor that is neither an argument nor a parameter nor a buffer"
COMPILED = "torch.compile was applied to"
NO_LIST = "pipeline requires a ModuleList or Sequential of two or more modules"
IN_EVERY_PASS = "every forward pass of a block changes"
"""Messages of more than one row."""
WRONG = "without a word"
"""A known limit: a technique trains other numbers, and does not notice. A row that has become exact fails too."""
SAMPLES = 4
"""Rows of a batch, over all ranks."""
STEPS = 3


@dataclass(frozen=True)
class Row:
    """A module of which no technique may compute other numbers.

    Attributes:
        make: Makes the LightningModule.
        batch: Draws the batch of a step; or a list with those of all steps.
        says: Technique -> a pattern of the message that it refuses the module with, or that says that it has nothing to
            do there. With techniques that are not in it the module is exact.
        by_rows: Whether data ranks with parts of a batch differ from one process by nature, as in a loss over pairs of
            rows. They get the whole batch then.
        drawn: Whether it draws random numbers.
        along: Dims of the batch's tensors that `sequence` splits.
    """

    make: Callable[[], pl.LightningModule]
    batch: Callable[[], Any]
    says: Mapping[str, str] = field(default_factory=dict)
    by_rows: bool = False
    drawn: bool = False
    along: Any = "auto"


class Small(pl.LightningModule):
    """Trained by SGD, which shows a gradient of the wrong size where Adam would not.

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

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        found = self.call(self, batch)
        loss = (found - 1).square().mean() if found.dim() else found
        self.losses.append(loss.detach().clone())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        # decay shows a gradient of zeros in the place of none
        return torch.optim.SGD(self.parameters(), 0.05, 0.9, weight_decay=0.01)


def features(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(SAMPLES, *shape).double()


def words(*shape: int, most: int = 9) -> Callable[[], Tensor]:
    return lambda: torch.randint(most, (SAMPLES, *shape))


def both(*makers: Callable[[], Any]) -> Callable[[], tuple[Any, ...]]:
    return lambda: tuple(make() for make in makers)


def par(*shape: int) -> Callable[[], nn.Parameter]:
    return lambda: nn.Parameter(torch.randn(shape) * 0.5)


def buf(*shape: int) -> Callable[[], nn.Buffer]:
    return lambda: nn.Buffer(torch.randn(shape))


def lin(inner: int, out: int, **given: Any) -> Callable[[], nn.Linear]:
    return lambda: nn.Linear(inner, out, **given)


def conv(*args: int, **given: Any) -> Callable[[], nn.Conv2d]:
    return lambda: nn.Conv2d(*args, **given)


def two(inner: int = 6, middle: int = 8, out: int = 3) -> Callable[[], nn.Sequential]:
    return lambda: nn.Sequential(nn.Linear(inner, middle), nn.ReLU(), nn.Linear(middle, out))


def odd(
    batch: Callable[[], Any],
    call: Callable[[Any, Any], Tensor],
    by_rows: bool = False,
    hooks: Mapping[str, Callable[..., Any]] | None = None,
    drawn: bool = False,
    says: Mapping[str, str] | None = None,
    along: Any = "auto",
    **parts: Callable[[], Any],
) -> Row:
    """By parts and a function; `hooks` are methods of the LightningModule."""
    kind = type("Small", (Small,), dict(hooks or {}))
    return Row(lambda: kind(parts, call), batch, says or {}, by_rows or drawn, drawn, along)


def around(
    hooks: Mapping[str, Callable[..., Any]],
    call: Any = lambda m, x: m.net(x),
    says: Mapping[str, str] | None = None,
    **parts: Any,
) -> Row:
    """Two layers, with methods around their step."""
    return odd(X, call, hooks=hooks, says=says, net=two(), **parts)


def of_features(call: Callable[[Tensor], Tensor], left: int = 8, by_rows: bool = False) -> Row:
    """An operator on features that a layer has split, which leaves so many."""
    return odd(X, lambda m, x: m.b(call(m.a(x))), by_rows, a=lin(6, 8), b=lin(left, 3))


X, SEQ, IMAGE, TOKENS = features(6), features(5, 8), features(4, 8, 6), words(5)
