"""Measure the time of training steps, and print it with the plan's prediction at the end of every fit.

A step is a training batch: forward, backward, averaging and update, from the moment that its batch is on the device.
A batch whose gradients are only accumulated is not counted, nor are the first two steps, which also load kernels and
fill caches. Of the others the median is taken, so that some steps whose memory is measured do not count. The prediction
is for the same step of the reference model (planning/time/step_seconds.py); of another model only that of the decoder
is known, and the line says so.

No step waits for the device: on CUDA its beginning and its end are events among the device's work, which are read when
the fit is over.

Known limits: where the memory of every step is measured, that takes time too. CUDA's events were not run on a GPU.
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
"""Steps that are timed."""


def time_steps(trainer: pl.Trainer, plan: Plan | None) -> Callable[[], None]:
    """Time the steps of a fit on rank 0; returns what ends it."""
    if plan is None or plan.predicted_step_seconds is None or not trainer.is_global_zero:
        return lambda: None
    # the first of them: what others do at the end of a step is not counted
    return called_in(trainer, StepTimer(plan), first=True)


class TimedMoment:
    """When a device has done what it was given until now; to make one waits for nothing."""

    def __init__(self, device: torch.device) -> None:
        self._seconds = time.perf_counter()
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(device))

    def seconds_since(self, earlier: "TimedMoment") -> float:
        """Seconds from an earlier moment of the same device, which is waited for until it has come to this one."""
        if self._event is None or earlier._event is None:
            return self._seconds - earlier._seconds
        self._event.synchronize()
        return float(earlier._event.elapsed_time(self._event)) / 1e3


class StepTimer(pl.Callback):
    """Takes the time of training steps, for which a plan predicts one."""

    def __init__(self, plan: Plan | None) -> None:
        self._plan = plan
        self._steps: list[tuple[TimedMoment, TimedMoment]] = []
        self._begin: TimedMoment | None = None
        self._updates = 0

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy, as `deepcopy(trainer)` makes: moments of a device stay the original's."""
        return {**vars(self), "_steps": [], "_begin": None}

    @property
    def median_seconds(self) -> float | None:
        """Median of the steps that count, None without any; waits for the device."""
        found = [end.seconds_since(begin) for begin, end in self._steps[WARM_UP:]]
        return median(found) if found else None

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin."""
        self._updates = trainer.global_step
        self._begin = TimedMoment(pl_module.device) if len(self._steps) < WARM_UP + MOST else None

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the time of the step."""
        # by hand an optimiser may step unseen by the Trainer
        only_added = trainer.accumulate_grad_batches > 1 and trainer.global_step == self._updates
        if self._begin is None or only_added:
            return
        plan = getattr(trainer.strategy, "plan", None) or self._plan
        if plan is not self._plan:
            # steps under another plan are not what this one predicts
            self._plan, self._steps = plan, []
        self._steps.append((self._begin, TimedMoment(pl_module.device)))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print the measured and the predicted time; the plan may have been made anew."""
        if self._plan is None:
            return
        measured, predicted = self.median_seconds, self._plan.predicted_step_seconds
        if measured is not None and predicted is not None:
            rank_zero_info(
                f"predicted step  {step_text(self._plan)} ({self._plan.rates_device or 'an unnamed device'})\n"
                f"measured step   {format_seconds(measured)} (median of {len(self._steps) - WARM_UP})"
            )


class StepSeconds(StepTimer):
    """Writes the median of the steps that count to a file."""

    def __init__(self, path: str) -> None:
        super().__init__(None)
        self._path = path

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write it, of rank 0."""
        if trainer.is_global_zero and self.median_seconds is not None:
            Path(self._path).write_text(str(self.median_seconds))
