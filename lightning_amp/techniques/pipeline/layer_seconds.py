"""Predict the seconds of every block of a pipeline for one micro-batch, with the parts before and after the blocks.

Legend: K blocks, N stages.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lightning_amp.costs.device_rates import Links, collective_seconds
from lightning_amp.footprint.chain.passes import Passes
from lightning_amp.techniques.pipeline.schedule.micro_batches import LayerTimes
from lightning_amp.techniques.pipeline.schedule.timeline import StageTimes


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayerSeconds:
    """Seconds of one micro-batch, [K] each.

    Attributes:
        forward, backward: Of every block.
        send_forward, send_backward: Of sending what it returns on, and the gradient of that back; where links
            differ, by every stage, [N, K].
        rest: What follows the blocks, forward and backward, once for the whole batch.
        silent: The same once more, without gradients.
    """

    forward: Any
    backward: Any
    send_forward: Any
    send_backward: Any
    rest: float
    silent: float

    @classmethod
    def of(
        cls, part: Passes, whole: Passes, *, links: Links, crossing: Sequence[bool], micro_batches: int, at_once: bool
    ) -> "LayerSeconds":
        """Of the segments of a micro-batch.

        Args:
            part: Passes of the micro-batch.
            whole: Of the batch.
            links: Between ranks.
            crossing: Of every stage, whether the next one is on another node.
            at_once: Whether what follows the blocks runs once, for the whole batch.
        """
        there, back = segment_seconds(part)
        forward, backward = there[:-1].copy(), back[:-1].copy()
        whole_there, whole_back = segment_seconds(whole)
        if not at_once:
            forward[-1] += there[-1]
            backward[-1] += back[-1]
        # of a group that lies in a node, and of one that does not
        groups = [links.ranks_per_node + 1 if far else 2 for far in crossing]
        sends = np.array(
            [[collective_seconds("exchange", n, ranks, links) for n in part.sent_bytes] for ranks in groups]
        )
        # block i returns the gradient of what the one before it has sent
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

    def stages(self, ends: Sequence[int], speeds: tuple[float, ...] | None) -> StageTimes:
        """The sums of every stage."""
        made = StageTimes.of(
            ends,
            self.forward,
            self.backward,
            send_forward=self.send_forward,
            send_backward=self.send_backward,
            speeds=speeds,
        )
        return replace(made, rest=self.rest / (speeds[-1] if speeds else 1.0))


def crossing_nodes(links: Links, ranks: int, copies: int) -> tuple[bool, ...]:
    """Of every rank of a pipeline, whether the next one is on another node in any copy; the first follows the last."""
    node = links.ranks_per_node
    return tuple(
        any((first + r) // node != (first + (r + 1) % ranks) // node for first in range(0, copies * ranks, ranks))
        for r in range(ranks)
    )


def times_of(layers: Mapping[int, LayerSeconds]) -> LayerTimes:
    """The same for every number of micro-batches, rising, as `search_all` reads them."""
    names = ("forward", "backward", "send_forward", "send_backward")
    found = layers.values()
    return LayerTimes(
        counts=tuple(layers),
        after=np.array([one.rest + one.silent for one in found]),
        **{name: np.stack([getattr(one, name) for one in found]) for name in names},
    )


def counts_for(rows: int, others: Iterable[int] = ()) -> list[int]:
    """Numbers of micro-batches of a batch of so many rows, rising: more of as many rows would be empty."""
    return sorted({-(-rows // n) for n in range(1, rows + 1)} | {min(n, rows) for n in others})


def segment_seconds(passes: Passes) -> tuple[Any, Any]:
    """Of every segment, forward and backward, [K + 1] each."""
    before = np.concatenate([[0.0], np.cumsum(passes.seconds)])
    forward = before[passes.first[1:]] - before[passes.first[:-1]]
    inside = passes.segment >= 0
    backward = np.bincount(passes.segment[inside], weights=passes.seconds[inside], minlength=len(passes.names) + 1)
    return forward, backward
