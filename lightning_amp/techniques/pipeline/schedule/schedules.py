"""Define the order of passes on each device (GPipe, 1F1B, interleaved 1F1B), and compute when passes start and end.

Stage s is on device s mod N. A device computes its passes in the order given here, each as soon as its input arrives.

    gpipe         all forward passes, then all backward passes                             p in flight on every device
    1f1b          N - r forward passes, then backward and forward alternately                  min(p, N - r)
    interleaved   v stages on a device (virtual stages): the first (v - 1) m + 2 (N - 1 - r) forward passes, then
                  forward and backward alternately; a device runs m micro-batches (a round) before it changes the stage

The orders are those of torch.distributed.pipelining (GPipe; Huang et al. 2019. 1F1B: Fan et al. 2021, DAPPLE.
Interleaved: Narayanan et al. 2021). A micro-batch is in flight on a stage from its forward pass to the end of its
backward pass. During this time the stage keeps what the backward pass needs.

`timeline` computes the times of passes from the times of the stages; the rest of a device's time is idle (bubbles):

    begin of a pass    = max( end of the device's pass before, arrival of its input )
    begin of a sending = max( end of the pass, end of the link's sending before )
    arrival            = end of the sending

This is the recursion of Zhou et al. 2025 (Eq. 2), for any order of passes: devices send while they compute, in both
directions at a time, and a link carries one micro-batch after the other. Under GPipe it equals Eq. 6,

    sum over stages of (forward + backward + both sendings)  +  (p - 1) (rho_1 + rho_2)

Legend: N devices, r device, p micro-batches, v stages of a device, m micro-batches of a round.
Known limits: the optimiser and the averaging of gradients are not included; sending does not slow a device down.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from time import time
from typing import NamedTuple

from lightning_amp.costs.profiled_step import Stage
from lightning_amp.errors import PlanError

SCHEDULES = ("gpipe", "1f1b", "interleaved")


class Pass(NamedTuple):
    """Forward or backward pass of one micro-batch through one stage."""

    backward: bool
    stage: int
    micro_batch: int


Order = tuple[Pass, ...]
"""The passes of one device, first to last."""


def check_count(name: str, count: object) -> int:
    """Check that a number is a count, and return it.

    Raises:
        PlanError: The value is not a whole number of 1 or more.
    """
    if type(count) is not int or count < 1:
        raise PlanError(f"{name}={count!r} is not supported; allowed is a whole number of 1 or more: correct it")
    return count


def schedule(name: str, devices: int, micro_batches: int, *, stages_per_device: int = 1) -> tuple[Order, ...]:
    """Return the order of passes of every device.

    Args:
        name: One of `SCHEDULES`.
        devices: N.
        micro_batches: p.
        stages_per_device: v; more than 1 for "interleaved" only.

    Raises:
        PlanError: The schedule does not exist, or the micro-batches do not fill its rounds.
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
    # forward passes before the first backward pass
    first = [micro_batches if name == "gpipe" else devices - device for device in range(devices)]
    return tuple(_one_stage(device, min(n, micro_batches), micro_batches) for device, n in enumerate(first))


def _one_stage(stage: int, first: int, micro_batches: int) -> Order:
    """Run `first` forward passes, then a backward and a forward pass alternately until all forward passes are done."""
    order = [Pass(False, stage, j) for j in range(first)]
    for j in range(micro_batches):
        order.append(Pass(True, stage, j))
        if first + j < micro_batches:
            order.append(Pass(False, stage, first + j))
    return tuple(order)


def fills_rounds(name: str, devices: int, micro_batches: int) -> bool:
    """Whether a schedule supports this number of micro-batches: rounds of "interleaved" must have equal length."""
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
    # a device runs its stages in turn, with all micro-batches of a round at each, from its first stage on
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
    """Return the most micro-batches in flight at once, for every stage of a device."""
    now: Counter[int] = Counter()
    most: Counter[int] = Counter()
    for step in order:
        now[step.stage] += -1 if step.backward else 1
        most[step.stage] = max(most[step.stage], now[step.stage])
    return most


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """Times of all passes of a schedule.

    Attributes:
        passes: For every device, begin and end of every pass in seconds, in the device's order.
    """

    passes: tuple[dict[Pass, tuple[float, float]], ...]

    @property
    def seconds(self) -> float:
        """Seconds from the start of the first pass, at 0, to the end of the last one."""
        return max(end for device in self.passes for _, end in device.values())

    @property
    def idle(self) -> tuple[float, ...]:
        """Share of the time in which each device computes nothing: its bubble."""
        busy = [sum(end - begin for begin, end in device.values()) for device in self.passes]
        whole = self.seconds
        return tuple(1 - work / whole if whole else 0.0 for work in busy)

    def with_rest(self, rest_seconds: float) -> tuple[dict[Pass | None, tuple[float, float]], ...]:
        """Return `passes` with the whole-batch part of the last stage's first backward pass, if any, as key None."""
        last_stage = max(step.stage for device in self.passes for step in device)
        found: list[dict[Pass | None, tuple[float, float]]] = []
        for device in self.passes:
            spans: dict[Pass | None, tuple[float, float]] = {}
            for step, (begin, end) in device.items():
                if rest_seconds and step.backward and step.stage == last_stage and None not in spans:
                    spans[None] = begin, begin + rest_seconds
                    begin += rest_seconds
                spans[step] = begin, end
            found.append(spans)
        return tuple(found)


class PassTimes:
    """Measure the times of the passes of one rank in one step, by the machine's clock, without waiting for the device.

    A pass begins when its input has arrived, and ends before its result is sent, as in a `Timeline`.

    Known limits: ranks on several machines differ by the offset of their clocks. On a device with asynchronous
    execution (CUDA), a pass would seem to end too early.

    Attributes:
        passes: Begin and end of every pass, in seconds of the clock, in their order.
        rest_seconds: Time of what follows the blocks (whole batch), in the last stage's first backward pass.
    """

    def __init__(self) -> None:
        self.passes: dict[Pass, tuple[float, float]] = {}
        self._begin = self.rest_seconds = 0.0

    def begin(self) -> None:
        """Record that the input of a pass has arrived."""
        self._begin = time()

    def rested(self) -> None:
        """Record that what follows the blocks is done, while the pass continues."""
        self.rest_seconds = time() - self._begin

    def end(self, now: Pass) -> None:
        """Record that the result of a pass is computed."""
        self.passes[now] = (self._begin, time())


def timeline(orders: Sequence[Order], stages: Sequence[Stage]) -> Timeline:
    """Simulate a schedule.

    Args:
        orders: Order of every device, from `schedule`.
        stages: Stages with their seconds; bytes and idle time are not read.

    Raises:
        PlanError: The number of stages differs from that of the schedule.
    """
    last = max(step.stage for order in orders for step in order)
    if last + 1 != len(stages):
        raise PlanError(
            f"a schedule of {last + 1!r} stages got the times of {len(stages)!r}: make the schedule for"
            " as many devices as there are stages"
        )
    passes: list[dict[Pass, tuple[float, float]]] = [{} for _ in orders]
    # arrival of the input of each pass; inputs of the first stage are there from the beginning
    arrived = {step: 0.0 for order in orders for step in order if step.stage == 0 and not step.backward}
    device_free, link_free = [0.0] * len(orders), dict[tuple[int, int], float]()
    left, rest = [list(reversed(order)) for order in orders], stages[-1].rest_seconds
    while any(left):
        before = sum(map(len, left))
        for device, waiting in enumerate(left):
            while waiting and waiting[-1] in arrived:
                step = waiting.pop()
                now, begin = stages[step.stage], max(device_free[device], arrived[step])
                end = begin + (now.backward_seconds if step.backward else now.forward_seconds)
                if step.backward and step.stage == last:
                    end, rest = end + rest, 0.0
                passes[device][step], device_free[device] = (begin, end), end
                if step.backward and step.stage > 0:
                    to, takes = step._replace(stage=step.stage - 1), now.send_backward_seconds
                elif not step.backward and step.stage < last:
                    to, takes = step._replace(stage=step.stage + 1), now.send_forward_seconds
                else:
                    # the last stage starts its backward pass at once; after that of the first stage nothing follows
                    to, takes = step._replace(backward=True), 0.0
                link = device, to.stage % len(orders)
                # nothing is sent if one device has both stages
                if link[0] != link[1]:
                    # a link carries one micro-batch after the other, while the device continues
                    end = link_free[link] = max(end, link_free.get(link, 0.0)) + takes
                arrived[to] = end
        assert sum(map(len, left)) < before, "the passes of a schedule wait for each other in a circle"
    return Timeline(passes=tuple(passes))
