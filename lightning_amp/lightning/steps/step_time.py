"""Measure the time of training steps, and print it with the plan's prediction at the end of every fit.

A step is a training batch: forward, backward, gradient averaging and update, measured from when its batch is on the
device. Batches whose gradients are only accumulated do not count, nor do the first two steps, which also load kernels
and fill caches. The result is the median, so that a few steps whose memory is measured do not affect it. The prediction
is for the same step of the reference model (planning/time/step_seconds.py); for another model only the decoder's time
is predicted, and the line says so.

Steps do not synchronize with the device: on CUDA their begin and end are recorded as events, which are read at the end
of the fit.

Known limits: if the memory of every step is measured, that time is included. CUDA events were not tested on a GPU.
"""

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_amp.lightning._compat import rank_zero_info
from lightning_amp.lightning.steps.counted_batches import called_in
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.reports.plan_report import step_text
from lightning_amp.quantities import format_seconds

WARM_UP = 2
MOST = 200
"""Largest number of steps that are timed."""


def time_steps(trainer: pl.Trainer, plan: Plan | None) -> Callable[[], None]:
    """Time the steps of a fit on rank 0; return an undo."""
    if plan is None or plan.predicted_step_seconds is None or not trainer.is_global_zero:
        return lambda: None
    # called first at a step's end, so that the time of other callbacks is not included
    return called_in(trainer, StepTimer(plan), first=True)


class TimedMoment:
    """The time at which a device has finished the work submitted so far; creating it does not synchronize."""

    def __init__(self, device: torch.device) -> None:
        self._seconds = time.perf_counter()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))

    def seconds_since(self, earlier: "TimedMoment") -> float:
        """Return the seconds since an earlier moment of the same device; waits until this moment is reached."""
        if self._event is None or earlier._event is None:
            return self._seconds - earlier._seconds
        self._event.synchronize()
        return float(earlier._event.elapsed_time(self._event)) / 1e3


class StepTimer(pl.Callback):
    """Time training steps, to compare them with a plan's prediction."""

    def __init__(self, plan: Plan | None) -> None:
        self._plan = plan
        self._steps: list[tuple[TimedMoment, TimedMoment]] = []
        self._begin: TimedMoment | None = None
        self._updates = 0

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of a copy, as `deepcopy(trainer)` makes, without the times, which may be CUDA events."""
        return {**vars(self), "_steps": [], "_begin": None}

    @property
    def median_seconds(self) -> float | None:
        """Median of the timed steps, None without any; waits for the device."""
        found = [end.seconds_since(begin) for begin, end in self._steps[WARM_UP:]]
        return median(found) if found else None

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Record the begin of the step."""
        self._updates = trainer.global_step
        self._begin = TimedMoment(pl_module.device) if len(self._steps) < WARM_UP + MOST else None

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the end of the step."""
        # only with accumulation: in manual optimisation an optimiser may step without the Trainer
        only_added = trainer.accumulate_grad_batches > 1 and trainer.global_step == self._updates
        if self._begin is None or only_added:
            return
        plan = getattr(trainer.strategy, "plan", None) or self._plan
        if plan is not self._plan:
            # the new plan has another prediction, so earlier steps do not count
            self._plan, self._steps = plan, []
        self._steps.append((self._begin, TimedMoment(pl_module.device)))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print the measured and the predicted time, of the latest plan."""
        if self._plan is None:
            return
        measured, predicted = self.median_seconds, self._plan.predicted_step_seconds
        if measured is not None and predicted is not None:
            rank_zero_info(
                f"predicted step  {step_text(self._plan)} ({self._plan.rates_device or 'an unnamed device'})\n"
                f"measured step   {format_seconds(measured)} (median of {len(self._steps) - WARM_UP})"
            )


class StepSeconds(StepTimer):
    """Write the median of the timed steps to a file."""

    def __init__(self, path: str) -> None:
        super().__init__(None)
        self._path = path

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the median on rank 0."""
        if trainer.is_global_zero and self.median_seconds is not None:
            Path(self._path).write_text(str(self.median_seconds))
