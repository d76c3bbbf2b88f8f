"""Compose the out-of-memory message: where, predicted and measured bytes, and the next plan to try."""

import psutil
import torch
from lightning.pytorch.strategies import Strategy

from lightning_amp.lightning.steps.end_of_memory import tell_where
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.reports.plan_report import batch_text
from lightning_amp.quantities import format_bytes

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
