"""What to say when a rank has run out of memory: predicted beside measured, and the plan that needs least."""

import psutil
import torch

from lightning_amp.planning.plan.plan import Plan
from lightning_amp.quantities import format_bytes


def advice_on_memory(plan: Plan | None, device: torch.device) -> str:
    """One sentence or two for a person whose run has just ended; `plan` is None before it is made."""
    if device.type == "cuda":
        measured = f"{format_bytes(torch.cuda.max_memory_allocated(device))} were in use at most"
    else:
        measured = f"the process has {format_bytes(psutil.Process().memory_info().rss)}"
    if plan is None:
        return f"{measured}. No plan was made yet: the module itself, or the data, do not fit"
    predicted = (
        f"a peak of {format_bytes(plan.predicted_peak_bytes)} was predicted for {plan.batch_size} cells"
    )
    if plan.budget_bytes is not None:
        predicted += f", of {format_bytes(plan.budget_bytes)}"
    return f"{predicted}, and {measured}. {_smaller(plan)}"


def _smaller(plan: Plan) -> str:
    least = min(plan.candidates, key=lambda c: c.peak_bytes, default=None)
    if least is None or least.peak_bytes >= plan.predicted_peak_bytes:
        return "No plan for these ranks needs less: take fewer cells in a batch, or more devices"
    return (
        f"The plan that needs least is strategies={','.join(least.strategies)!r} with"
        f" model_parallel_size={least.model}: {format_bytes(least.peak_bytes)}; or take fewer cells in a batch"
    )
