"""Define what a request leaves open of a pipeline, and what is known of a step's stages before planning."""

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
class PipelineOptions:
    """What a request says of a pipeline; None leaves it open.

    Attributes:
        model: Ranks of the model axis.
        micro_batches, schedule: As of AMPStrategy.
        ends: One past the last block of every stage.
        again: Patterns of blocks to compute again; left open, as few as are needed to fit.
        chunks: Specs of blocks to run in chunks, by name or pattern; left open, where nothing else fits.
        all_chunks: Left open: all blocks that can be, with the least bytes that do not make them far slower.
        speeds: Of all ranks, by that of the fastest; none: all are equal.
        memory: Bytes of all ranks; one or none: all have the budget.
    """

    model: int | None = None
    micro_batches: int | None = None
    schedule: str | None = None
    ends: tuple[int, ...] | None = None
    again: tuple[str, ...] | None = None
    chunks: Mapping[str, ChunkBlock] | None = None
    all_chunks: bool = False
    speeds: tuple[float, ...] = ()
    memory: tuple[int, ...] = ()

    def more_bytes(self, model: int) -> tuple[int, ...]:
        """Of the ranks of the model axis beyond the least of all ranks; of a place the least of its groups."""
        if len(self.memory) < 2:
            return (0,) * model
        return tuple(min(self.memory[m::model]) - min(self.memory) for m in range(model))


OPEN = PipelineOptions()


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


def no_pipeline(step: ProfiledStep, reason: str) -> ProfiledStep:
    """The step with the reason why it cannot be a pipeline."""
    return replace(step, facts={**step.facts, NAME: StageFacts(reason=reason)})


def stages_of(step: ProfiledStep) -> StageFacts:
    """What is known of a step's stages."""
    found: StageFacts = step.facts.get(NAME, NOTHING_KNOWN)
    return found
