"""Record begin and end of every pass of a rank of a pipeline in one step, without waiting.

A pass begins when its input is there and ends before its result is sent, as in schedule/timeline.py.

Known limits: times are those of the machine's clock, so that ranks on several machines are shown as far apart as their
clocks are; a device that works on after it was asked to (CUDA) would be seen too early.
"""

from collections.abc import Mapping
from time import time

from lightning_amp.techniques.pipeline.schedule.schedules import Pass


class PassTimes:
    """Of one rank.

    Attributes:
        passes: Begin and end of every pass, in seconds of the clock.
        rest_seconds: What the last stage's first backward pass began with: what follows the blocks, for the whole
            batch.
    """

    def __init__(self) -> None:
        self._passes: dict[Pass, tuple[float, float]] = {}
        self._begin = self.rest_seconds = 0.0

    @property
    def passes(self) -> Mapping[Pass, tuple[float, float]]:
        """In their order."""
        return self._passes

    def begin(self) -> None:
        """The input of a pass is there."""
        self._begin = time()

    def rested(self) -> None:
        """What follows the blocks is done, and the pass that has begun goes on."""
        self.rest_seconds = time() - self._begin

    def end(self, now: Pass) -> None:
        """Its result is there."""
        self._passes[now] = (self._begin, time())
