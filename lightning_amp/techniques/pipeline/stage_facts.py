"""Define the facts of a profiled step that the planning of pipeline stages needs."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from lightning_amp.costs.profiled_step import ProfiledStep
from lightning_amp.footprint.chain.passes import Passes
from lightning_amp.on_demand import first_of

NAME = "pipeline"
PassesOf = Callable[[int | None], Passes | str]
"""Rows of a micro-batch, None for the full batch -> the passes of a step, or why it cannot run as stages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageFacts:
    """Functions that count a step's blocks as stages.

    Attributes:
        passes: Counts the passes for a batch of any size; None if there can be no pipeline.
        reason: Why there can be none.
    """

    passes: PassesOf | None = None
    reason: str = "its blocks were not looked at"

    def whole(self) -> Passes | str:
        """Return the passes of the full batch, or why there can be no pipeline."""
        return self.reason if self.passes is None else self.passes(None)


NOTHING_KNOWN = StageFacts()


def without_stages(step: ProfiledStep, reason: str) -> ProfiledStep:
    """Return the step with a reason why it cannot be a pipeline."""
    return replace(step, facts=first_of({NAME: StageFacts(reason=reason)}, step.facts))


def stages_of(step: ProfiledStep) -> StageFacts:
    """Return the facts about a step's stages."""
    found: StageFacts = step.facts.get(NAME, NOTHING_KNOWN)
    return found


def blocks_of(step: ProfiledStep) -> int | str:
    """Return the number of blocks that can be stages, or why there can be no pipeline."""
    whole = stages_of(step).whole()
    return whole if isinstance(whole, str) else len(whole.names)
