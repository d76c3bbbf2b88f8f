"""Recommend a number of devices: compare plans of policy "auto" for 1, 2, 4, ... with a fixed number of cells.

    B cells in a step, shared by the ranks of the data axis: ceil(B / data) each      (strong scaling)
    speed-up(n)   = seconds(n0) / seconds(n)          n0 = the fewest devices on which the model fits
    efficiency(n) = speed-up(n) * n0 / n

A step with B cells takes an optimiser as far on any number of devices, so whole steps are compared. The model axis
stays inside a node. Recommended is the largest number up to which every doubling, from n0 on, gives at least `WORTH` x.
The list ends at the second doubling that does not, or where there are neither cells nor parts for more devices.

Known limits: powers of two.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from math import floor
from typing import Any

from lightning_amp.costs.device_rates import Rates
from lightning_amp.costs.model_shape import LARGEST, ModelShape
from lightning_amp.errors import PlanError
from lightning_amp.planning.plan.plan import Candidate
from lightning_amp.planning.policies.auto import TIE
from lightning_amp.planning.policies.make_plan import plan
from lightning_amp.profiling.profile import Profile
from lightning_amp.progress import track

SCHEMA = 1
WORTH = 1.5
"""What a doubling has to give: two thirds of the time. Half of the new devices' work is then saved time."""
MOST_DEVICES = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """The best plan on some number of devices.

    Attributes:
        best: The fastest that fits, else the one that needs the least memory.
        step_seconds: Predicted time of a step, that of the decoder and the rest.
        fits: Whether it fits; None where the memory is unknown.
        speed_up: Over the fewest devices on which it fits, None before them.
        efficiency: Speed-up by devices, 1 where every device adds as much as the first.
        gain: Speed-up over half as many devices, None where those do not fit.
        worth: "yes" and "no", of a doubling no after one that was not; "the fewest" that fit, "does not fit".
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
    """How many devices are worth having.

    Attributes:
        budget_bytes: Memory of one device, None when unknown.
        node_devices: Devices of a node, beyond which links are slower.
        devices: The recommended number, None where the model fits on none of them.
        scales: What was compared, by the number of devices.
    """

    cells: int
    budget_bytes: int | None
    rates_device: str
    node_devices: int
    devices: int | None
    why: str
    scales: tuple[Scale, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"schema": SCHEMA, **asdict(self), "worth_from_gain": WORTH}


def recommend_devices(
    profile: Profile, shape_of: Callable[[int], ModelShape], *, cells: int, budget: int | None, rates: Rates
) -> Recommendation:
    """Compare numbers of devices.

    Args:
        shape_of: Cells of a rank -> the model.
        budget: Memory of one device in bytes, None when unknown.

    Raises:
        PlanError: Cells outside what is allowed, or a model without a decoder, of which no time is known.
    """
    if type(cells) is not int or not 1 <= cells <= LARGEST:
        raise PlanError(
            f"batch_size={cells!r} is not supported; allowed is a whole number of cells from 1 to {LARGEST:,}"
        )
    if not shape_of(cells).decoder:
        raise PlanError(
            "cannot recommend devices: the data have no modality with strata (Hi-C), whose decoder it is"
            " about; name a directory with one, or use as many devices as there are cells for"
        )
    numbers = [2**i for i in range(MOST_DEVICES.bit_length())]
    scales: list[Scale] = []
    lost = 0
    for devices in track(numbers, description="comparing", total=len(numbers)):
        meshes = list(_scales(profile, shape_of, devices, cells=cells, budget=budget, rates=rates))
        if not meshes:
            break
        fitting = [s for s in meshes if s.fits is not False]
        # of the meshes the fastest that fits; of those as fast the one with the fewest techniques
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
            # the last one has half as many devices: from the first number that fits on, all larger ones do
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
    """The plan of every mesh of so many devices."""
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
            # the model has no parts for so many ranks
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
    """A gain as text, rounded down: what is just below the bound must not read like it."""
    return f"{floor(100 * gain) / 100:.2f} x"
