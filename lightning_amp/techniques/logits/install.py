"""Install `logits`: linear layers of the training step put off their products."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils._pytree import tree_map

from lightning_amp.errors import InstallError
from lightning_amp.techniques.logits.pending import PutOff, values
from lightning_amp.techniques.put_methods import method_of


def chunk_logits(module: nn.Module) -> dict[str, Callable[..., Any]]:
    """What a LightningModule runs instead of its methods, by name.

    Raises:
        InstallError: It is no LightningModule.
    """
    if not isinstance(module, LightningModule):
        raise InstallError(f"logits requires a LightningModule, found {type(module).__name__!r}")
    step = method_of(module, "training_step")

    @wraps(step)
    def run(module: LightningModule, *args: Any, **kwargs: Any) -> Any:
        put_off, apply = PutOff(), torch.autograd.Function.__dict__["apply"]

        def applied(cls: Any, *given: Any, **named: Any) -> Any:
            return apply.__get__(None, cls)(*map(values, given), **named)

        # it reads its arguments in C++, where no mode sees it
        torch.autograd.Function.apply = classmethod(applied)  # type: ignore[assignment,method-assign]
        try:
            with put_off:
                found = step(module, *args, **kwargs)
        finally:
            torch.autograd.Function.apply = apply  # type: ignore[method-assign]
        found = tree_map(values, found)
        put_off.finish()
        return found

    return {"training_step": run}
