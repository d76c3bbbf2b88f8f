"""Retry a training batch with a plan of less memory after an out-of-memory error in its forward or backward pass.

What such a pass leaves behind is put back first: random streams, buffers, states of metrics, what was logged, counters
of the loop; gradients are deleted, which automatic optimisation has zeroed anyway. Parameters and the optimiser's state
have not changed by then. Where they may have, in the optimiser's step itself, the error is raised as it came.

    rank that has no memory     waits for the others at the end of their backward pass, and says so
    other ranks                 learn of it there, before gradients are averaged, and run the batch again too

On a CPU the first batches of every plan are counted against the budget that was named (counted_batches.py).

Known limits: hooks of a training step, such as `on_before_zero_grad`, are called again with it; what they, and the
training step, do outside of the module stays done. A rank whose memory ends while others wait for it, in an average of
gradients, ends the run as without a rescue.
"""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torchmetrics import Metric

from lightning_amp.lightning._compat import rank_zero_warn
from lightning_amp.lightning.faults.activity import is_out_of_memory
from lightning_amp.lightning.steps.counted_batches import CountedBatches
from lightning_amp.lightning.steps.end_of_memory import tell_where
from lightning_amp.random_streams import random_streams, set_random_streams

TIMES = 3
"""Plans that are tried in a fit, after the first."""


class OtherRank(MemoryError):
    """Memory has ended on another rank."""


class Rescue(pl.Callback):
    """Runs batches of a fit, and once more those for which there was no memory.

    Args:
        module: The LightningModule.
        leaner: Installs a plan that needs less, the same on all ranks, and says what it did; "" where there is none.
        budget: Bytes beyond which a counted batch is refused; None counts none.
        device: Of this rank.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        *,
        leaner: Callable[[], str],
        budget: int | None,
        device: torch.device,
    ) -> None:
        self._module, self._leaner, self._device = module, leaner, device
        self._left, self._updating, self._told = TIMES, False, False
        self._counted = None if budget is None else CountedBatches(module, budget)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any
    ) -> None:
        """From here on parameters may change, and the batch cannot run again."""
        self._updating = True
        if self._counted is not None:
            self._counted.unbound()

    def gradients_are_there(self) -> None:
        """Called when a backward pass has ended, before gradients are averaged: a collective.

        Raises:
            OtherRank: Memory has ended on another rank.
        """
        self._told = True
        if largest(0.0, self._device):
            raise OtherRank("memory has ended on another rank")

    def run(self, loop: Any, plain: Callable[..., Any], *args: Any) -> Any:
        """Run one batch by `plain(*args)`."""
        while True:
            self._updating = self._told = False
            undo = _Undo(self._module, loop)
            try:
                with self._counting(args):
                    return plain(*args)
            except Exception as error:
                self._get_over(error)
            # outside of the handler, which holds what the failed pass has made
            undo()

    def _get_over(self, error: Exception) -> None:
        """Install a leaner plan, or raise the error."""
        if not isinstance(error, OtherRank) and (not is_out_of_memory(error) or self._updating):
            raise error
        if not self._told:
            largest(1.0, self._device)
        elif not isinstance(error, OtherRank):
            # in the average of gradients, for which the others wait
            raise error
        if not self._left:
            raise error
        if not isinstance(error, OtherRank):
            tell_where(error, self._module, self._module.trainer.optimizers, self._device)
        text = f"{type(error).__name__}: {error}"
        # frees the tensors of the pass that has failed
        error.__traceback__ = error.__context__ = None
        _free(self._module)
        done = self._leaner()
        if not done:
            raise error
        self._left -= 1
        if self._counted is not None:
            self._counted.begin_again()
        rank_zero_warn(f"Memory has ended in a training batch, which now runs again: {done}. It was: {text}")

    def _counting(self, args: tuple[Any, ...]) -> AbstractContextManager[None]:
        return nullcontext() if self._counted is None else self._counted.counting(args)


def rescue_batches(trainer: pl.Trainer, rescue: Rescue) -> Callable[[], None]:
    """Let a fit's batches run by a rescue; returns what ends it."""
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    plain = loop.run
    loop.run = lambda *args: rescue.run(loop, plain, *args)  # type: ignore[method-assign]
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    callbacks.append(rescue)

    def end() -> None:
        vars(loop).pop("run", None)
        if rescue in callbacks:
            callbacks.remove(rescue)

    return end


class _Undo:
    """What a batch may change before its optimiser's step, as it was."""

    def __init__(self, module: pl.LightningModule, loop: Any) -> None:
        self._module, self._loop = module, loop
        self._random = random_streams()
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
        self._results = module.trainer.fit_loop.epoch_loop._results
        self._logged = set(self._results)
        metrics = [child for child in module.modules() if isinstance(child, Metric)]
        self._metrics = [(metric, _state(metric)) for metric in [*metrics, *self._results.values()]]
        self._progress = loop.optim_progress.state_dict()

    def __call__(self) -> None:
        _free(self._module)
        with torch.no_grad():
            for buffer, before in self._buffers:
                buffer.copy_(before)
        for metric, state in self._metrics:
            vars(metric).update(state)
        for name in set(self._results) - self._logged:
            del self._results[name]
        self._loop.optim_progress.load_state_dict(self._progress)
        set_random_streams(self._random)


def _state(metric: Metric) -> dict[str, Any]:
    """What an update changes; also of what Lightning keeps of a logged value, which is a metric too."""
    names = [*metric._defaults, "_update_count", "_computed", "_forward_cache"]
    return {name: copy.deepcopy(getattr(metric, name)) for name in names}


def _free(module: pl.LightningModule) -> None:
    for parameter in module.parameters():
        parameter.grad = None
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def largest(value: float, device: torch.device) -> float:
    """The largest value of all ranks, a collective."""
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return value
    box = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return float(box)
