"""Order the micro-batches on each device: GPipe, 1F1B and interleaved 1F1B, and what is in flight.

Stage s is on device s mod N. A device computes its passes in the order given here, each as soon as its input is there.

    gpipe         all forward passes, then all backward passes                             p in flight on every device
    1f1b          N - r forward passes, then backward and forward in turn                      min(p, N - r)
    interleaved   v stages on a device (virtual stages): the first (v - 1) m + 2 (N - 1 - r) forward passes, then
                  forward and backward in turn; a device stays at one of its stages for m micro-batches, a round

The orders are those of torch.distributed.pipelining (GPipe; Huang et al. 2019. 1F1B: Fan et al. 2021, DAPPLE.
Interleaved: Narayanan et al. 2021). A micro-batch is in flight on a stage from its forward pass to the end of its
backward pass: so long the stage keeps what the backward pass needs.

Legend: N devices, r device, p micro-batches, v stages of a device, m micro-batches of a round.
"""

from collections import Counter
from typing import NamedTuple

from lightning_amp.errors import PlanError
from lightning_amp.techniques.pipeline.schedule.numbers import check_count

SCHEDULES = ("gpipe", "1f1b", "interleaved")


class Pass(NamedTuple):
    """One micro-batch through one stage, one way."""

    backward: bool
    stage: int
    micro_batch: int


Order = tuple[Pass, ...]
"""The passes of one device, first to last."""


def schedule(name: str, devices: int, micro_batches: int, *, stages_per_device: int = 1) -> tuple[Order, ...]:
    """The order of every device.

    Args:
        name: One of `SCHEDULES`.
        devices: N.
        micro_batches: p.
        stages_per_device: v; more than 1 for "interleaved" only.

    Raises:
        PlanError: No such schedule, or micro-batches that do not fill its rounds.
    """
    numbers = {"devices": devices, "micro_batches": micro_batches, "stages_per_device": stages_per_device}
    for what, count in numbers.items():
        check_count(what, count)
    if name not in SCHEDULES:
        raise PlanError(
            f"schedule={name!r} is not supported; allowed are {', '.join(map(repr, SCHEDULES))}: choose one"
        )
    if name == "interleaved":
        return _interleaved(devices, micro_batches, stages_per_device)
    if stages_per_device > 1:
        raise PlanError(
            f"schedule={name!r} got {stages_per_device!r} stages on a device, and has one: choose"
            " schedule='interleaved', or as many stages as devices"
        )
    first = [micro_batches if name == "gpipe" else devices - device for device in range(devices)]
    return tuple(_one_stage(device, min(n, micro_batches), micro_batches) for device, n in enumerate(first))


def _one_stage(stage: int, first: int, micro_batches: int) -> Order:
    """So many forward passes first, then a backward and a forward pass in turn as long as there are forward ones."""
    order = [Pass(False, stage, j) for j in range(first)]
    for j in range(micro_batches):
        order.append(Pass(True, stage, j))
        if first + j < micro_batches:
            order.append(Pass(False, stage, first + j))
    return tuple(order)


def fills_rounds(name: str, devices: int, micro_batches: int) -> bool:
    """Whether a schedule can go through so many micro-batches: rounds of "interleaved" are of one length."""
    return name != "interleaved" or micro_batches % _rounds(devices, micro_batches) == 0


def _rounds(devices: int, micro_batches: int) -> int:
    return max(1, micro_batches // devices)


def _interleaved(devices: int, micro_batches: int, stages: int) -> tuple[Order, ...]:
    rounds = _rounds(devices, micro_batches)
    if not fills_rounds("interleaved", devices, micro_batches):
        raise PlanError(
            f"schedule='interleaved' got {micro_batches!r} micro-batches on {devices!r} devices, which are"
            f" {rounds!r} rounds of unequal length; choose a multiple of {rounds!r}, such as"
            f" {devices * rounds!r}"
        )
    # a device goes through its stages in turn, so many micro-batches at each, forward from its first stage on
    places = [
        (local, round_ * (micro_batches // rounds) + j)
        for round_ in range(rounds)
        for local in range(stages)
        for j in range(micro_batches // rounds)
    ]
    orders = []
    for device in range(devices):
        forward = [Pass(False, local * devices + device, j) for local, j in places]
        backward = [Pass(True, (stages - 1 - local) * devices + device, j) for local, j in places]
        first = min((stages - 1) * (micro_batches // rounds) + 2 * (devices - 1 - device), len(places))
        order = forward[:first]
        for there, back in zip(forward[first:], backward, strict=False):
            order += [there, back]
        orders.append((*order, *backward[len(places) - first :]))
    return tuple(orders)


def most_in_flight(order: Order) -> Counter[int]:
    """Most micro-batches that are in flight at once, of every stage of a device."""
    now: Counter[int] = Counter()
    most: Counter[int] = Counter()
    for step in order:
        now[step.stage] += -1 if step.backward else 1
        most[step.stage] = max(most[step.stage], now[step.stage])
    return most
