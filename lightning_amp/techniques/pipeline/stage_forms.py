"""Choose which blocks of a pipeline's stages are recomputed or run in chunks, and predict the step with them.

`computed_again` converts a recorded step without recomputation into one with it: what autograd keeps of a recomputed
block is freed after its forward pass, and all operators of its forward pass are repeated, with separate storages,
before the first operator of its backward pass. The stage's bytes and seconds are then computed as usual.

    which    on each rank over the budget the fewest blocks with which it fits, in the order of bytes saved per second;
             all of them if that is not enough

A step with blocks in chunks is recorded again, once for each budget for which blocks have plans (chunk/forms.py), with
all blocks in chunks. A rank's bytes depend on its segments only, so every rank chooses separately:

    in chunks    of the budgets with which a rank fits, the fastest, with as few recomputed blocks as that needs; none
                 if the rank fits without chunks

Known limits: the second forward pass is counted to its end, although it stops after the last tensor that is needed.
Blocks are chosen in a fixed order, which need not be optimal. All blocks of a rank that support chunks run so, or none.
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
    """Convert the spec and the rules of a plan into options with everything that the plan has decided."""
    return StageOptions(
        micro_batches=spec.micro_batches,
        schedule=spec.schedule,
        ends=tuple(int(end) for end in spec.ends.split(",")) if spec.ends else None,
        again=tuple(rule.fqn for rule in rules if isinstance(rule.spec, RecomputeBlock)),
        chunks={rule.fqn: rule.spec for rule in rules if isinstance(rule.spec, ChunkBlock)},
    )


def with_named(options: StageOptions, names: Collection[str], *, budget_named: bool) -> StageOptions:
    """Add the techniques that the user named together with a pipeline to the options.

    Raises:
        PlanError: One of them cannot be combined with a pipeline.
    """
    others = [name for name in names if name not in ("recompute", "chunk")]
    if others:
        raise PlanError(f"pipeline together with {', '.join(others)} is not supported: leave one of them out")
    return replace(
        options,
        # with a user's budget, as few as are needed
        again=() if "recompute" not in names else None if budget_named else ("*",),
        chunks=None if "chunk" in names else {},
        all_chunks="chunk" in names and not budget_named,
    )


def asked_inside(options: StageOptions) -> str:
    """Return a technique that is required inside stages; "" if there is none."""
    return "chunk" if options.chunks is None else "recompute" if options.again != () else ""


def repeatable(seen: ProfiledStep, passes: Passes, patterns: Collection[str] = ("*",)) -> tuple[int, ...]:
    """Return the indices of blocks that match a pattern and can be recomputed."""
    again = set(seen.chain.names)
    return tuple(
        i
        for i, name in enumerate(passes.names)
        if name in again and any(fnmatchcase(name, pattern) for pattern in patterns)
    )


def computed_again(passes: Passes, blocks: Collection[int]) -> Passes:
    """Return the step with some blocks recomputed."""
    back = {i: np.flatnonzero(passes.segment == i) for i in blocks}
    # in the order of their backward passes; a block without one is not recomputed
    listed = sorted((int(times[0]), i) for i, times in back.items() if len(times))
    starts = np.array([start for start, _ in listed], dtype=np.int64)
    lengths = np.array([passes.first[i + 1] - passes.called[i] for _, i in listed], dtype=np.int64)
    added = np.concatenate([[0], np.cumsum(lengths)])

    # maps a time to its place after the repeated forward passes are inserted
    def later(t: Any) -> Any:
        # side="right": the first operator of a backward pass moves behind the forward pass that is inserted before it.
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
        # A storage of the second pass lives as in the first one, or until the backward pass has read it. The second
        # copy of the block's result is freed at the end of the second pass, because no later operator reads it.
        until = start - begin + np.minimum(passes.held, end - 1)
        np.maximum.at(until, uses[of_own, 0], uses[of_own, 2])
        births.append(start - begin + passes.birth[own])
        ends.append(until[own])
        sizes.append(passes.n_bytes[own])
        # inputs of the block are kept for the second pass, until its backward pass ends
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
    """Return which of these blocks to recompute so that every rank fits its budget, if possible."""
    return tuple(sorted(i for rank, n in enumerate(budgets) for i in _fewest_of(pipeline, rank, blocks, n)))


def _fewest_of(pipeline: Pipeline, rank: int, blocks: Sequence[int], budget: int) -> list[int]:
    part = pipeline.part
    own = [i for i in blocks if any(start <= i < end for start, end in pipeline.runs_of(rank))]
    own.sort(key=lambda i: -saved_bytes(part, i) / max(again_seconds(part, i), LEAST_SECONDS))
    low, high = 0, len(own)
    # assumes that every further block lowers the peak, so that bisection finds the fewest
    while low < high:
        middle = (low + high) // 2
        peak = rank_peak(replace(pipeline, part=computed_again(part, own[:middle])), rank)
        low, high = (low, middle) if peak <= budget else (middle + 1, high)
    return own[:low]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StagesInChunks:
    """Passes of a micro-batch without and with some blocks in chunks, and the specs of these by name or pattern."""

    plain: Passes
    part: Passes
    chunks: Mapping[str, ChunkBlock]


class Levels:
    """Passes of a micro-batch with all blocks in chunks that support it, for each budget for which they have plans.

    Args:
        chunks: Blocks of the step in chunks.
        part: Passes of the micro-batch without chunks.
    """

    def __init__(self, chunks: StageChunks, part: Passes) -> None:
        self._chunks, self._rows, forms = chunks, part.rows, chunks.forms(part.rows)
        found = {name: forms.budgets(name) for name in part.names}
        self._budgets = {name: budgets for name, budgets in found.items() if budgets}
        self._quick = {name: forms.budgets(name, slow=False)[0] for name in self._budgets}
        self.reason = "" if self._budgets else forms.reason or "no block of the stages takes less in chunks"

    def __len__(self) -> int:
        """Number of budgets."""
        return max(map(len, self._budgets.values()), default=0)

    def at(self, level: int, names: Collection[str] | None = None) -> dict[str, ChunkBlock]:
        """Specs of all blocks, or of some, with one of their budgets; level 0 is the least."""
        return {
            name: ChunkBlock.at(self._chunks.costs, budgets[min(level, len(budgets) - 1)])
            for name, budgets in self._budgets.items()
            if names is None or name in names
        }

    @property
    def every(self) -> dict[str, ChunkBlock]:
        """Specs of all blocks, each with the least bytes that do not make it far slower."""
        return {name: ChunkBlock.at(self._chunks.costs, n_bytes) for name, n_bytes in self._quick.items()}

    def passes(self, level: int) -> Passes | str:
        """Passes of the micro-batch with all blocks at a level, or why one of them does not support it."""
        return self._chunks.passes(self._rows, self.at(level))


def with_chunks(seen: ProfiledStep, part: Passes, options: StageOptions) -> StagesInChunks | str:
    """Return a micro-batch with the chunks that the options require, or why that is impossible."""
    if not (options.chunks or options.all_chunks):
        return StagesInChunks(plain=part, part=part, chunks={})
    in_chunks, chunks = stages_of(seen).chunks, options.chunks
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
    """Choice for one rank: bytes over the budget, seconds, its blocks in chunks, and its recomputed blocks."""

    over: int
    seconds: float
    chunks: Mapping[str, ChunkBlock]
    again: tuple[int, ...]

    def merit(self) -> tuple[int, float]:
        """Key for comparison; less is better."""
        return self.over, self.seconds


def fewest_chunks(
    pipeline: Pipeline, levels: Levels, again: Sequence[int], budgets: Sequence[int]
) -> tuple[dict[str, ChunkBlock], tuple[int, ...]]:
    """Choose blocks in chunks, and which of `again` to recompute, so that every rank fits, if possible.

    Args:
        pipeline: Without chunks and recomputed blocks.
        levels: Budgets of its micro-batch.
        again: Blocks that can be recomputed.
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
        # if the least budget is too large, larger ones are not tried
        return best if least is None or best.over <= least.over else least
    # from the largest budget down: smaller budgets take longer, so the search stops at the first that is not faster
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
    """Evaluate a rank with all of its blocks at a level; level None is without chunks.

    Returns None if the level is not possible, or if it takes at least `seconds`.
    """
    names, runs = pipeline.part.names, pipeline.runs_of(rank)
    part = pipeline.part if level is None else levels.passes(level)
    if isinstance(part, str) or (seconds is not None and _seconds_of(part, runs) >= seconds):
        return None
    line = replace(pipeline, part=part)
    # chunks come first: blocks are recomputed only for the bytes that are still over the budget
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
    """Rules of a plan for recomputed blocks."""
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
    """Rules of a plan for blocks in chunks, of which those in `again` are also recomputed."""
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
    """Bytes that a block keeps of one micro-batch if it is not recomputed, without its inputs."""
    kept = passes.uses[passes.uses[:, 1] == block, 0]
    own = _made_by(passes, block)
    return int(passes.n_bytes[np.unique(kept[own[kept]])].sum())


def again_seconds(passes: Passes, block: int) -> float:
    """Seconds of a block's forward pass."""
    return float(passes.seconds[passes.called[block] : passes.first[block + 1]].sum())


def _made_by(passes: Passes, block: int) -> Any:
    """Mask of storages that are allocated in the forward pass of a block."""
    return (passes.birth >= passes.called[block]) & (passes.birth < passes.first[block + 1])
