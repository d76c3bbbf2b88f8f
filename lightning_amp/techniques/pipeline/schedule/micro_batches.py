"""Predict the seconds of a pipeline's blocks, and choose the number of micro-batches with the cut (Zhou et al. 2025).

    T(cut, p) = sum over layers of (forward + backward) + sum over cuts of both sendings
                + (p - 1) (rho_1 + rho_2)                                                                 Eq. 8

All times are those of one of p micro-batches. They are not proportional to its size: each layer has a separate time for
every p. `gpipe_seconds` evaluates all p at once (their Algorithm 4); `search_all` cuts for every p that may be best.
For a given p it takes the cut of least rho_1 + rho_2, as the paper does: T also contains the sending once per cut,
which is not minimised, although for p = 1 it is all that matters. If links differ, the cut has the least T.

Legend: K layers (blocks), P numbers of micro-batches, N stages.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray

from lightning_amp.costs.device_rates import Links, collective_seconds
from lightning_amp.costs.profiled_step import Stage
from lightning_amp.footprint.chain.passes import Passes
from lightning_amp.techniques.pipeline.schedule.cut import cut_pipeline

Table = Float[np.ndarray, "P K"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerSeconds:
    """Seconds of one micro-batch, [K] each.

    Attributes:
        forward, backward: Seconds of every block; what precedes and follows the blocks belongs to the first and the
            last one.
        send_forward, send_backward: Seconds to send each block's result on, and its gradient back; [N, K], with one
            row for every stage, if links differ.
        rest: Seconds of what follows the blocks, forward and backward, if it runs once for the whole batch.
        silent: Seconds of the additional forward pass of it without gradients.
    """

    forward: Any
    backward: Any
    send_forward: Any
    send_backward: Any
    rest: float = 0.0
    silent: float = 0.0

    @classmethod
    def of(
        cls, part: Passes, whole: Passes, *, links: Links, crossing: Sequence[bool], micro_batches: int, at_once: bool
    ) -> "LayerSeconds":
        """Compute the seconds of the segments of a micro-batch.

        Args:
            part: Passes of the micro-batch.
            whole: Passes of the batch.
            links: Links between ranks.
            crossing: For every stage, whether the next one is on another node.
            micro_batches: Number of micro-batches.
            at_once: Whether what follows the blocks runs once, for the whole batch.
        """
        there, back = segment_seconds(part)
        forward, backward = there[:-1].copy(), back[:-1].copy()
        whole_there, whole_back = segment_seconds(whole)
        if not at_once:
            forward[-1] += there[-1]
            backward[-1] += back[-1]
        # group sizes that stand for a link inside a node and for one between nodes
        groups = [links.ranks_per_node + 1 if far else 2 for far in crossing]
        sends = np.array(
            [[collective_seconds("exchange", n, ranks, links) for n in part.sent_bytes] for ranks in groups]
        )
        # block i returns the gradient of what the block before it has sent
        returned = np.roll(sends, (1, 1), (0, 1))
        returned[:, 0] = 0.0
        one_link = (sends == sends[0]).all()
        again = micro_batches > 1 and not at_once
        return cls(
            forward=forward,
            backward=backward,
            send_forward=sends[0] if one_link else sends,
            send_backward=returned[0] if one_link else returned,
            rest=float(whole_there[-1] + whole_back[-1]) if at_once else 0.0,
            silent=float(whole_there[-1]) if again else 0.0,
        )

    def stages(self, ends: Sequence[int], speeds: Sequence[float] | None, ranks: int) -> tuple[Stage, ...]:
        """Return the stages with their seconds; `ends` as from `cut_pipeline`, in which idle devices have no stage."""
        runs, layers = list(pairwise((0, *ends))), len(self.forward)
        paces = speeds or (1.0,) * len(runs)
        on, back = (np.broadcast_to(sends, (len(runs), layers)) for sends in (self.send_forward, self.send_backward))
        return tuple(
            Stage(
                first=start,
                end=end,
                rank=n % ranks,
                forward_seconds=sum(self.forward[start:end].tolist()) / paces[n],
                backward_seconds=sum(self.backward[start:end].tolist()) / paces[n],
                send_forward_seconds=float(on[n, end - 1]) if end < layers else 0.0,
                send_backward_seconds=float(back[n, start]) if start else 0.0,
                peak_bytes=0,
                idle=0.0,
                rest_seconds=self.rest / paces[n] if end == layers else 0.0,
            )
            for n, (start, end) in enumerate(runs)
            if end > start
        )


def crossing_nodes(links: Links, ranks: int, copies: int) -> tuple[bool, ...]:
    """For each rank of a pipeline, whether the next rank (cyclic) is on another node, in any copy of the pipeline."""
    node = links.ranks_per_node
    return tuple(
        any((first + r) // node != (first + (r + 1) % ranks) // node for first in range(0, copies * ranks, ranks))
        for r in range(ranks)
    )


def counts_for(rows: int, others: Iterable[int] = ()) -> list[int]:
    """Numbers of micro-batches for so many rows, ascending, that leave none empty, and `others`."""
    return sorted({-(-rows // n) for n in range(1, rows + 1)} | {min(n, rows) for n in others})


def segment_seconds(passes: Passes) -> tuple[Any, Any]:
    """Seconds of every segment, forward and backward, [K + 1] each."""
    before = np.concatenate([[0.0], np.cumsum(passes.seconds)])
    forward = before[passes.first[1:]] - before[passes.first[:-1]]
    inside = passes.segment >= 0
    backward = np.bincount(passes.segment[inside], weights=passes.seconds[inside], minlength=len(passes.names) + 1)
    return forward, backward


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerTimes:
    """Times of every layer for one micro-batch, with a row for each number of micro-batches.

    Attributes:
        counts: The numbers of micro-batches p, ascending.
        forward, backward: Times of the passes.
        send_forward, send_backward: As in `LayerSeconds`; [P, N, K] if links differ.
        after: Time that a step takes in addition, once for all micro-batches, [P].
    """

    counts: tuple[int, ...]
    forward: Table
    backward: Table
    send_forward: Float[np.ndarray, "P *N K"]
    send_backward: Float[np.ndarray, "P *N K"]
    after: Float[np.ndarray, " P"] | float = 0.0

    @classmethod
    def of(cls, layers: Mapping[int, LayerSeconds]) -> "LayerTimes":
        """Stack the seconds by number of micro-batches, ascending."""
        names, found = ("forward", "backward", "send_forward", "send_backward"), layers.values()
        return cls(
            counts=tuple(layers),
            after=np.array([one.rest + one.silent for one in found]),
            **{name: np.stack([getattr(one, name) for one in found]) for name in names},
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionChoice:
    """Chosen cut and number of micro-batches.

    Attributes:
        ends: One past the last layer of every stage.
        micro_batches: p.
        seconds: T of a step, in the unit of the times.
    """

    ends: tuple[int, ...]
    micro_batches: int
    seconds: float


def gpipe_seconds(times: LayerTimes, ends: Sequence[int], speeds: Sequence[float] | None = None) -> NDArray[np.float64]:
    """Time of a step for every number of micro-batches, for a given cut (Eq. 8).

    Args:
        times: Times of the layers.
        ends: One past the last layer of every stage, as `cut_pipeline` returns them.
        speeds: Speed of every stage's device; None means 1.
    """
    # Start and end of an idle device are equal; `reduceat` would count the next block for it.
    starts = np.array((0, *ends[:-1]))
    used = np.flatnonzero(starts < np.array(ends))
    speed = np.array(speeds or [1.0] * len(ends))[used]
    cuts = starts[used][1:]
    forward = np.add.reduceat(times.forward, starts[used], axis=1) / speed
    backward = np.add.reduceat(times.backward, starts[used], axis=1) / speed
    on, back = (
        table[:, layers] if table.ndim == 2 else table[:, stages, layers]
        for table, stages, layers in ((times.send_forward, used[:-1], cuts - 1), (times.send_backward, used[1:], cuts))
    )
    slowest = np.maximum(forward.max(1), on.max(1, initial=0)) + np.maximum(backward.max(1), back.max(1, initial=0))
    # the first micro-batch passes all stages; each further one takes the time of the slowest
    once = sum(part.sum(1) for part in (forward, backward, on, back))
    seconds: NDArray[np.float64] = once + (np.array(times.counts) - 1) * slowest + times.after
    return seconds


def cut_for(times: LayerTimes, row: int, n_stages: int, speeds: Sequence[float] | None = None) -> tuple[int, ...]:
    """Return the ends of the best cut for the number of micro-batches of a row."""
    return cut_pipeline(
        times.forward[row],
        times.backward[row],
        n_stages,
        send_forward=times.send_forward[row],
        send_backward=times.send_backward[row],
        speeds=speeds,
        micro_batches=times.counts[row],
    ).ends


def search_all(times: LayerTimes, n_stages: int, speeds: Sequence[float] | None = None) -> PartitionChoice:
    """Compute the cut for every number of micro-batches that may be best, and choose the best cut and number.

    A number is skipped if its lower bound is no less than the best time so far. Ties go to the fewest micro-batches.
    """
    least = _least_seconds(times, np.array(speeds or [1.0] * n_stages))
    best: PartitionChoice | None = None
    # exact cuts take most of the time, so the number with the least bound comes first
    for row in np.argsort(least, kind="stable"):
        if best is not None and least[row] > best.seconds:
            break
        ends = cut_for(times, int(row), n_stages, speeds)
        seconds = gpipe_seconds(times, ends, speeds)
        found = int(seconds.argmin())
        one = PartitionChoice(ends=ends, micro_batches=times.counts[found], seconds=float(seconds[found]))
        if best is None or (one.seconds, one.micro_batches) < (best.seconds, best.micro_batches):
            best = one
    assert best is not None, "there is a number of micro-batches"
    return best


def fastest_of(
    times: LayerTimes, n_stages: int, speeds: Sequence[float] | None, others: Sequence[int]
) -> dict[int, float]:
    """Return the seconds of the best number of micro-batches, then of some others, each with its best cut."""
    best = search_all(times, n_stages, speeds)
    rows = [times.counts.index(count) for count in others]
    seconds = [float(gpipe_seconds(times, cut_for(times, row, n_stages, speeds), speeds)[row]) for row in rows]
    return {best.micro_batches: best.seconds} | dict(zip(others, seconds, strict=True))


def _least_seconds(times: LayerTimes, speeds: Any) -> NDArray[np.float64]:
    """Lower bound for all cuts, [P]: devices share the work evenly, and sending takes no time."""
    busy: Any = 0.0
    for table in (times.forward, times.backward):
        busy += np.maximum(table.sum(1) / speeds.sum(), table.max(1) / speeds.max())
    once = (times.forward.sum(1) + times.backward.sum(1)) / speeds.max()
    least: NDArray[np.float64] = once + (np.array(times.counts) - 1) * busy + times.after
    # sums of floats in another order may differ in the last digits
    return least * (1 - 1e-9)
