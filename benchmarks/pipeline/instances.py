"""Random layers as in the evaluation of Zhou et al. 2025 (CSIMD, Section V-A): every time from U[50, 100]."""

from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from lightning_amp.costs.ordered_runs import Device, OrderedRuns
from lightning_amp.techniques.pipeline.schedule.cut import PipelineCut, cut_pipeline

GRID = 2**20
"""Times are whole multiples of 1 / GRID, so that sums of them are exact in floats too, and equal means equal."""


@dataclass(frozen=True, slots=True)
class Instance:
    """Times of layers, as `cut_pipeline` names them; as drawn, in multiples of 1 / GRID."""

    forward: list[float]
    backward: list[float]
    send_forward: list[float]
    send_backward: list[float]

    def as_floats(self) -> "Instance":
        """The same with times that need all bits of a float, as measured ones do."""
        four = (self.forward, self.backward, self.send_forward, self.send_backward)
        return Instance(*([time / (3 * GRID) for time in times] for times in four))

    def cut(self, stages: int) -> PipelineCut:
        """The product's answer, in the same unit."""
        return cut_pipeline(
            self.forward, self.backward, stages, send_forward=self.send_forward, send_backward=self.send_backward
        )

    def runs(self, stages: int) -> OrderedRuns:
        """The same layers, as drawn, for those who pack them otherwise."""
        return OrderedRuns(
            forward=list(accumulate(self.forward, initial=0)),
            backward=list(accumulate(self.backward, initial=0)),
            send_forward=[0, *self.send_forward[:-1], 0],
            send_backward=[0, *self.send_backward[1:], 0],
            devices=[Device()] * stages,
        )


def draw(layers: int, seed: int, *, sending: float = 1.0) -> Instance:
    """Times from U[50, 100]; what is sent takes so many times as long."""
    rng = np.random.default_rng((layers, seed))
    four = [rng.integers(50 * GRID, 100 * GRID, layers, endpoint=True) for _ in range(4)]
    four[2:] = [np.rint(sending * sent).astype(np.int64) for sent in four[2:]]
    return Instance(*(times.tolist() for times in four))
