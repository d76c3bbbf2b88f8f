"""Steps with what techniques know of them, put together by hand."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lightning_amp.costs.profiled_step import ProfiledStep
from lightning_amp.techniques.fsdp.bytes_of_ranks import ParameterUnit
from lightning_amp.techniques.fsdp.row import FullyShard
from lightning_amp.techniques.pipeline.stage_facts import stages_of


def with_units(step: ProfiledStep, units: Sequence[ParameterUnit], spec: FullyShard | None = None) -> ProfiledStep:
    """Parameters that fsdp can split, whose gradients ranks average."""
    sizes = tuple(p.whole_bytes for unit in units for p in unit.parameters if p.trained)
    facts = {**step.facts, "fsdp": tuple(units)}
    requested = {} if spec is None else {"fsdp": spec}
    return replace(step, facts=facts, gradient_sizes=sizes).requesting(requested)


def with_stages(step: ProfiledStep, **more: Any) -> ProfiledStep:
    """Blocks that can be stages: `passes`, `reason` of StageFacts."""
    return replace(step, facts={**step.facts, "pipeline": replace(stages_of(step), **more)})
