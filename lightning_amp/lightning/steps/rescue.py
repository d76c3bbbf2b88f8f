"""Retry a training batch with a plan of less memory after an out-of-memory error in its forward or backward pass.

What such a pass leaves behind is put back first: random streams, buffers, states of metrics, what was logged, counters
of the loop; gradients are deleted, which automatic optimisation has zeroed anyway. Parameters and the optimiser's state
have not changed by then. Where they may have, in the optimiser's step itself, the error is raised as it came.

    rank that has no memory     waits for the others at the end of their backward pass, and says so
    other ranks                 learn of it there, before gradients are averaged, and run the batch again too

On a CPU nobody says that memory has ended before the machine does. There batches are counted, storage by storage,
against the budget that was named. To count takes time, so it is done where bytes may be others than those of before:

    the first batches of a plan    the last of them has the optimiser's state, and gradients that it adds to
    parameters that were frozen and are trained now, or that an optimiser was given    as many again
    a batch of more bytes than any that was counted

Known limits: hooks of a training step, such as `on_before_zero_grad`, are called again with it; what they, and the
training step, do outside of the module stays done. What else makes a step larger is not noticed, such as longer
generated texts, or a draw that runs more blocks. A rank whose memory ends while others wait for it, in an average of
gradients, ends the run as without a rescue.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torchmetrics import Metric

from lightning_amp.data.batch_parts import tensors_in
from lightning_amp.footprint.bounded_step import BoundedStep, StepOverBudget
from lightning_amp.lightning._compat import rank_zero_warn
from lightning_amp.lightning.faults.activity import is_out_of_memory
from lightning_amp.lightning.steps.out_of_memory import tell_where
from lightning_amp.random_streams import random_streams, set_random_streams


def first_batches(added_up: int) -> int:
    """How many are counted: the last has the optimiser's state, and gradients of one before that it is added to."""
    return added_up + min(added_up, 2)


class CountedBatches:
    """Counts the batches of a plan whose bytes are not known yet, each while it runs.

    Args:
        module: The LightningModule.
        budget: The most bytes that may be alive.
        why: Added to the error of a batch that needs more.
    """

    def __init__(self, module: pl.LightningModule, budget: int, *, why: str = "") -> None:
        self._module, self._budget, self._why = module, budget, why
        self._parameters = list(module.parameters())
        self._step: BoundedStep | None = None
        self._known: set[Any] = set()
        self._left = self._most_bytes = 0
        self._begin()

    @contextmanager
    def counting(self, batch: Any) -> Iterator[None]:
        """Count the bytes of a batch, if they may exceed those of batches before.

        Raises:
            StepOverBudget: By the operator whose result is too much.
        """
        trained, n_bytes = self._trained_now(), sum(tensor.nbytes for tensor in tensors_in(batch))
        if self._known and trained not in self._known:
            self._begin()
            self._why = "it trains other parameters than those before, or an optimiser has others"
        elif n_bytes > self._most_bytes and not self._left:
            self._left, self._why = 1, "no batch before it had as many bytes"
        self._known.add(trained)
        self._most_bytes = max(self._most_bytes, n_bytes)
        if not self._left:
            yield
            return
        self._left -= 1
        self._step = BoundedStep(self._module, self._budget)
        self._step.start(batch, self._module.trainer.optimizers)
        try:
            yield
        except StepOverBudget as error:
            if self._why:
                error.args = (f"{error}; {self._why}",)
            raise
        finally:
            self._step.stop()
            self._step = None

    def unbound(self) -> None:
        """Refuse nothing more of this batch."""
        if self._step is not None:
            self._step.unbound()

    def begin_again(self) -> None:
        """Another plan is installed, whose first batches come now."""
        self._known.clear()
        self._begin()

    def _begin(self) -> None:
        self._left, self._most_bytes = first_batches(self._module.trainer.accumulate_grad_batches), 0

    def _trained_now(self) -> Any:
        """Which parameters need gradients, and how many each group of an optimiser has."""
        groups = (group for optimizer in self._module.trainer.optimizers for group in optimizer.param_groups)
        flags = (parameter.requires_grad for parameter in self._parameters)
        return tuple(flags), tuple(len(group["params"]) for group in groups)


def refuse_beyond(budget: int, trainer: pl.Trainer, *, why: str = "") -> Callable[[], None]:
    """Refuse batches of a fit that need more bytes, with a reason why none was refused before; returns what ends it."""
    module, loops = trainer.lightning_module, trainer.fit_loop.epoch_loop
    loop: Any = loops.automatic_optimization if module.automatic_optimization else loops.manual_optimization
    counted, plain = CountedBatches(module, budget, why=why), loop.run

    def run(*args: Any) -> Any:
        with counted.counting(args):
            return plain(*args)

    loop.run = run
    return lambda: vars(loop).pop("run", None)


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
