"""Choose which blocks of a pipeline's stages are recomputed or run in chunks, and predict the step with them.

A recorded step in which they keep everything becomes that in which they keep their inputs: what autograd keeps of such
a block is let go of after its forward pass, and before the first operator of its backward pass all operators of its
forward pass come once more, with their own storages. So every stage's bytes and seconds follow as without.

    which    of each rank over the budget the fewest blocks with which it fits, those first that give back the most
             bytes for a second; all of them where that is not enough

A step in which blocks run in chunks is recorded once more, once with all of them for each of the budgets that they have
plans for (chunk/forms.py). A rank's bytes are those of its own segments, so every rank has its own choice:

    in chunks    every rank takes the budgets with which it is fastest of those with which it fits, with as few blocks
                 computed again as that needs; where it fits as it is, none

Known limits: the second pass is counted to its end, and ends with the last tensor that is needed; blocks are taken one
after the other in that order, which need not be the best set; all blocks of a rank that can are in chunks, or none.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import numpy as np

from lightning_amp.costs.profiled_step import LEAST_SECONDS, ProfiledStep
from lightning_amp.costs.rule import Rule
from lightning_amp.errors import PlanError
from lightning_amp.footprint.chain.passes import Passes
from lightning_amp.quantities import format_bytes, format_seconds
from lightning_amp.techniques.chunk.row import ChunkBlock
from lightning_amp.techniques.pipeline.row import PipelineStages
from lightning_amp.techniques.pipeline.schedule.micro_batches import segment_seconds
from lightning_amp.techniques.pipeline.schedule.stage_bytes import Pipeline, rank_peak
from lightning_amp.techniques.pipeline.stage_facts import StageChunks, stages_of
from lightning_amp.techniques.recompute.row import RecomputeBlock
from lightning_amp.techniques.stage_search import StageOptions


def decided(spec: PipelineStages, rules: Sequence[Rule]) -> StageOptions:
    """All that a plan has decided of its stages, given the spec and all rules."""
    return StageOptions(
        micro_batches=spec.micro_batches,
        schedule=spec.schedule,
        ends=tuple(int(end) for end in spec.ends.split(",")) if spec.ends else None,
        again=tuple(rule.fqn for rule in rules if isinstance(rule.spec, RecomputeBlock)),
        chunks={rule.fqn: rule.spec for rule in rules if isinstance(rule.spec, ChunkBlock)},
    )


def with_named(asked: StageOptions, names: Collection[str], *, budget_named: bool) -> StageOptions:
    """The options, with what techniques ask that a person has named together with a pipeline.

    Raises:
        PlanError: One of them does not go together with a pipeline.
    """
    others = [name for name in names if name not in ("recompute", "chunk")]
    if others:
        raise PlanError(f"pipeline together with {', '.join(others)} is not supported: leave one of them out")
    return replace(
        asked,
        # of a budget that was named as few as are needed
        again=() if "recompute" not in names else None if budget_named else ("*",),
        chunks=None if "chunk" in names else {},
        all_chunks="chunk" in names and not budget_named,
    )


def asked_inside(asked: StageOptions) -> str:
    """A technique that is required inside of stages; "" where none is."""
    return "chunk" if asked.chunks is None else "recompute" if asked.again != () else ""


def repeatable(seen: ProfiledStep, passes: Passes, patterns: Collection[str] = ("*",)) -> tuple[int, ...]:
    """Those blocks that one of some patterns names and that can be computed a second time, by their place."""
    again = set(seen.chain.names)
    return tuple(
        i
        for i, name in enumerate(passes.names)
        if name in again and any(fnmatchcase(name, pattern) for pattern in patterns)
    )


def computed_again(passes: Passes, blocks: Collection[int]) -> Passes:
    """The same step with some blocks computed again."""
    back = {i: np.flatnonzero(passes.segment == i) for i in blocks}
    # in the order of their backward passes; one that has none is not computed again
    listed = sorted((int(times[0]), i) for i, times in back.items() if len(times))
    starts = np.array([start for start, _ in listed], dtype=np.int64)
    lengths = np.array([passes.first[i + 1] - passes.called[i] for _, i in listed], dtype=np.int64)
    added = np.concatenate([[0], np.cumsum(lengths)])

    # where a time lies once the forward passes that come again are put in before it
    def later(t: Any) -> Any:
        # To the right: the first operator of a backward pass itself comes after the forward pass that is put in before
        # it.
        return t + added[np.searchsorted(starts, t, side="right")]

    places = later(np.arange(len(passes.segment)))
    total = len(passes.segment) + int(added[-1])
    segment, optimises, seconds = np.full(total, -1), np.zeros(total, dtype=bool), np.zeros(total)
    segment[places], optimises[places], seconds[places] = passes.segment, passes.optimises, passes.seconds
    maker = np.full(total, -1)
    maker[places] = passes.maker
    uses, gradients = passes.uses.copy(), passes.gradients.copy()
    uses[:, 2], gradients[:, [0, 3]] = later(uses[:, 2]), later(gradients[:, [0, 3]])
    births, ends, sizes = [later(passes.birth)], [later(passes.held)], [passes.n_bytes]
    for (_, i), start in zip(listed, starts + added[:-1], strict=True):
        begin, end = int(passes.called[i]), int(passes.first[i + 1])
        segment[start : start + end - begin] = i
        seconds[start : start + end - begin] = passes.seconds[begin:end]
        own = _made_by(passes, i)
        of_own = (uses[:, 1] == i) & own[uses[:, 0]]
        # a storage of the second pass lives as in the first one, or until the backward pass has read it
        # What the first pass leaves beyond its end, as the result of the block, the second one makes and drops: no
        # later operator reads that copy.
        until = start - begin + np.minimum(passes.held, end - 1)
        np.maximum.at(until, uses[of_own, 0], uses[of_own, 2])
        births.append(start - begin + passes.birth[own])
        ends.append(until[own])
        sizes.append(passes.n_bytes[own])
        # what the block is given is kept for the second pass until its backward pass ends
        last = int(places[back[i][-1]])
        given = np.array([(n, i, last, -1) for n in passes.inputs[i]], dtype=np.int64).reshape(-1, 4)
        uses = np.concatenate([uses[~of_own], given])
    copies = sum(map(len, sizes[1:]))
    return replace(
        passes,
        segment=segment,
        optimises=optimises,
        seconds=seconds,
        birth=np.concatenate(births),
        held=np.concatenate(ends),
        n_bytes=np.concatenate(sizes),
        computed=np.concatenate([passes.computed, np.ones(copies, dtype=bool)]),
        of_blocks=np.concatenate([passes.of_blocks, np.ones(copies, dtype=bool)]),
        maker=maker,
        uses=uses,
        gradients=gradients,
    )


def fewest_again(pipeline: Pipeline, blocks: Sequence[int], budgets: Sequence[int]) -> tuple[int, ...]:
    """Of these blocks those that are computed again so that every rank fits its bytes, as far as it can."""
    return tuple(sorted(i for rank, n in enumerate(budgets) for i in _fewest_of(pipeline, rank, blocks, n)))


def _fewest_of(pipeline: Pipeline, rank: int, blocks: Sequence[int], budget: int) -> list[int]:
    part = pipeline.part
    own = [i for i in blocks if any(start <= i < end for start, end in pipeline.runs_of(rank))]
    own.sort(key=lambda i: -saved_bytes(part, i) / max(again_seconds(part, i), LEAST_SECONDS))
    low, high = 0, len(own)
    # the peak is taken to fall with every further block, so that the fewest are found by halving
    while low < high:
        middle = (low + high) // 2
        peak = rank_peak(replace(pipeline, part=computed_again(part, own[:middle])), rank)
        low, high = (low, middle) if peak <= budget else (middle + 1, high)
    return own[:low]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StagesInChunks:
    """A micro-batch as it is, with some blocks in chunks, and which ones these are, by name or pattern."""

    plain: Passes
    part: Passes
    chunks: Mapping[str, ChunkBlock]


class Levels:
    """A micro-batch of which all blocks run in chunks that can, for each of the budgets that they have plans for.

    Args:
        chunks: Of the step.
        part: Passes of the micro-batch as it is.
    """

    def __init__(self, chunks: StageChunks, part: Passes) -> None:
        self._chunks, self._rows, forms = chunks, part.rows, chunks.forms(part.rows)
        found = {name: forms.budgets(name) for name in part.names}
        self._budgets = {name: budgets for name, budgets in found.items() if budgets}
        self._quick = {name: forms.budgets(name, slow=False)[0] for name in self._budgets}
        self.reason = "" if self._budgets else forms.reason or "no block of the stages takes less in chunks"

    def __len__(self) -> int:
        """How many budgets there are."""
        return max(map(len, self._budgets.values()), default=0)

    def at(self, level: int, names: Collection[str] | None = None) -> dict[str, ChunkBlock]:
        """The blocks, or some of them, with one of their budgets; 0 is the least."""
        return {
            name: ChunkBlock(budget_bytes=budgets[min(level, len(budgets) - 1)])
            for name, budgets in self._budgets.items()
            if names is None or name in names
        }

    @property
    def every(self) -> dict[str, ChunkBlock]:
        """All blocks, with the least bytes that do not make them far slower."""
        return {name: ChunkBlock(budget_bytes=n_bytes) for name, n_bytes in self._quick.items()}

    def passes(self, level: int) -> Passes | str:
        """Of the micro-batch with all blocks at a level, or why one cannot be."""
        return self._chunks.passes(self._rows, self.at(level))


def with_chunks(seen: ProfiledStep, part: Passes, asked: StageOptions) -> StagesInChunks | str:
    """A micro-batch with what is to run in chunks whatever fits, or why that cannot be."""
    if not (asked.chunks or asked.all_chunks):
        return StagesInChunks(plain=part, part=part, chunks={})
    in_chunks, chunks = stages_of(seen).chunks, asked.chunks
    if in_chunks is None:
        return "its blocks were not looked at for chunks"
    if not chunks:
        levels = Levels(in_chunks, part)
        if levels.reason:
            return levels.reason
        chunks = levels.every
    found = in_chunks.passes(part.rows, chunks)
    return found if isinstance(found, str) else StagesInChunks(plain=part, part=found, chunks=chunks)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Choice:
    """For one rank: by how much it exceeds the budget, its seconds, its blocks in chunks, and those computed again."""

    over: int
    seconds: float
    chunks: Mapping[str, ChunkBlock]
    again: tuple[int, ...]

    def merit(self) -> tuple[int, float]:
        """Of two choices the better one has less of it."""
        return self.over, self.seconds


def fewest_chunks(
    pipeline: Pipeline, levels: Levels, again: Sequence[int], budgets: Sequence[int]
) -> tuple[dict[str, ChunkBlock], tuple[int, ...]]:
    """Blocks in chunks, and of `again` those that are computed again, so that every rank fits, as far as it can.

    Args:
        pipeline: With nothing of both.
        levels: Of its micro-batch.
        again: Blocks that can be computed again.
        budgets: Bytes of every rank.
    """
    found = [_choice(pipeline, rank, levels, again, budget) for rank, budget in enumerate(budgets)]
    return (
        {name: spec for choice in found for name, spec in choice.chunks.items()},
        tuple(sorted(i for choice in found for i in choice.again)),
    )


def _choice(pipeline: Pipeline, rank: int, levels: Levels, again: Sequence[int], budget: int) -> _Choice:
    tried = partial(_tried, pipeline, rank, levels, again, budget)
    best = tried(None)
    assert best is not None, "a micro-batch with nothing in chunks is there already"
    least = tried(0) if len(levels) and (best.over or best.again) else None
    if least is None or least.over:
        # nothing in between is looked for where the least is too much
        return best if least is None or best.over <= least.over else least
    for level in reversed(range(1, len(levels))):
        found = tried(level, None if best.over else best.seconds)
        if found is None:
            break
        best = min(best, found, key=_Choice.merit)
    return min(best, least, key=_Choice.merit)


def _tried(
    pipeline: Pipeline,
    rank: int,
    levels: Levels,
    again: Sequence[int],
    budget: int,
    level: int | None,
    seconds: float | None = None,
) -> _Choice | None:
    """A rank with all of its blocks at a level, None for none of them in chunks; None where a level cannot be, or takes
    as many seconds as it may.
    """
    names, runs = pipeline.part.names, pipeline.runs_of(rank)
    part = pipeline.part if level is None else levels.passes(level)
    if isinstance(part, str) or (seconds is not None and _seconds_of(part, runs) >= seconds):
        return None
    line = replace(pipeline, part=part)
    blocks = _fewest_of(line, rank, again, budget)
    line = replace(line, part=computed_again(part, blocks))
    own = {name for start, end in runs for name in names[start:end]}
    return _Choice(
        over=max(0, rank_peak(line, rank) - budget),
        seconds=_seconds_of(line.part, runs),
        chunks={} if level is None else levels.at(level, own),
        again=tuple(blocks),
    )


def _seconds_of(passes: Passes, runs: Sequence[tuple[int, int]]) -> float:
    forward, backward = segment_seconds(passes)
    return float(sum((forward + backward)[start:end].sum() for start, end in runs))


def targets_again(part: Passes, blocks: Sequence[int]) -> tuple[Rule, ...]:
    """What a plan's rules will be."""
    of_all = f"{len(blocks)} of {len(part.names)} blocks are computed again"
    return tuple(
        Rule(
            strategy="recompute",
            fqn=part.names[i],
            spec=RecomputeBlock(),
            why=f"{of_all}, this one keeps {format_bytes(saved_bytes(part, i))} less of every micro-batch and takes"
            f" {format_seconds(max(again_seconds(part, i), LEAST_SECONDS))} more",
            saves_bytes=saved_bytes(part, i),
        )
        for i in blocks
    )


def targets_in_chunks(run: StagesInChunks, again: Collection[int]) -> tuple[Rule, ...]:
    """The same of blocks in chunks, of which some are computed again besides."""
    plain, part, chunks = run.plain, run.part, run.chunks
    more = sum(segment_seconds(part)) - sum(segment_seconds(plain))
    places = {name: i for i, name in enumerate(part.names) if name in chunks}
    of_all = f"{len(places)} of {len(part.names)} blocks run in chunks"
    return tuple(
        Rule(
            strategy="chunk",
            fqn=name,
            spec=chunks[name],
            why=(
                f"{of_all}, this one within {format_bytes(chunks[name].budget_bytes)} in addition to its"
                f" arguments, for {format_seconds(max(float(more[i]), LEAST_SECONDS))} more of every"
                " micro-batch"
            ),
            saves_bytes=0 if i in again else max(0, saved_bytes(plain, i) - saved_bytes(part, i)),
        )
        for name, i in places.items()
    )


def saved_bytes(passes: Passes, block: int) -> int:
    """What a block keeps of one micro-batch if it is not computed again, besides what it is given."""
    kept = passes.uses[passes.uses[:, 1] == block, 0]
    own = _made_by(passes, block)
    return int(passes.n_bytes[np.unique(kept[own[kept]])].sum())


def again_seconds(passes: Passes, block: int) -> float:
    """Of its forward pass."""
    return float(passes.seconds[passes.called[block] : passes.first[block + 1]].sum())


def _made_by(passes: Passes, block: int) -> Any:
    """Whether a storage is made in the forward pass of a block."""
    return (passes.birth >= passes.called[block]) & (passes.birth < passes.first[block + 1])
