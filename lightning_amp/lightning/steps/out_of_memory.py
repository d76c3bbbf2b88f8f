"""Say where memory ended in a training step and what was held, and run the batch again with a leaner plan.

Nothing watches the operators of a step while it trains, for that takes time. What is known is read from the error
itself, whose traceback has the functions that ran:

    a module's function, innermost    its name, and the line of the user's own code
    autograd                          the last parameter, in the order in which they were made, without a gradient yet
    an optimiser                      its class

What a forward or backward pass leaves behind is put back before a batch runs again: random streams, buffers, states of
metrics, what was logged, counters of the loop; gradients are deleted, which automatic optimisation has zeroed anyway.
Parameters and the optimiser's state have not changed by then. Where they may have, in the optimiser's step itself, the
error is raised as it came.

    rank that has no memory     waits for the others at the end of their backward pass, and says so
    other ranks                 learn of it there, before gradients are averaged, and run the batch again too

On a CPU nobody says that memory has ended before the machine does. There batches are counted, storage by storage,
against the budget that was named, and the error itself names operator, tensor and module, and every kind of bytes. To
count takes time, so it is done where bytes may be others than those of before:

    the first batches of a plan    the last of them has the optimiser's state, and gradients that it adds to
    parameters that were frozen and are trained now, or that an optimiser was given    as many again
    a batch of more bytes than any that was counted, unless growth by the cube of that still fits the budget

Known limits: activations and temporaries are distinguished only where a batch was counted; of a module whose parameters
were made in another order than they are read in, the backward pass names another parameter. Hooks of a training step,
such as `on_before_zero_grad`, are called again with it; what they, and the training step, do outside of the module
stays done. What else makes a step larger is not noticed, such as longer generated texts, or a draw that runs more
blocks. A rank whose memory ends while others wait for it, in an average of gradients, ends the run as without a rescue.
Not run on a GPU.
"""

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from traceback import walk_tb
from typing import Any

import lightning.pytorch as pl
import psutil
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy
from torch import nn
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_amp.data.batch import dense_parts, tensors_in
from lightning_amp.footprint.bounded_step import BoundedStep, StepOverBudget, users_line
from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.footprint.module_profile import GRADIENTS, PARAMETERS, STATE
from lightning_amp.lightning._compat import rank_zero_warn
from lightning_amp.lightning.faults.activity import is_out_of_memory
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.reports.plan_report import batch_text
from lightning_amp.quantities import format_bytes
from lightning_amp.random_streams import random_streams, set_random_streams
from lightning_amp.techniques.data.gradient_sync import GradientSync

TOLD = "_amp_told"
"""Attribute of an error that has said where memory ended: it may be caught, and raised again."""
LEANER = 0.75
"""Of the predicted peak of a plan for which there was no memory: what the next one may need."""
TIMES = 3
"""Plans that are tried in a fit, after the first."""


def tell_where(error: BaseException, module: nn.Module, optimizers: Iterable[Optimizer], device: torch.device) -> None:
    """Add to an error's text where memory has ended and what was held; once."""
    if getattr(error, TOLD, False):
        return
    said = [str(error), _place(error, module)]
    if not isinstance(error, StepOverBudget):
        said.append(f"Held were {_held(module, optimizers, device)}")
    error.args = (". ".join(text.rstrip(".") for text in said if text),)
    setattr(error, TOLD, True)


def _place(error: BaseException, module: nn.Module) -> str:
    """The innermost function that says where a step was, "" where none does."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    names = {id(child): fqn for fqn, child in module.named_modules()}
    codes = [(frame.f_code.co_filename, frame.f_code.co_name) for frame in frames]
    backward = [file == torch.autograd.__file__ and name in ("backward", "grad") for file, name in codes]
    line = users_line(error)
    at = f" ({line})" if line else ""
    # from the innermost: a module's function within a backward pass is one that is computed again
    for k in range(len(frames) - 1, -1, -1):
        owner = frames[k].f_locals.get("self")
        if backward[k]:
            missing = [name for name, p in module.named_parameters() if p.requires_grad and p.grad is None]
            before = f", before there was a gradient of {missing[-1]}" if missing else ""
            return f"Memory ended in the backward pass{before}{at}"
        if isinstance(owner, GradientSync):
            return f"Memory ended in the average of gradients over ranks{at}"
        if isinstance(owner, Optimizer):
            return f"Memory ended in the step of {type(owner).__name__}{at}"
        if id(owner) in names:
            again = ", again in the backward pass" if any(backward[:k]) else ""
            called = names[id(owner)] or "the module itself"
            return f"Memory ended in {frames[k].f_code.co_name} of {called}{again}{at}"
    return ""


def _held(module: nn.Module, optimizers: Iterable[Optimizer], device: torch.device) -> str:
    """Bytes by kind, as far as they can be told."""
    kinds = {
        PARAMETERS: [*module.parameters(), *module.buffers()],
        GRADIENTS: [p.grad for p in module.parameters()],
        STATE: [optimizer.state for optimizer in optimizers],
    }
    # on a GPU nothing counts that lies in the host's memory
    other = None if device.type == "cpu" else device.type
    meter, held = LiveBytes(device_type=other), dict[str, int]()
    for kind, values in kinds.items():
        before = meter.current
        meter.watch(values)
        held[kind] = meter.current - before
    if device.type == "cuda":
        more = torch.cuda.memory_allocated(device) - meter.current
        held["activations, temporaries and all else"] = max(0, more)
    return ", ".join(f"{format_bytes(n_bytes)} of {kind}" for kind, n_bytes in held.items())


def explain(error: BaseException, plan: Plan | None, run: Strategy) -> None:
    """Add to an error of memory where it was, what was held, what was predicted, and what to try next."""
    if run.lightning_module is not None:
        tell_where(error, run.lightning_module, run.optimizers, run.root_device)
    error.args = (f"{str(error).rstrip('.')}. {advice_on_memory(plan, run.root_device)}",)


def advice_on_memory(plan: Plan | None, device: torch.device) -> str:
    """Some sentences for a person whose run has just ended; `plan` is None before it is made."""
    if device.type == "cuda":
        measured = f"{format_bytes(torch.cuda.max_memory_allocated(device))} were in use at most"
    else:
        measured = f"the process has {format_bytes(psutil.Process().memory_info().rss)}"
    if plan is None:
        return f"{measured}. No plan was made yet: the module itself, or the data, do not fit"
    least = " at least" if plan.uncounted else ""
    predicted = f"A peak of {format_bytes(plan.predicted_peak_bytes)}{least} was predicted for {batch_text(plan)}"
    if plan.budget_bytes is not None:
        predicted += f", of {format_bytes(plan.budget_bytes)}"
    return f"{predicted}, and {measured}. {_next(plan)}"


def _next(plan: Plan) -> str:
    """The fastest plan that needs much less, else the one that needs least; of a module also what was not asked for."""
    less = [c for c in plan.candidates if c.peak_bytes < plan.predicted_peak_bytes]
    much = [c for c in less if c.peak_bytes <= LEANER * plan.predicted_peak_bytes]
    if less:
        found = min(much, key=lambda c: c.cell_seconds) if much else min(less, key=lambda c: c.peak_bytes)
        return (
            f"The next plan to try is strategies={','.join(found.strategies)!r} with"
            f" model_parallel_size={found.model}: {format_bytes(found.peak_bytes)}; or take a smaller batch"
        )
    helps = {} if plan.diagnosis is None else plan.diagnosis.helps
    other = next((name for name in helps if name not in plan.strategies), "")
    if other:
        asked = ",".join([*plan.strategies, other])
        return f"The next plan to try is strategies={asked!r}: {helps[other]}; or take a smaller batch"
    return "No plan for these ranks needs less: take a smaller batch, or more devices"


class CountedBatches:
    """Counts the batches of a plan whose bytes are not known yet, each while it runs.

    Args:
        budget: The most bytes that may be alive.
        why: Added to the error of a batch that needs more.
    """

    def __init__(self, module: pl.LightningModule, budget: int, *, why: str = "") -> None:
        self._module, self._budget, self._why = module, budget, why
        self._parameters = list(module.parameters())
        self._step: BoundedStep | None = None
        self._known: set[Any] = set()
        self._left = self._most_bytes = self._counted_bytes = self._peak_bytes = 0
        self._begin()

    @contextmanager
    def counting(self, batch: Any) -> Iterator[None]:
        """Count the bytes of a batch, if they may exceed those of batches before.

        Raises:
            StepOverBudget: By the operator whose result is too much.
        """
        parts = (part for tensor in tensors_in(batch) for part in dense_parts(tensor) or (tensor,))
        trained, n_bytes = self._trained_now(), sum(part.nbytes for part in parts)
        if self._known and trained not in self._known:
            self._begin()
            self._why = "it trains other parameters than those before, or an optimiser has others"
        elif n_bytes > self._most_bytes and not self._left and self._may_exceed(n_bytes):
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
            self._counted_bytes = max(self._counted_bytes, n_bytes)
            self._peak_bytes = max(self._peak_bytes, self._step.peak)
            self._step = None

    def _may_exceed(self, n_bytes: int) -> bool:
        """Whether a larger batch may exceed the budget; a step of recurrent layers takes ten times as long counted."""
        # attention grows by the square of a length, pairs of pairs by its cube
        growth = n_bytes / max(1, self._counted_bytes)
        return self._peak_bytes * growth**3 > self._budget

    def unbound(self) -> None:
        """Refuse nothing more of this batch."""
        if self._step is not None:
            self._step.unbound()

    def begin_again(self) -> None:
        """Another plan is installed, whose first batches come now."""
        self._known.clear()
        self._begin()

    def _begin(self) -> None:
        # the last of them has the optimiser's state, and gradients of one before that it is added to
        added_up = self._module.trainer.accumulate_grad_batches
        self._left, self._most_bytes = added_up + min(added_up, 2), 0

    def _trained_now(self) -> Any:
        """Which parameters need gradients, and how many each group of an optimiser has."""
        groups = (group for optimizer in self._module.trainer.optimizers for group in optimizer.param_groups)
        flags = (parameter.requires_grad for parameter in self._parameters)
        return tuple(flags), tuple(len(group["params"]) for group in groups)


def refuse_beyond(budget: int, trainer: pl.Trainer, *, why: str = "") -> Callable[[], None]:
    """Refuse batches of a fit that need more bytes, with a reason why none was refused before; returns what ends it."""
    counted = CountedBatches(trainer.lightning_module, budget, why=why)

    def counting(loop: Any, plain: Callable[..., Any], *args: Any) -> Any:
        with counted.counting(args):
            return plain(*args)

    return _run_batches_by(trainer, counting)


def _run_batches_by(trainer: pl.Trainer, run: Callable[..., Any]) -> Callable[[], None]:
    """Let a fit run batches by `run(loop, plain, *args)`; returns what ends it."""
    loops, automatic = trainer.fit_loop.epoch_loop, trainer.lightning_module.automatic_optimization
    loop: Any = loops.automatic_optimization if automatic else loops.manual_optimization
    loop.run = partial(run, loop, loop.run)
    return lambda: vars(loop).pop("run", None)


class OtherRank(MemoryError):
    """Memory has ended on another rank."""


class Rescue(pl.Callback):
    """Runs batches of a fit, and once more those for which there was no memory.

    Args:
        leaner: Installs a plan that needs less, the same on all ranks, and says what it did; "" where there is none.
        budget: Bytes beyond which a counted batch is refused; None counts none.
    """

    def __init__(
        self, module: pl.LightningModule, *, leaner: Callable[[], str], budget: int | None, device: torch.device
    ) -> None:
        self._module, self._leaner, self._device = module, leaner, device
        self._left, self._updating, self._told = TIMES, False, False
        self._counted = None if budget is None else CountedBatches(module, budget)

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
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
            undo = _undoing(self._module, loop)
            try:
                with nullcontext() if self._counted is None else self._counted.counting(args):
                    return plain(*args)
            except Exception as error:
                self._get_over(error)
            # outside of the handler, which holds what the failed pass has made
            undo()

    def _get_over(self, error: Exception) -> None:
        """Install a leaner plan, or raise the error."""
        if not is_out_of_memory(error) or self._updating:
            raise error
        if not self._told:
            # the other ranks wait for this at the end of their backward pass, in `gradients_are_there`
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


def rescue_batches(trainer: pl.Trainer, rescue: Rescue) -> Callable[[], None]:
    """Let a fit's batches run by a rescue; returns what ends it."""
    stop = _run_batches_by(trainer, rescue.run)
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    callbacks.append(rescue)

    def end() -> None:
        stop()
        if rescue in callbacks:
            callbacks.remove(rescue)

    return end


def _undoing(module: pl.LightningModule, loop: Any) -> Callable[[], None]:
    """Note what a batch may change before its optimiser's step; returns what puts it back."""
    random, progress = random_streams(), loop.optim_progress.state_dict()
    results = module.trainer.fit_loop.epoch_loop._results
    logged = set(results)
    metrics = [*(child for child in module.modules() if isinstance(child, Metric)), *results.values()]
    # a step may write into a buffer, or put another tensor in its place
    values = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    kept: list[tuple[dict[str, Any], dict[str, Any]]]
    kept = [(part._buffers, dict(part._buffers)) for part in module.modules()]
    kept += [(vars(metric), _state(metric)) for metric in metrics]

    def undo() -> None:
        _free(module)
        with torch.no_grad():
            for buffer, before in values:
                buffer.copy_(before)
        for names, held in kept:
            names.update(held)
        for name in set(results) - logged:
            del results[name]
        loop.optim_progress.load_state_dict(progress)
        set_random_streams(random)

    return undo


def _state(metric: Metric) -> dict[str, Any]:
    """What an update changes; also of what Lightning keeps of a logged value, which is a metric too."""
    states = {name: copy.deepcopy(getattr(metric, name)) for name in metric._defaults}
    # others take the place of these, which may have a graph and could not be copied
    return states | {name: getattr(metric, name) for name in ("_update_count", "_computed", "_forward_cache")}


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
