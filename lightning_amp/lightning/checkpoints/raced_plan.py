"""The plan that has won a race, in a checkpoint: a resumed run starts with it."""

from typing import Any

from lightning_amp.errors import AmpError
from lightning_amp.lightning._compat import rank_zero_info
from lightning_amp.planning.plan.plan import Plan

IN_CHECKPOINT = "lightning_amp_plan"
"""Key of the plan, beside those that every Trainer writes."""


def with_raced_plan(checkpoint: dict[str, Any], plan: Plan | None) -> dict[str, Any]:
    """The checkpoint, with the plan that has won a race, so that a resumed run starts with it."""
    if plan is None or plan.measured_step_seconds is None:
        return checkpoint
    return {**checkpoint, IN_CHECKPOINT: plan.to_json()}


def raced_plan(checkpoint: dict[str, Any]) -> Plan | None:
    """The plan that `with_raced_plan` has put into a checkpoint; None where there is none that this version reads."""
    text = checkpoint.get(IN_CHECKPOINT)
    try:
        return None if text is None else Plan.from_json(text)
    except AmpError as error:
        rank_zero_info(f"the plan in the checkpoint is not used, and plans race again: {error}")
        return None
