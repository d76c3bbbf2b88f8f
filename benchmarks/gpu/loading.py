"""The whole model's step with the data module: how long it waits for cells, by workers and pinned memory.

wait     from the end of a batch to the start of the next one: the loader, and the copy to the device
step     from there to its end; the device is waited for at both
"""

import time
from math import inf
from statistics import median
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from benchmarks.gpu.device import wait
from benchmarks.gpu.one_trainer import data, fit
from benchmarks.gpu.run_parts import Work
from benchmarks.gpu.subject import OURS

WARM_UP = 3
TRIALS: tuple[tuple[int, bool], ...] = ((0, False), (0, True), (4, True), (4, False), (8, True))
"""Workers, and whether memory is pinned."""


class Waiting(Callback):
    """Notes how long each step waited for its batch, and how long it then took; the first one's waiting is not known.

    Args:
        steps: after which training ends
    """

    def __init__(self, steps: float = inf) -> None:
        self.waited: list[float] = []
        self.worked: list[float] = []
        self._steps, self._last = steps, 0.0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """The batch is there."""
        begin = self._lap(pl_module)
        if self.worked:
            self.waited.append(begin)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """The step is done."""
        self.worked.append(self._lap(pl_module))
        if len(self.worked) >= self._steps:
            trainer.should_stop = True

    def _lap(self, module: LightningModule) -> float:
        wait(module.device)
        before, self._last = self._last, time.perf_counter()
        return self._last - before


def run(work: Work) -> None:
    """A row for each number of workers."""
    batch_size, cells, steps = (4, 40, 6) if work.tiny else (256, 4096, 14)
    own = data(tiny=work.tiny, cells=cells, batch_size=batch_size)
    for workers, pinned in TRIALS[::2] if work.tiny else TRIALS:
        if work.clock.left < 5:
            work.record.note(f"{workers} workers, pinned {pinned}: not reached, the time was over.")
            continue
        own.num_workers, own.pin_memory = workers, pinned and work.device.type == "cuda"
        clock = Waiting()
        fit(work, own, strategies=OURS, steps=steps, callbacks=[clock])
        waited, worked = (median(found[WARM_UP:]) for found in (clock.waited, clock.worked))
        work.record.row(
            workers=workers,
            pinned=own.pin_memory,
            cells=batch_size,
            wait_seconds=waited,
            step_seconds=worked,
            share_of_waiting=waited / (waited + worked),
        )
