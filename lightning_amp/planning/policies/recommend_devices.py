"""Recommend a number of devices: compare plans of policy "auto" for 1, 2, 4, ... with a fixed number of cells.

    B cells in a step, shared by the ranks of the data axis: ceil(B / data) each      (strong scaling)
    speed-up(n)   = seconds(n0) / seconds(n)          n0 = the fewest devices on which the model fits
    efficiency(n) = speed-up(n) * n0 / n

A step with B cells advances training equally on any number of devices, so complete steps are compared. The model axis
stays inside a node. The recommended number is the largest one up to which every doubling, from n0 on, gives at least a
factor of `WORTH`. The list stops at the second doubling that does not, or if there are no more cells or parts for more
devices.

Known limits: powers of two only.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from math import floor
from typing import Any

from lightning_amp.costs.device_rates import Rates
from lightning_amp.costs.model_shape import LARGEST, ModelShape
from lightning_amp.costs.profiled_step import TIE
from lightning_amp.errors import PlanError
from lightning_amp.planning.plan.plan import Candidate
from lightning_amp.planning.policies.make_plan import plan
from lightning_amp.profiling.profile import Profile
from lightning_amp.progress import track

SCHEMA = 1
WORTH = 1.5
"""Least speed-up of a worthwhile doubling: two thirds of the time, so half of the new devices' work saves time."""
MOST_DEVICES = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """The best plan on some number of devices.

    Attributes:
        best: The fastest that fits, else the one that requires the least memory.
        step_seconds: Predicted time of a step, decoder and rest.
        fits: Whether it fits; None if the memory is unknown.
        speed_up: Relative to the fewest devices on which it fits; None for fewer devices.
        efficiency: Speed-up per device, relative to the fewest devices; 1 is linear scaling.
        gain: Speed-up over half as many devices, None if those do not fit.
        worth: "yes" or "no", "no" also after a doubling that was not worthwhile; "the fewest" that fit; "does not fit".
    """

    devices: int
    best: Candidate
    cells: int
    step_seconds: float
    fits: bool | None
    speed_up: float | None = None
    efficiency: float | None = None
    gain: float | None = None
    worth: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recommendation:
    """Recommended number of devices.

    Attributes:
        budget_bytes: Memory of one device, None if unknown.
        node_devices: Devices of a node, beyond which links are slower.
        devices: The recommended number, None if the model fits on none of them.
        scales: Compared numbers of devices, ascending.
    """

    cells: int
    budget_bytes: int | None
    rates_device: str
    node_devices: int
    devices: int | None
    why: str
    scales: tuple[Scale, ...]

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain values for JSON."""
        return {"schema": SCHEMA, **asdict(self), "worth_from_gain": WORTH}


def recommend_devices(
    profile: Profile, shape_of: Callable[[int], ModelShape], *, cells: int, budget: int | None, rates: Rates
) -> Recommendation:
    """Compare numbers of devices.

    Args:
        shape_of: Cells of a rank -> the model.
        budget: Memory of one device in bytes, None if unknown.

    Raises:
        PlanError: The number of cells is not allowed, or the model has no decoder, so that its time is not predicted.
    """
    if type(cells) is not int or not 1 <= cells <= LARGEST:
        raise PlanError(
            f"batch_size={cells!r} is not supported; allowed is a whole number of cells from 1 to {LARGEST:,}"
        )
    if not shape_of(cells).decoder:
        raise PlanError(
            "cannot recommend devices: the data have no modality with strata (Hi-C), whose decoder it is"
            " about; name a directory with one, or ask lightning_amp.plan(module, batch).fewest_devices()"
        )
    numbers = [2**i for i in range(MOST_DEVICES.bit_length())]
    scales: list[Scale] = []
    lost = 0
    for devices in track(numbers, description="comparing", total=len(numbers)):
        meshes = list(_scales(profile, shape_of, devices, cells=cells, budget=budget, rates=rates))
        if not meshes:
            break
        fitting = [s for s in meshes if s.fits is not False]
        # the fastest mesh that fits; within the tie the one with the fewest techniques
        fastest = min((s.step_seconds for s in fitting), default=0.0)
        level = [s for s in fitting if s.step_seconds <= TIE * fastest]
        found = min(level, key=lambda s: (len(s.best.strategies), s.best.model), default=None)
        first = next((s for s in scales if s.fits is not False), None)
        if found is None:
            found = replace(min(meshes, key=lambda s: s.best.peak_bytes), worth="does not fit")
        elif first is None:
            found = replace(found, worth="the fewest", speed_up=1.0, efficiency=1.0)
        else:
            speed_up = first.step_seconds / found.step_seconds
            # the previous entry has half as many devices: above the first number that fits, all numbers fit
            gain = scales[-1].step_seconds / found.step_seconds
            lost += gain < WORTH
            found = replace(
                found,
                worth="no" if lost else "yes",
                speed_up=speed_up,
                efficiency=speed_up * first.devices / devices,
                gain=gain,
            )
        scales.append(found)
        if lost == 2:
            break
    best = next((s for s in reversed(scales) if s.worth in ("the fewest", "yes")), None)
    return Recommendation(
        cells=cells,
        budget_bytes=budget,
        rates_device=rates.device,
        node_devices=rates.links.ranks_per_node,
        devices=None if best is None else best.devices,
        why=_why(best, scales),
        scales=tuple(scales),
    )


def _scales(
    profile: Profile,
    shape_of: Callable[[int], ModelShape],
    devices: int,
    *,
    cells: int,
    budget: int | None,
    rates: Rates,
) -> Iterator[Scale]:
    """Yield the best plan of every mesh of this many devices."""
    for model in (2**i for i in range(min(devices, rates.links.ranks_per_node).bit_length())):
        data = devices // model
        if data > cells:
            continue
        part = -(-cells // data)
        try:
            made = plan(
                profile,
                devices=devices,
                device_memory=budget,
                batch_size=part,
                model_parallel_size=model,
                shape=shape_of(part),
                rates=rates,
            )
        except PlanError:
            # the model has too few parts for this many ranks
            if model == 1:
                raise
            continue
        yield Scale(
            devices=devices,
            best=made.candidates[0],
            cells=part,
            step_seconds=(made.predicted_step_seconds or 0.0) + (made.predicted_rest_seconds or 0.0),
            fits=made.fits,
        )


def _why(best: Scale | None, scales: list[Scale]) -> str:
    if best is None:
        return f"it does not fit on {scales[-1].devices} devices either; use fewer cells in a step, or larger devices"
    after = next((s for s in scales if s.devices == 2 * best.devices), None)
    if after is None and 2 * best.devices > MOST_DEVICES:
        return f"every doubling up to here gives at least {WORTH} x; more were not looked at"
    if after is None:
        return "there are neither cells nor parts of the decoder for more devices"
    return (
        f"{after.devices} devices would be {ratio(after.gain or 0.0)} as fast as {best.devices}; a doubling is worth"
        f" it from {WORTH} x on"
    )


def ratio(gain: float) -> str:
    """Format a gain, rounded down: a value just below the bound must not read like the bound."""
    return f"{floor(100 * gain) / 100:.2f} x"
