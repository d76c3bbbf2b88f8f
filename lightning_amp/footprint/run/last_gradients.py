"""Free the gradients of the last step before `training_step`, where nothing reads them any more.

Lightning frees them between `training_step` and the backward pass, so that they live through the forward pass, in which
many steps have their peak. A run and a counted step of it free them earlier, by the same rule. They stay if one of
these may read or keep them:

    manual optimization, gradient accumulation
    `on_before_zero_grad` of the module or a callback, which Lightning calls after `training_step`
    `optimizer_zero_grad` of the module, `zero_grad` of the optimizer
    the first `training_step`, if it reads `.grad` of a parameter

A later `training_step` that reads `.grad` raises an error, because it would get None instead of the gradient.
"""

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.optim import Optimizer

from lightning_amp._torch import GRADIENT
from lightning_amp.errors import ModelError

INTERNALS = ("torch._", "torch.distributed.", "torch.nn.modules.module", "lightning_amp.")
"""Beginnings of the names of modules that may look at `.grad` in a step without using it, as torch's compiler does, and
`nn.Module.to` and `zero_grad`, which convert or clear a gradient that is there."""
NORMS = ("lightning_amp.footprint.run.inner_run", "lightning_amp.lightning.checkpoints.shards")
"""Modules with `trainer.strategy.gradient_norm`, which the user calls."""


def nothing_reads_them(trainer: Trainer) -> bool:
    """Whether the settings and callbacks of a run let the last gradients go before `training_step`."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return not accumulates(trainer) and not any(has_hook(one, "on_before_zero_grad") for one in callbacks)


def accumulates(trainer: Trainer) -> bool:
    """Whether gradients are added up over batches, now or later in the run."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return trainer.accumulate_grad_batches != 1 or any(
        isinstance(one, GradientAccumulationScheduler) for one in callbacks
    )


def has_hook(callback: Callback, name: str) -> bool:
    """Whether a callback defines a hook, in its class or on itself."""
    return name in vars(callback) or getattr(type(callback), name) is not getattr(Callback, name)


class LastGradients:
    """The gradients of one optimizer's parameters between two steps.

    Args:
        module: The module that is trained.
        optimizers: Its optimizers; gradients stay unless there is one.
        allowed: Whether the run lets them go (`nothing_reads_them`).
    """

    def __init__(self, module: LightningModule, optimizers: Sequence[Optimizer], *, allowed: bool) -> None:
        hooks = ("on_before_zero_grad", "optimizer_zero_grad")
        self.freed = (
            allowed
            and len(optimizers) == 1
            and type(optimizers[0]).zero_grad is Optimizer.zero_grad
            and module.automatic_optimization
            and not any(is_overridden(name, module, parent=LightningModule) for name in hooks)
        )
        self._optimizers, self._steps = optimizers, 0
        self._reads = GradientReads(module, self._read)

    @contextmanager
    def before_step(self) -> Iterator[None]:
        """Free the gradients, if nothing reads them, and run a `training_step` in this context.

        Raises:
            ModelError: A step after the first one reads a gradient that was freed.
        """
        if not self.freed:
            yield
            return
        self._steps += 1
        for group in self._optimizers[0].param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        self._reads.start()
        try:
            yield
        finally:
            self._reads.stop()

    def _read(self, name: str) -> None:
        if self._steps > 1 and self.freed:
            raise ModelError(
                f"training_step reads the gradient of {name!r}, which the first step did not; gradients of the last"
                " step are freed before training_step to save their memory. Read them in on_before_optimizer_step or"
                " on_train_batch_end, or define on_before_zero_grad, which may be empty: then they stay"
            )
        self.freed = False


class GradientReads:
    """Calls of a function, with the name of a parameter, whenever code reads its `.grad`.

    Args:
        module: The module of the parameters.
        read: The function; an error that it raises is the reader's.
        also: Beginnings of the names of modules that may read besides `INTERNALS`.
    """

    def __init__(self, module: nn.Module, read: Callable[[str], None], *, also: tuple[str, ...] = ()) -> None:
        # without keeping them: another tensor may get the id of one that is gone
        self._names = {id(p): (name, weakref.ref(p)) for name, p in module.named_parameters()}
        self._kinds = {type(parameter) for parameter in module.parameters()}
        self._read, self._may = read, (*INTERNALS, *also)
        self._watched = list[type]()

    def of(self, module: nn.Module) -> bool:
        """Whether the parameters are those of a module."""
        known = (of() for _, of in self._names.values())
        return all(one is other for one, other in zip_longest(known, module.parameters()))

    def start(self) -> None:
        """Watch reads from now on; types that are watched already stay with their watch."""
        self._watched = [kind for kind in self._kinds if "grad" not in vars(kind)]
        for kind in self._watched:
            type.__setattr__(kind, "grad", property(self._look, GRADIENT.__set__, GRADIENT.__delete__))

    def stop(self) -> None:
        """End the watch."""
        for kind in self._watched:
            type.__delattr__(kind, "grad")
        self._watched = []

    def _look(self, parameter: Any) -> Any:
        reader = str(sys._getframe(1).f_globals.get("__name__", ""))
        name, of = self._names.get(id(parameter), ("", None))
        if of is not None and of() is parameter and (reader in NORMS or not reader.startswith(self._may)):
            self._read(name)
        return GRADIENT.__get__(parameter)
