"""Choose which blocks of a pipeline's stages are recomputed, and predict the step with them.

`computed_again` converts a recorded step without recomputation into one with it: what autograd keeps of a recomputed
block is freed after its forward pass. The operators of its forward pass up to the last tensor that autograd saves are
repeated, with separate storages, before its backward pass first reads such a tensor. The stage's bytes and seconds are
then computed as usual.

    which    on each rank over the budget the fewest blocks with which it fits, in the order of bytes saved per second;
             all of them if that is not enough

Known limit: blocks are chosen in a fixed order, which need not be optimal.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from lightning_amp.costs.profiled_step import LEAST_SECONDS, ProfiledStep
from lightning_amp.costs.rule import Rule
from lightning_amp.errors import PlanError
from lightning_amp.footprint.chain.passes import Passes
from lightning_amp.quantities import format_bytes, format_seconds
from lightning_amp.techniques.pipeline.row import PipelineStages
from lightning_amp.techniques.pipeline.schedule.stage_bytes import Pipeline, rank_peak
from lightning_amp.techniques.pipeline.stages_on_host import ON_HOST, OPEN, decided_in
from lightning_amp.techniques.recompute.row import RecomputeBlock
from lightning_amp.techniques.stage_search import StageOptions

AGAIN = "recompute"


def decided(spec: PipelineStages, rules: Sequence[Rule]) -> StageOptions:
    """Convert the spec and the rules of a plan into options with everything that the plan has decided."""
    return StageOptions(
        micro_batches=spec.micro_batches,
        schedule=spec.schedule,
        ends=tuple(int(end) for end in spec.ends.split(",")) if spec.ends else None,
        again=tuple(rule.fqn for rule in rules if isinstance(rule.spec, RecomputeBlock)),
        host=decided_in(rules),
    )


def with_named(options: StageOptions, names: Collection[str], *, budget_named: bool) -> StageOptions:
    """Add the techniques that the user named together with a pipeline to the options.

    Raises:
        PlanError: One of them cannot be combined with a pipeline.
    """
    others = [name for name in names if name not in (AGAIN, ON_HOST)] or (names if len(names) > 1 else ())
    if others:
        raise PlanError(
            f"pipeline together with {' and '.join(others)} is not supported; allowed is one of {AGAIN} and {ON_HOST}:"
            " leave the others out"
        )
    # with a user's budget, as few as are needed
    again = () if AGAIN not in names else None if budget_named else ("*",)
    return replace(options, again=again, host=OPEN if ON_HOST in names else None)


def asked_inside(options: StageOptions) -> str:
    """Return a technique that is required inside stages; "" if there is none."""
    return AGAIN if options.again != () else ON_HOST if options.host is not None else ""


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
    listed = sorted((int(np.clip(passes.asks[i], times[0], times[-1])), i) for i, times in back.items() if len(times))
    starts = np.array([start for start, _ in listed], dtype=np.int64)
    lengths = np.array([passes.last_kept[i] + 1 - passes.called[i] for _, i in listed], dtype=np.int64)
    added = np.concatenate([[0], np.cumsum(lengths)])

    # maps a time to its place after the repeated forward passes are inserted
    def later(t: Any) -> Any:
        # side="right": the first operator that reads moves behind the forward pass that is inserted before it
        return t + added[np.searchsorted(starts, t, side="right")]

    places = later(np.arange(len(passes.segment)))
    total = len(passes.segment) + int(added[-1])
    segment, optimises, seconds = np.full(total, -1), np.zeros(total, dtype=bool), np.zeros(total)
    segment[places], optimises[places], seconds[places] = passes.segment, passes.optimises, passes.seconds
    maker = np.full(total, -1)
    maker[places] = passes.maker
    uses, gradients, sums = passes.uses.copy(), passes.gradients.copy(), passes.sums.copy()
    uses[:, [2, 4]], gradients[:, 0] = later(uses[:, [2, 4]]), later(gradients[:, 0])
    # a gradient is returned before the next block's forward pass is repeated
    gradients[:, 3], sums[:, 2] = later(gradients[:, 3] - 1) + 1, later(sums[:, 2] - 1) + 1
    births, ends, sizes = [later(passes.birth)], [later(passes.held)], [passes.n_bytes]
    for (_, i), start in zip(listed, starts + added[:-1], strict=True):
        begin, end = int(passes.called[i]), int(passes.last_kept[i]) + 1
        segment[start : start + end - begin] = i
        seconds[start : start + end - begin] = passes.seconds[begin:end]
        own = _made_by(passes, i) & (passes.birth < end)
        of_own = (uses[:, 1] == i) & own[uses[:, 0]]
        # a storage of the second pass lives as in the first one, to its end at most, or until the backward pass has
        # read it
        until = start - begin + np.minimum(passes.held, end - 1)
        np.maximum.at(until, uses[of_own, 0], uses[of_own, 2])
        births.append(start - begin + passes.birth[own])
        ends.append(until[own])
        sizes.append(passes.n_bytes[own])
        # inputs of the block are kept for the second pass, until its backward pass ends
        last = int(places[back[i][-1]])
        given = np.array([(n, i, last, -1, start) for n in passes.inputs[i]], dtype=np.int64).reshape(-1, 5)
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
        sums=sums,
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


def targets_again(part: Passes, blocks: Sequence[int]) -> tuple[Rule, ...]:
    """Rules of a plan for recomputed blocks."""
    of_all = f"{len(blocks)} of {len(part.names)} blocks are computed again"
    return tuple(
        Rule(
            strategy=AGAIN,
            fqn=part.names[i],
            spec=RecomputeBlock(),
            why=f"{of_all}, this one keeps {format_bytes(saved_bytes(part, i))} less of every micro-batch and takes"
            f" {format_seconds(max(again_seconds(part, i), LEAST_SECONDS))} more",
            saves_bytes=saved_bytes(part, i),
        )
        for i in blocks
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
