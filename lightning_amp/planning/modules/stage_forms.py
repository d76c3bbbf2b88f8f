"""Blocks of a pipeline's stages that are computed again in their backward pass: which ones, and what a step is then.

A recorded step in which they keep everything becomes that in which they keep their inputs: what autograd keeps of such
a block is let go of after its forward pass, and before the first operator of its backward pass all operators of its
forward pass come once more, with storages of their own. So every stage's bytes and seconds follow as without.

    which    of each rank over the budget the fewest blocks with which it fits, those first that give back the most
             bytes for a second; all of them where that is not enough

Known limits: the second pass is counted to its end, and ends with the last tensor that is needed; blocks are taken one
after the other in that order, which need not be the best set.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from lightning_amp.footprint.chain.passes import Passes
from lightning_amp.planning.modules.seen import LEAST_SECONDS, Seen, Target
from lightning_amp.planning.pipeline.stage_bytes import Pipeline, rank_peak
from lightning_amp.planning.plan.specs import RecomputeBlock
from lightning_amp.quantities import format_bytes, format_seconds


def repeatable(seen: Seen, passes: Passes, patterns: Collection[str] = ("*",)) -> tuple[int, ...]:
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

    def later(t: Any) -> Any:
        return t + added[np.searchsorted(starts, t, side="right")]

    places = later(np.arange(len(passes.segment)))
    total = len(passes.segment) + int(added[-1])
    segment, optimises, seconds = np.full(total, -1), np.zeros(total, dtype=bool), np.zeros(total)
    segment[places], optimises[places], seconds[places] = passes.segment, passes.optimises, passes.seconds
    uses, gradients = passes.uses.copy(), passes.gradients.copy()
    uses[:, 2], gradients[:, 0] = later(uses[:, 2]), later(gradients[:, 0])
    births, ends, sizes = [later(passes.birth)], [later(passes.held)], [passes.n_bytes]
    for (_, i), start in zip(listed, starts + added[:-1], strict=True):
        begin, end = int(passes.called[i]), int(passes.first[i + 1])
        segment[start : start + end - begin] = i
        seconds[start : start + end - begin] = passes.seconds[begin:end]
        own = _made_by(passes, i)
        of_own = (uses[:, 1] == i) & own[uses[:, 0]]
        until = start - begin + np.minimum(passes.held, end - 1)
        np.maximum.at(until, uses[of_own, 0], uses[of_own, 2])
        births.append(start - begin + passes.birth[own])
        ends.append(until[own])
        sizes.append(passes.n_bytes[own])
        last = int(places[back[i][-1]])
        given = np.array([(n, i, last) for n in passes.inputs[i]], dtype=np.int64).reshape(-1, 3)
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
        uses=uses,
        gradients=gradients,
    )


def fewest_again(pipeline: Pipeline, blocks: Sequence[int], budget: int) -> tuple[int, ...]:
    """Of these blocks those that are computed again so that every rank fits, as far as it can."""
    part, ranks = pipeline.part, len(pipeline.orders)
    found: list[int] = []
    for rank in range(ranks):
        runs = pipeline.runs[rank::ranks]
        own = [i for i in blocks if any(start <= i < end for start, end in runs)]
        own.sort(key=lambda i: -saved_bytes(part, i) / max(again_seconds(part, i), LEAST_SECONDS))
        low, high = 0, len(own)
        while low < high:
            middle = (low + high) // 2
            peak = rank_peak(replace(pipeline, part=computed_again(part, own[:middle])), rank)
            low, high = (low, middle) if peak <= budget else (middle + 1, high)
        found += own[:low]
    return tuple(sorted(found))


def targets_again(part: Passes, blocks: Sequence[int]) -> tuple[Target, ...]:
    """What a plan's rules will be."""
    of_all = f"{len(blocks)} of {len(part.names)} blocks are computed again"
    return tuple(
        Target(
            strategy="recompute",
            fqn=part.names[i],
            spec=RecomputeBlock(),
            why=f"{of_all}, this one keeps {format_bytes(saved_bytes(part, i))} less of every micro-batch and takes"
            f" {format_seconds(max(again_seconds(part, i), LEAST_SECONDS))} more",
            saves_bytes=saved_bytes(part, i),
        )
        for i in blocks
    )


def saved_bytes(passes: Passes, block: int) -> int:
    """What a block keeps of one micro-batch if it is not computed again, beside what it is given."""
    kept = passes.uses[passes.uses[:, 1] == block, 0]
    own = _made_by(passes, block)
    return int(passes.n_bytes[np.unique(kept[own[kept]])].sum())


def again_seconds(passes: Passes, block: int) -> float:
    """Of its forward pass."""
    return float(passes.seconds[passes.called[block] : passes.first[block + 1]].sum())


def _made_by(passes: Passes, block: int) -> Any:
    """Whether a storage is made in the forward pass of a block."""
    return (passes.birth >= passes.called[block]) & (passes.birth < passes.first[block + 1])
