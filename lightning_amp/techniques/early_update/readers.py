"""Find what reads gradients after the backward pass, when early updates have used and freed them.

A run is refused for its settings, for hooks that Lightning calls between the backward pass and the optimizer's step,
and for methods of the module or of a callback whose code has an attribute `.grad`. Code elsewhere, called by these, is
found when it reads (`updates.py`).
"""

import dis
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_amp.errors import InstallError
from lightning_amp.footprint.run.last_gradients import accumulates, has_hook
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.data.gradient_sync import gradient_sizes
from lightning_amp.techniques.early_update.row import freed_bytes
from lightning_amp.techniques.own_step import why_whole

OF_MODULE = (
    "on_after_backward",
    "on_before_optimizer_step",
    "on_before_zero_grad",
    "optimizer_step",
    "optimizer_zero_grad",
    "configure_gradient_clipping",
)
OF_CALLBACK = ("on_after_backward", "on_before_optimizer_step", "on_before_zero_grad")
"""Hooks that Lightning calls while gradients are whole."""
LIBRARIES = ("lightning.", "lightning_amp.", "torch.")
"""Beginnings of the names of modules whose classes are known to read no gradients."""


def refusal(module: LightningModule, step: Any, *, values: bool) -> str:
    """Return what reads the gradients in the run of a module; "" if nothing is found, or no run is known."""
    trainer = module._trainer
    why = what_reads(module, trainer)
    # several ranks refuse it whatever reads them
    if not why or (trainer is not None and trainer.world_size > 1):
        return why
    freed = freed_bytes(gradient_sizes(module.parameters()))
    return f"{why}; otherwise up to {format_bytes(freed)} of gradients would be freed early" if freed else why


def refuse_readers(module: LightningModule, trainer: Trainer) -> None:
    """Raise an InstallError if something reads gradients, or the optimizer cannot update parameters one by one."""
    if why := what_reads(module, trainer) or _of_optimizers(trainer):
        raise InstallError(f"early_update is not possible: {why}")


def what_reads(module: LightningModule, trainer: Trainer | None) -> str:
    """Return why gradients have to stay until the optimizer's step; "" if nothing is found."""
    if not module.automatic_optimization:
        return "manual optimization reads gradients when the step says so"
    for name in OF_MODULE:
        if is_overridden(name, module, parent=LightningModule):
            return f"{name} of the module may read or change gradients"
    if why := _mentions(type(module)):
        return f"{why} of the module reads the attribute 'grad'"
    return "" if trainer is None else _of_trainer(trainer)


def _of_trainer(trainer: Trainer) -> str:
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if trainer.world_size > 1:
        return "ranks average gradients after the backward pass"
    if accumulates(trainer):
        return "gradients are accumulated over batches"
    if trainer.gradient_clip_val:
        return "gradient_clip_val needs all gradients before the first update"
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        return "the loss is scaled, and an update waits for all gradients to be finite"
    for callback in callbacks:
        kind = type(callback)
        if kind.__module__.startswith(LIBRARIES):
            continue
        for name in OF_CALLBACK:
            if has_hook(callback, name):
                return f"{name} of the callback {kind.__name__!r} may read or change gradients"
        if why := _mentions(kind):
            return f"{why} of the callback {kind.__name__!r} reads the attribute 'grad'"
    return ""


def _of_optimizers(trainer: Trainer) -> str:
    if len(trainer.optimizers) != 1:
        return f"it requires one optimizer, found {len(trainer.optimizers)}"
    (optimizer,) = trainer.optimizers
    if why := why_whole(optimizer):
        return why
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        if any(not _is_known(hook) for hook in getattr(optimizer, name).values()):
            return "a hook of the optimizer's step may read gradients"
    return ""


def _is_known(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith(LIBRARIES)


def _mentions(kind: type) -> str:
    """Return the first method of a class, or of its bases outside of libraries, whose code reads `.grad`."""
    for base in kind.__mro__:
        if base.__module__.startswith(LIBRARIES):
            continue
        for name, value in vars(base).items():
            function = getattr(value, "__func__", value)
            if isinstance(function, FunctionType) and any(map(_reads, _codes(function.__code__))):
                return name
    return ""


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for held in code.co_consts:
        if isinstance(held, CodeType):
            yield from _codes(held)


def _reads(code: CodeType) -> bool:
    """Whether it reads an attribute `grad` that it does not call, as it does `torch.autograd.grad`."""
    return "grad" in code.co_names and any(
        one.opname == "LOAD_ATTR" and one.argrepr == "grad" for one in dis.get_instructions(code)
    )
