"""Report where a training step ran out of memory and what was allocated, and run the batch again with a leaner plan.

Training steps are not traced, because that takes time. The place comes from the functions in the error's traceback:

    innermost function of a module    its name, and the line of the user's code
    autograd                          the last parameter, in order of creation, without a gradient
    optimiser                         its class

The state that the passes of a batch have changed is restored before it runs again (state_of_batch.py). Gradients are
deleted. If a parameter or the batch has changed and cannot be restored, the error is raised, with its name. So is an
error during the optimiser's step, because parameters may have changed.

    rank that runs out of memory    joins the others' collective at the end of their backward pass, to report it
    other ranks                     receive the report there, before gradients are averaged, and run the batch again

On a CPU batches are counted against the user's budget (counted_batches.py).

Known limits: activations and temporaries are distinguished only if a batch was counted. If parameters were created in
another order than they are used, the message for the backward pass has the wrong parameter. Hooks of a training step,
such as `on_before_zero_grad`, are called again; side effects outside the module are not undone. Batches that need more
memory for other reasons than their sizes are detected late (counted_batches.py), such as longer generated texts or
random numbers that run more blocks. If a rank runs out of memory while gradients are averaged, the run stops as without
a rescue. Not tested on a GPU.
"""

from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack, nullcontext
from traceback import walk_tb
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy
from torch import nn
from torch.optim import Optimizer

from lightning_amp.footprint.bounded_step import StepOverBudget, users_line
from lightning_amp.footprint.host_state import on_device
from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.footprint.module_profile import GRADIENTS, PARAMETERS, STATE, ModuleProfile
from lightning_amp.lightning._compat import rank_zero_warn
from lightning_amp.lightning.faults.activity import is_out_of_memory
from lightning_amp.lightning.steps.counted_batches import MOST, CountedBatches, called_in, run_batches_by
from lightning_amp.lightning.steps.process_memory import resident_bytes
from lightning_amp.lightning.steps.state_of_batch import StateOfBatch
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.reports.plan_report import batch_text
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.data.gradient_sync import GradientSync
from lightning_amp.techniques.table import PREDICTIONS

TOLD = "_amp_told"
"""Attribute of an error whose message has the place already: it may be caught, and raised again."""
LEANER = 0.75
"""Largest peak of the next plan, as a share of the previous plan's predicted peak."""
SHOWN = 3
"""Largest number of tensors named in a message."""
TIMES = 3
"""Largest number of further plans in a fit."""


def tell_where(error: BaseException, module: nn.Module, optimizers: Iterable[Optimizer], device: torch.device) -> None:
    """Add to an error's text where memory ran out and what was allocated; once."""
    if getattr(error, TOLD, False):
        return
    said = [str(error), _place(error, module)]
    if not isinstance(error, StepOverBudget):
        said.append(f"Held were {_held(module, optimizers, device)}")
    error.args = (". ".join(text.rstrip(".") for text in said if text),)
    setattr(error, TOLD, True)


def _place(error: BaseException, module: nn.Module) -> str:
    """Return where in the step memory ran out, by the innermost function that shows it; "" if none does."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    names = {id(child): fqn for fqn, child in module.named_modules()}
    codes = [(frame.f_code.co_filename, frame.f_code.co_name) for frame in frames]
    backward = [file == torch.autograd.__file__ and name in ("backward", "grad") for file, name in codes]
    line = users_line(error)
    at = f" ({line})" if line else ""
    # from the innermost frame: a module's function within a backward pass is recomputed
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
    """Return the allocated bytes by kind, as far as known."""
    kinds = {
        PARAMETERS: [*module.parameters(), *module.buffers()],
        GRADIENTS: [p.grad for p in module.parameters()],
        STATE: [optimizer.state for optimizer in on_device(optimizers)],
    }
    # on a GPU, tensors in host memory are not counted
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
    """Add to an out-of-memory error its place, allocated and predicted bytes, and what to try next."""
    if run.lightning_module is not None:
        tell_where(error, run.lightning_module, run.optimizers, run.root_device)
    error.args = (f"{str(error).rstrip('.')}. {advice_on_memory(plan, run.root_device)}",)


def advice_on_memory(plan: Plan | None, device: torch.device) -> str:
    """Return advice for a user whose run has stopped; `plan` is None before planning."""
    if device.type == "cuda":
        measured = f"{format_bytes(torch.cuda.max_memory_allocated(device))} were in use at most"
    else:
        measured = f"the process has {format_bytes(resident_bytes())}"
    if plan is None:
        return f"{measured}. No plan was made yet: the module itself, or the data, do not fit"
    least = " at least" if plan.uncounted else ""
    predicted = f"A peak of {format_bytes(plan.predicted_peak_bytes)}{least} was predicted for {batch_text(plan)}"
    if plan.budget_bytes is not None:
        predicted += f", of {format_bytes(plan.budget_bytes)}"
    return f"{predicted}, and {measured}. {_next(plan)}"


def _next(plan: Plan) -> str:
    """Return the fastest plan that needs much less memory, else the one that needs least, or a technique that helps."""
    less = [c for c in plan.candidates if c.peak_bytes < plan.predicted_peak_bytes]
    much = [c for c in less if c.peak_bytes <= LEANER * plan.predicted_peak_bytes]
    if less:
        found = min(much, key=lambda c: c.cell_seconds) if much else min(less, key=lambda c: c.peak_bytes)
        return (
            f"The next plan to try is strategies={','.join(found.strategies)!r} with"
            f" model_parallel_size={found.model}: {format_bytes(found.peak_bytes)}; or take a smaller batch"
        )
    helps = {} if plan.diagnosis is None else plan.diagnosis.helps
    # each was drafted alone: some cannot be combined with the techniques of the plan, or need more ranks
    others = [
        name
        for name in helps
        if name not in plan.strategies
        and (name not in PREDICTIONS or PREDICTIONS[name].needs_ranks <= plan.gradient_ranks)
    ]
    if others and set(plan.strategies) <= {"S1"}:
        names = ",".join([*plan.strategies, others[0]])
        return f"The next plan to try is strategies={names!r}: {helps[others[0]]}; or take a smaller batch"
    if others:
        return (
            f"The next plan to try is the policy's, which may choose {' or '.join(others)}: leave `strategies` out; or"
            " take a smaller batch"
        )
    return "No plan for these ranks needs less: take a smaller batch, or more devices"


class OtherRank(MemoryError):
    """Another rank has run out of memory."""


class Rescue(pl.Callback):
    """Run batches of a fit, and run them again with a leaner plan if they run out of memory.

    Args:
        leaner: Function of the batch that installs a leaner plan, the same on all ranks, and describes it; "" if there
            is none.
        join: Function that takes part in the collectives of a step that other ranks start before `gradients_are_there`.
        written: Parameters that a step changes before its update, and "batch" if it changes the batch.
        budget: Bytes beyond which a counted batch raises; None does not count batches.
        predicted: Profile of the plan's step, as for CountedBatches.
        holds: Whether a budget is held: an update beyond it ends the run, and further plans keep it.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        *,
        leaner: Callable[[Any], str],
        join: Callable[[], None],
        budget: int | None,
        device: torch.device,
        written: Collection[str] = (),
        predicted: ModuleProfile | None = None,
        holds: bool = False,
    ) -> None:
        self._module, self._leaner, self._device, self._written = module, leaner, device, written
        self._left, self._updating, self._reported, self._join = MOST if holds else TIMES, False, False, join
        self._holds = holds
        self.counted = None if budget is None else CountedBatches(module, budget, predicted=predicted)

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        """Mark the start of the update: parameters may change from here on, so the batch cannot run again."""
        self._updating = True
        if self.counted is not None and not self._holds:
            self.counted.unbound()

    def gradients_are_there(self) -> None:
        """Learn after a backward pass, before gradients are averaged, whether a rank ran out of memory; a collective.

        Raises:
            OtherRank: Another rank has run out of memory.
        """
        self._reported = True
        if largest(0.0, self._device):
            raise OtherRank("memory has ended on another rank")

    def run(self, loop: Any, plain: Callable[..., Any], *args: Any) -> Any:
        """Run one batch by `plain(*args)`, as often as leaner plans are installed."""
        while True:
            self._updating = self._reported = False
            state = StateOfBatch(self._module, loop, args, self._written)
            try:
                with nullcontext() if self.counted is None else self.counted.counting(args, state.copied):
                    return plain(*args)
            except Exception as error:
                self._get_over(error, state, args)
            # planning may have drawn
            state.restore_draws()

    def _get_over(self, error: Exception, state: StateOfBatch, args: Any) -> None:
        """Install a leaner plan, or raise the error."""
        if not is_out_of_memory(error) or self._updating:
            raise error
        if not self._reported:
            # the other ranks wait in these collectives; they call the second in `gradients_are_there`
            self._join()
            largest(1.0, self._device)
        elif not isinstance(error, OtherRank):
            # the error occurred while gradients are averaged, which the other ranks wait for
            raise error
        if not self._left:
            raise error
        if not isinstance(error, OtherRank):
            tell_where(error, self._module, self._module.trainer.optimizers, self._device)
        text = f"{type(error).__name__}: {error}"
        # frees the tensors of the failed pass
        error.__traceback__ = error.__context__ = None
        _free(self._module)
        changed = state.changed()
        # decided over all ranks: if one of them raised alone, the others would wait for it
        if largest(float(bool(changed)), self._device):
            shown = ", ".join(map(repr, changed[:SHOWN])) or "something on another rank"
            more = f" and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
            cannot, less = (
                ("This batch cannot run", "")
                if self._holds
                else ("rescue=True cannot run this batch", ", or leave rescue out")
            )
            error.args = (
                f"{text}. {cannot} again: before the update it has changed {shown}{more}, which was not copied; change"
                f" it in on_train_batch_start or on_train_batch_end{less}",
            )
            raise error
        # before another plan is installed, which changes attributes too
        state.restore()
        done = self._leaner(next(iter(args[-1].values())))
        if not done:
            raise error
        self._left -= 1
        if self.counted is not None:
            self.counted.begin_again()
        rank_zero_warn(f"Memory has ended in a training batch, which now runs again: {done}. It was: {text}")


def rescue_batches(trainer: pl.Trainer, rescue: Rescue) -> Callable[[], None]:
    """Run a fit's batches by a rescue; return an undo."""
    with ExitStack() as undo:
        undo.callback(called_in(trainer, rescue))
        undo.callback(run_batches_by(trainer, rescue.run))
        return undo.pop_all().close


def _free(module: pl.LightningModule) -> None:
    for parameter in module.parameters():
        parameter.grad = None
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def largest(value: float, device: torch.device) -> float:
    """Return the largest value over all ranks; a collective."""
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return value
    box = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return float(box)
