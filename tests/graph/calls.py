"""Blocks of the example modules, with what they are called with in a training step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_amp.footprint.find_blocks import find_blocks
from tests.any_module import make


@dataclass
class Called:
    """One call of a block."""

    fqn: str
    block: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def forward_of(module: pl.LightningModule, batch: Any) -> Callable[[], Any]:
    """The training step without a Trainer, so far as blocks are called in it."""
    module.log = lambda *_, **__: None  # type: ignore[method-assign]
    module.manual_backward = module.clip_gradients = lambda *_, **__: None  # type: ignore[method-assign]
    module.optimizers = lambda: _Optimizers()  # type: ignore[method-assign]
    return lambda: module.training_step(batch, 0)


class _Optimizers(list[Any]):
    """No optimiser, alone or in a list."""

    def zero_grad(self) -> None:
        return None

    step = zero_grad


def calls_of(name: str) -> list[Called]:
    """The calls of an example's blocks, one of every class and shape."""
    module, batch = make(name)
    return record(module, forward_of(module, batch))


def record(module: nn.Module, step: Callable[[], Any]) -> list[Called]:
    """The calls of a module's blocks while `step` runs."""
    found: dict[Any, Called] = {}

    def note(fqn: str) -> Any:
        def hook(block: nn.Module, args: Any, kwargs: Any) -> None:
            shapes = tuple(tuple(a.shape) for a in args if isinstance(a, torch.Tensor))
            found.setdefault((type(block), shapes), Called(fqn, block, args, kwargs))

        return hook

    hooks = [b.register_forward_pre_hook(note(fqn), with_kwargs=True) for fqn, b in find_blocks(module).items()]
    step()
    for hook in hooks:
        hook.remove()
    return list(found.values())
