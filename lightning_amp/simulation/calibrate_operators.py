"""Measure the operators of a module's training step on a device, by which the step of a plan is priced.

Two steps of Lightning's loop run on a copy of the module, with its values (footprint/run/inner_run.py). The second
is timed: in every round once operator by operator, and once as a whole. An operator takes the least time of all rounds;
other processes only slow it down. What the whole step takes beyond its operators, as for autograd and Python, is spread
evenly over them. This is done for the batch and for its half, quarter, eighth and sixteenth, which are micro-batches of
pipelines (the layer times of CSIMD, Zhou et al. 2025, Section 4.2) and chunks; a step of three quarters is the check.

Known limits: one device; operators run one after the other; those of custom kernels outside of torch's dispatcher are
part of what is spread. CUDA events were not tested on a GPU.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_amp.costs.device_rates import Rates
from lightning_amp.costs.measured_operators import MeasuredOperators
from lightning_amp.errors import ModelError, PlanError
from lightning_amp.footprint.copies.copy_batch import length_of, resized
from lightning_amp.footprint.copies.fake_copy import copy_of, copy_of_data, map_tensors
from lightning_amp.footprint.copies.no_side_effects import without_side_effects
from lightning_amp.footprint.live_bytes import moved_bytes
from lightning_amp.footprint.operator_rates import OperatorRates
from lightning_amp.footprint.profile_module import lacks_values, profile_module
from lightning_amp.footprint.run.inner_run import run_two_steps
from lightning_amp.footprint.run.run_settings import RunSettings
from lightning_amp.footprint.step_recorder import StepRecorder
from lightning_amp.lightning.steps.step_time import TimedMoment
from lightning_amp.lightning.strategy.hardware import device_budget
from lightning_amp.progress import track
from lightning_amp.quantities import format_bytes, format_seconds
from lightning_amp.simulation.calibrate import refuse_busy
from lightning_amp.text_table import table

ROUNDS = 5
PARTS = (1, 2, 4, 8, 16)
"""Parts into which the batch is cut; each size is measured."""
CHECK = 0.75
"""Share of the rows of a step that is measured only to be compared."""

Call = tuple[str, float]
"""An operator by its name, and the seconds that the rates predict for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedStep:
    """One size of a step: rows, None if the batch has no length; seconds predicted before and after, and measured."""

    rows: int | None
    before: float
    measured: float
    after: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class OperatorCalibration:
    """Operators that were measured, the steps they are of, and a step as a check, None if the batch is too small.

    Attributes:
        left_out: Sizes that were not measured, and why.
    """

    operators: MeasuredOperators
    steps: tuple[TimedStep, ...]
    check: TimedStep | None
    left_out: tuple[str, ...] = ()


def calibrate_operators(
    module: LightningModule, batch: Any, *, run_settings: RunSettings, rates: Rates, device: torch.device
) -> OperatorCalibration:
    """Measure the operators of a step; the module does not change, but moves to the device.

    Args:
        module, batch: With values.
        run_settings: Settings of the run that the step belongs to.
        rates: Rates of the device, which the measured seconds correct.
        device: Where it runs.

    Raises:
        ModelError: The step fails, or its parameters have no values.
        PlanError: The device has no room for the step, or is busy.
    """
    if lacks_values(module):
        raise ModelError(
            f"the operators of {type(module).__name__!r} cannot be measured, because its parameters have no values;"
            " make it on another device than 'meta'"
        )
    rows, name = length_of(batch), type(module).__name__
    sizes: list[int | None] = [None] if rows is None else [*sorted({-(-rows // parts) for parts in PARTS})]
    checked = None if rows is None or (part := round(CHECK * rows)) in sizes else part
    room, left_out = device_budget(device, node_ranks=1), list[str]()
    # the copy of the module is counted with the step, the module itself stays
    own = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    for size in sorted({*sizes, *([] if checked is None else [checked])}, key=lambda n: -(n or 0)):
        needs = own + profile_module(module, batch, batch_size=size, run_settings=run_settings).peak_bytes
        if needs <= room:
            # fewer rows need less
            break
        left_out.append(f"{size} rows need {format_bytes(needs)}, and there are {format_bytes(room)}")
        sizes, checked = [s for s in sizes if s != size], None if size == checked else checked
    if not sizes:
        raise PlanError(
            f"the step of {name!r} cannot be measured here: {left_out[-1]}; use a smaller batch, or a device with more"
        )
    base = OperatorRates.of(replace(rates, operators=None))
    module.to(device)
    batch = map_tensors(batch, lambda _, tensor: tensor.to(device))
    # the check is measured like the others, and not used
    requested = [*sizes, *([] if checked is None else [checked])]
    measured = {
        size: _measured(module, resized(batch, size), run_settings, base, device)
        for size in track(requested, description="measuring", total=len(requested))
    }
    found = MeasuredOperators(step=f"a step of {name} on {device.type}", points=_points(measured[s] for s in sizes))
    steps = [_timed(size, one, found) for size, one in measured.items()]
    return OperatorCalibration(
        operators=found,
        steps=tuple(steps[: len(sizes)]),
        check=steps[-1] if checked is not None else None,
        left_out=tuple(left_out),
    )


def operators_report(found: OperatorCalibration) -> str:
    """Format the steps before and after, and what is not measured."""
    named = [(_rows(step), step) for step in found.steps]
    named += [] if found.check is None else [(f"check: {_rows(found.check)}", found.check)]
    rows = [[name, *map(format_seconds, (step.before, step.measured, step.after))] for name, step in named]
    lines = [
        f"{len(found.operators.points)} operators of {found.operators.step}",
        table(["step", "predicted", "measured", "predicted now"], rows),
        *(f"not measured: {why}" for why in found.left_out),
    ]
    return "\n\n".join(lines)


def _rows(step: TimedStep) -> str:
    return "the batch" if step.rows is None else f"{step.rows:,} row{'s' * (step.rows != 1)}"


@dataclass(kw_only=True, slots=True)
class _Measured:
    """The least seconds of every call of a step, and of the whole step."""

    calls: list[tuple[Call, float]]
    whole: float

    def each(self) -> float:
        """Seconds of every operator beside what it computes."""
        return max(0.0, self.whole - sum(took for _, took in self.calls)) / max(1, len(self.calls))


def _measured(
    module: LightningModule, batch: Any, run_settings: RunSettings, rates: OperatorRates, device: torch.device
) -> _Measured:
    rounds, wholes = list[OperatorClock](), list[float]()
    for _ in range(ROUNDS):
        rounds.append(_second_step(module, batch, run_settings, lambda twin: OperatorClock(twin, rates, device)))
        wholes.append(_second_step(module, batch, run_settings, lambda twin: StepClock(twin, device)).seconds)
    calls = [clock.calls() for clock in rounds]
    names = [[call for call, _ in one] for one in calls]
    if any(one != names[0] for one in names):
        raise ModelError(
            f"the step of {type(module).__name__!r} calls other operators each time, by values or random numbers, and"
            " they cannot be measured; leave the module out"
        )
    refuse_busy(device, median(wholes) / min(wholes))
    least = [(one[0][0], min(took for _, took in one)) for one in zip(*calls, strict=True)]
    return _Measured(calls=least, whole=min(wholes))


def _second_step(
    module: LightningModule, batch: Any, run_settings: RunSettings, make: Callable[[nn.Module], Any]
) -> Any:
    """Run two steps on a copy, and return the recorder of the second one."""
    with without_side_effects(module, run_settings.datamodule):
        twin = copy_of(module, None)
        datamodule = copy_of_data(run_settings.datamodule, module, twin, None)
        return run_two_steps(twin, resized(batch, None), None, make, replace(run_settings, datamodule=datamodule))


def _points(measured: Iterable[_Measured]) -> dict[str, tuple[tuple[float, float], ...]]:
    """Return predicted and measured seconds of every operator: the mean of a size, and the least of several sizes."""
    least: dict[Call, float] = {}
    for one in measured:
        of_call: dict[Call, list[float]] = {}
        for call, took in one.calls:
            of_call.setdefault(call, []).append(took + one.each())
        for call, every in of_call.items():
            mean = sum(every) / len(every)
            least[call] = min(mean, least.get(call, mean))
    points: dict[str, list[tuple[float, float]]] = {}
    for (name, predicted), took in sorted(least.items()):
        points.setdefault(name, []).append((predicted, took))
    return {name: tuple(found) for name, found in points.items()}


def _timed(rows: int | None, found: _Measured, operators: MeasuredOperators) -> TimedStep:
    return TimedStep(
        rows=rows,
        before=sum(predicted for (_, predicted), _ in found.calls),
        measured=found.whole,
        after=sum(operators.seconds(name, predicted) for (name, predicted), _ in found.calls),
    )


class StepClock(StepRecorder):  # type: ignore[no-untyped-call]
    """Time a whole step, without recording its operators."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        super().__init__(module)
        self._device, self._begin, self._end = device, TimedMoment(device), TimedMoment(device)

    @property
    def seconds(self) -> float:
        """Seconds of the step; waits for the device."""
        return self._end.seconds_since(self._begin)

    def start(self, batch: Any, optimizers: Any) -> None:
        """Start the clock."""
        self._begin = TimedMoment(self._device)

    def begin_optimiser(self) -> None:
        """Record nothing."""

    def hold_gradients(self) -> None:
        """Stop the clock: the step has ended."""
        self._end = TimedMoment(self._device)

    def stop(self) -> None:
        """Record nothing."""


class OperatorClock(StepRecorder):  # type: ignore[no-untyped-call]
    """Time every operator of a step, except views, which are part of what is spread over the others."""

    def __init__(self, module: nn.Module, rates: OperatorRates, device: torch.device) -> None:
        super().__init__(module)
        self._rates, self._device, self._began = rates, device, TimedMoment(device)
        self._timed = list[tuple[Call, TimedMoment, TimedMoment]]()

    def calls(self) -> list[tuple[Call, float]]:
        """Return the calls with their seconds; waits for the device."""
        return [(call, end.seconds_since(begin)) for call, begin, end in self._timed]

    def begins(self, func: Any, args: Any, read: Any) -> None:
        """Start the clock of an operator."""
        super().begins(func, args, read)
        self._began = TimedMoment(self._device)

    def made(self, func: Any, result: Any, given: Any = ()) -> None:
        """Stop the clock of an operator."""
        self._ended = TimedMoment(self._device)
        super().made(func, result, given)

    def ends(self, func: Any, args: Any, kwargs: Any, read: Any, result: Any) -> None:
        """Note the operator."""
        super().ends(func, args, kwargs, read, result)
        if not func.is_view:
            moved = moved_bytes(read, result)
            call = func._opname, self._rates.predicted_seconds(func, args, kwargs, result, moved)
            self._timed.append((call, self._began, self._ended))
