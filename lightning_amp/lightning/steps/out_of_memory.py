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

On a CPU batches are counted against the budget that was named (counted_batches.py).

Known limits: activations and temporaries are distinguished only where a batch was counted; of a module whose parameters
were made in another order than they are read in, the backward pass names another parameter. Hooks of a training step,
such as `on_before_zero_grad`, are called again with it; what they, and the training step, do outside of the module
stays done. What else makes a step larger is not noticed, such as longer generated texts, or a draw that runs more
blocks. A rank whose memory ends while others wait for it, in an average of gradients, ends the run as without a rescue.
Not run on a GPU.
"""

from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext
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

from lightning_amp.footprint.bounded_step import StepOverBudget, users_line
from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.footprint.module_profile import GRADIENTS, PARAMETERS, STATE
from lightning_amp.lightning._compat import rank_zero_warn
from lightning_amp.lightning.faults.activity import is_out_of_memory
from lightning_amp.lightning.steps.counted_batches import CountedBatches, called_in, run_batches_by
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
    with ExitStack() as undo:
        undo.callback(called_in(trainer, rescue))
        undo.callback(run_batches_by(trainer, rescue.run))
        return undo.pop_all().close


def _undoing(module: pl.LightningModule, loop: Any) -> Callable[[], None]:
    """Note what a batch may change before its optimiser's step; returns what puts it back."""
    random, progress = random_streams(), loop.optim_progress.state_dict()
    results = module.trainer.fit_loop.epoch_loop._results
    logged = set(results)
    metrics = [*(child for child in module.modules() if isinstance(child, Metric)), *results.values()]
    # a step may write into a buffer, or put another tensor in its place
    values = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    kept: list[tuple[dict[str, Any], dict[str, Any]]]
    scripted = torch.jit.ScriptModule
    kept = [(part._buffers, dict(part._buffers)) for part in module.modules() if not isinstance(part, scripted)]
    for metric in metrics:
        # what an update changes; also of what Lightning keeps of a logged value, which is a metric too
        held = {name: getattr(metric, name) for name in metric._defaults}
        # to a list tensors are added, which may have a graph
        states = {k: list(x) if isinstance(x, list) else x.detach().clone() for k, x in held.items()}
        # others take the place of these, which may have a graph and could not be copied
        others = {name: getattr(metric, name) for name in ("_update_count", "_computed", "_forward_cache")}
        kept.append((vars(metric), states | others))

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
