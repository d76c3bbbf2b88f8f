"""Watch the memory of the process between the steps of a fit on a CPU, and warn if it exceeds the budget.

Counted batches see tensors only. Arrays of other libraries, and what a loop keeps in a list, are in the memory of the
process too. What it has before the first batch, apart from the module's tensors, is not counted against the budget.
Known limit: between steps an allocator may keep memory that it has no use for, so a smaller excess than `SLACK` is not
said.
"""

from collections.abc import Callable

import lightning.pytorch as pl
import psutil

from lightning_amp.lightning._compat import rank_zero_warn
from lightning_amp.lightning.steps.counted_batches import called_in
from lightning_amp.quantities import format_bytes

SLACK = 256 * 2**20
"""Bytes for libraries that the first steps load, and for what allocators keep."""


class ProcessMemory(pl.Callback):
    """Warn once if the process grows beyond the budget; `resident` returns its bytes."""

    def __init__(self, budget: int, resident: Callable[[], int]) -> None:
        self._budget, self._resident = budget, resident
        self._others: int | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Note the bytes that are not the module's."""
        own = {id(tensor): tensor.nbytes for tensor in (*pl_module.parameters(), *pl_module.buffers())}
        self._others = self._resident() - sum(own.values())

    def on_train_batch_end(self, trainer: pl.Trainer, *args: object) -> None:
        """Compare the bytes of the process with the budget."""
        if self._others is None:
            return
        found = self._resident() - self._others
        if found > self._budget + SLACK:
            self._others = None
            rank_zero_warn(
                f"after step {trainer.global_step} the process has {format_bytes(found)} more than before"
                f" training without the module, and the budget is {format_bytes(self._budget)}: something beside the"
                " counted tensors grows, such as arrays of other libraries or samples that a dataset keeps"
            )


def resident_bytes() -> int:
    """Return the bytes of memory that the process has."""
    return int(psutil.Process().memory_info().rss)


def watch_process(trainer: pl.Trainer, budget: int) -> Callable[[], None]:
    """Watch the process during a fit; return an undo."""
    return called_in(trainer, ProcessMemory(budget, resident_bytes))
