"""Define what is known of a step's stages before planning."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from lightning_amp.costs.profiled_step import ProfiledStep
from lightning_amp.footprint.chain.passes import Passes
from lightning_amp.techniques.chunk.forms import ChunkForms
from lightning_amp.techniques.chunk.row import ChunkBlock

NAME = "pipeline"
PassesOf = Callable[[int | None], Passes | str]
"""Samples of a micro-batch, None for the whole batch -> the passes of a step, or why it cannot be run as stages."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageChunks:
    """The blocks of stages in chunks.

    Attributes:
        forms: Samples of a micro-batch -> what its blocks may run as.
        passes: Samples, and specs of blocks by name or pattern -> the passes of a step, or why it cannot be run so.
    """

    forms: Callable[[int], ChunkForms]
    passes: Callable[[int, Mapping[str, ChunkBlock]], Passes | str]


@dataclass(frozen=True, kw_only=True, slots=True)
class StageFacts:
    """A step's blocks as stages.

    Attributes:
        passes: For a batch of any length; None where there can be no pipeline.
        reason: Why there can be none.
        chunks: The same with blocks in chunks.
    """

    passes: PassesOf | None = None
    reason: str = "its blocks were not looked at"
    chunks: StageChunks | None = None

    def whole(self) -> Passes | str:
        """The passes of the whole batch, or why there can be no pipeline."""
        return self.reason if self.passes is None else self.passes(None)


NOTHING_KNOWN = StageFacts()


def without_stages(step: ProfiledStep, reason: str) -> ProfiledStep:
    """The step with the reason why it cannot be a pipeline."""
    return replace(step, facts={**step.facts, NAME: StageFacts(reason=reason)})


def stages_of(step: ProfiledStep) -> StageFacts:
    """What is known of a step's stages."""
    found: StageFacts = step.facts.get(NAME, NOTHING_KNOWN)
    return found


def blocks_of(step: ProfiledStep) -> int | str:
    """How many blocks can be stages, or why there can be no pipeline."""
    whole = stages_of(step).whole()
    return whole if isinstance(whole, str) else len(whole.names)
