"""A race of plans in the first steps of a fit: each of them trains, the fastest stays.

Between two steps all ranks put the modules of one plan in the place of those of another; parameters, gradients,
optimisers, the order of cells and random numbers are not touched. A step counts with the time of its slowest rank. A
plan that a technique refuses on any rank does not run on any.
"""

from collections.abc import Callable, Collection
from math import inf
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from lightning_amp.errors import AmpError
from lightning_amp.lightning._compat import rank_zero_info
from lightning_amp.lightning.steps.step_time import Moment
from lightning_amp.planning.policies.race import Result, Strategies, race


class RaceOfPlans(pl.Callback):
    """Times the training batches of a fit, and changes the plan between them until the race is over.

    Args:
        first: Strategies of the plan that is installed.
        entered: Those of every plan that may run.
        switch: Installs a plan, or raises AmpError and leaves the one before, on all ranks alike.
        tell: Called with the result.
    """

    def __init__(
        self,
        first: Strategies,
        entered: Collection[Strategies],
        *,
        switch: Callable[[Strategies], None],
        tell: Callable[[Result], None],
    ) -> None:
        self._steps = race(first, entered)
        self._running = next(self._steps)
        self._switch, self._tell = switch, tell
        self._over = False
        self._begin: Moment | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy, as `deepcopy(trainer)` makes: the race stays the original's."""
        return {**vars(self), "_steps": None, "_switch": None, "_tell": None, "_over": True, "_begin": None}

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin to time a batch."""
        self._begin = None if self._over else Moment(pl_module.device)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Tell the race what the batch took, and install the plan for the next one; all ranks."""
        if self._begin is None:
            return
        # the one time that a batch of a race waits for the device
        seconds = largest(Moment(pl_module.device).seconds_since(self._begin), pl_module.device)
        try:
            wanted = self._steps.send(seconds)
            while not self._runs(wanted):
                wanted = self._steps.send(inf)
        except StopIteration as end:
            self._over, result = True, end.value
            self._runs(result.winner)
            self._tell(result)

    def _runs(self, wanted: Strategies) -> bool:
        """Whether the wanted plan is installed now, on every rank; if not, the one before is."""
        if wanted == self._running:
            return True
        try:
            self._switch(wanted)
        except AmpError as error:
            rank_zero_info(f"{','.join(wanted) or 'no technique'} does not race: {error}")
            return False
        self._running = wanted
        return True


def largest(value: float, device: torch.device) -> float:
    """The largest value of all ranks, a collective."""
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return value
    box = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return float(box)
