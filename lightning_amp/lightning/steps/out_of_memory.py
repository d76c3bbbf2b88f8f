"""Say where memory ended in a step, what was held, what was predicted, and which plan to try next.

Nothing watches the operators of a step while it trains, for that takes time. What is known is read from the error
itself, whose traceback has the functions that ran:

    a module's function, innermost    its name, and the line of the user's own code
    autograd                          the last parameter, in the order in which they were made, without a gradient yet
    an optimiser                      its class

Where a batch was counted (rescue.py), the error itself names operator, tensor and module, and every kind.

Known limits: activations and temporaries are distinguished only where a batch was counted; of a module whose parameters
were made in another order than they are read in, the backward pass names another parameter. Not run on a GPU.
"""

from collections.abc import Iterable
from traceback import walk_tb
from types import FrameType

import psutil
import torch
from lightning.pytorch.strategies import Strategy
from torch import nn
from torch.optim import Optimizer

from lightning_amp.footprint.bounded_step import StepOverBudget
from lightning_amp.footprint.failed_step import users_line
from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.footprint.module_profile import GRADIENTS, PARAMETERS, STATE
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.reports.plan_report import batch_text
from lightning_amp.quantities import format_bytes

TOLD = "_amp_told"
"""Attribute of an error that has said where memory ended: it may be caught, and raised again."""


def tell_where(
    error: BaseException, module: nn.Module, optimizers: Iterable[Optimizer], device: torch.device
) -> None:
    """Add to an error's text where memory has ended and what was held; once.

    Args:
        error: With its traceback.
        module: That is trained.
        optimizers: Of the run.
        device: Of this rank.
    """
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
    backward = [_is_backward(frame) for frame in frames]
    for k in range(len(frames) - 1, -1, -1):
        owner = frames[k].f_locals.get("self")
        if backward[k]:
            return f"Memory ended in the backward pass{_before(module)}{_line(error)}"
        if isinstance(owner, Optimizer):
            return f"Memory ended in the step of {type(owner).__name__}{_line(error)}"
        if id(owner) in names:
            again = ", again in the backward pass" if any(backward[:k]) else ""
            called = names[id(owner)] or "the module itself"
            return f"Memory ended in {frames[k].f_code.co_name} of {called}{again}{_line(error)}"
    return ""


def _is_backward(frame: FrameType) -> bool:
    code = frame.f_code
    return code.co_filename == torch.autograd.__file__ and code.co_name in ("backward", "grad")


def _before(module: nn.Module) -> str:
    missing = [name for name, p in module.named_parameters() if p.requires_grad and p.grad is None]
    return f", before there was a gradient of {missing[-1]}" if missing else ""


def _line(error: BaseException) -> str:
    line = users_line(error)
    return f" ({line})" if line else ""


def _held(module: nn.Module, optimizers: Iterable[Optimizer], device: torch.device) -> str:
    """Bytes by kind, as far as they can be told."""
    kinds = {
        PARAMETERS: [*module.parameters(), *module.buffers()],
        GRADIENTS: [p.grad for p in module.parameters() if p.grad is not None],
        STATE: [dict(state) for optimizer in optimizers for state in optimizer.state.values()],
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


LEANER = 0.75
"""Of the predicted peak of a plan for which there was no memory: what the next one may need."""


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
    predicted = (
        f"a peak of {format_bytes(plan.predicted_peak_bytes)}{least} was predicted for {batch_text(plan)}"
    )
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
