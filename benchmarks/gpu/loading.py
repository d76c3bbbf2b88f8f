"""The whole model's step with the data module: how long it waits for cells, by workers and pinned memory.

wait     from the end of a batch to the start of the next one: the loader, and the copy to the device
step     from there to its end; the device is waited for at both
"""

from statistics import median

from benchmarks.gpu.one_trainer import data, fit
from benchmarks.gpu.run_parts import Work
from benchmarks.gpu.subject import OURS
from benchmarks.training.loading import Waiting

WARM_UP = 3
TRIALS: tuple[tuple[int, bool], ...] = ((0, False), (0, True), (4, True), (4, False), (8, True))
"""Workers, and whether memory is pinned."""


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
