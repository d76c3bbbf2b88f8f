"""Compute begin and end of every pass of a schedule from the times of its stages, and idle time (bubbles).

    begin of a pass    = max( end of the device's pass before, arrival of its input )
    begin of a sending = max( end of the pass, end of the link's sending before )
    arrival            = end of the sending

This is the recursion of Zhou et al. 2025 (Eq. 2), for any order of passes: devices send while they compute, in both
directions at a time, and a link carries one micro-batch after the other. Under GPipe it comes to Eq. 6,

    sum over stages of (forward + backward + both sendings)  +  (p - 1) (rho_1 + rho_2)

Known limits: neither the optimiser nor the averaging of gradients; a device that sends is not slowed down by it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_amp.errors import PlanError
from lightning_amp.techniques.pipeline.schedule.schedules import Order, Pass


@dataclass(frozen=True, kw_only=True, slots=True)
class StageTimes:
    """Times of one micro-batch, one for each stage, in one unit.

    Attributes:
        forward: Of the forward pass.
        backward: Of the backward pass.
        send_forward: Of sending the output to the next stage; of the last stage 0.
        send_backward: Of sending the gradient to the stage before; of the first stage 0.
        rest: Of what the last stage computes once for all micro-batches before its first backward pass.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    send_forward: tuple[float, ...]
    send_backward: tuple[float, ...]
    rest: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """When a schedule does what.

    Attributes:
        passes: Begin and end of every pass, of every device, in the device's order.
    """

    passes: tuple[dict[Pass, tuple[float, float]], ...]

    @property
    def seconds(self) -> float:
        """From the first pass's begin, at 0, to the end of the last one."""
        return max(end for device in self.passes for _, end in device.values())

    @property
    def idle(self) -> tuple[float, ...]:
        """Share of the time in which a device computes nothing: its bubble."""
        busy = [sum(end - begin for begin, end in device.values()) for device in self.passes]
        whole = self.seconds
        return tuple(1 - work / whole if whole else 0.0 for work in busy)

    def with_rest(self, rest_seconds: float) -> tuple[dict[Pass | None, tuple[float, float]], ...]:
        """`passes`, and by None what the last stage's first backward pass begins with for the whole batch, if any."""
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


def timeline(orders: Sequence[Order], times: StageTimes) -> Timeline:
    """Run a schedule on paper.

    Args:
        orders: Of every device, from `schedule`.
        times: Of every stage.

    Raises:
        PlanError: Another number of stages than the schedule has.
    """
    stages = 1 + max(step.stage for order in orders for step in order)
    if stages != len(times.forward):
        raise PlanError(
            f"a schedule of {stages!r} stages got the times of {len(times.forward)!r}: make the schedule for"
            " as many devices as there are stages"
        )
    run = _Simulation(len(orders), times)
    left = [list(reversed(order)) for order in orders]
    while any(left):
        before = sum(map(len, left))
        for device, waiting in enumerate(left):
            while waiting and run.input_of(waiting[-1]) is not None:
                run.compute(device, waiting.pop())
        assert sum(map(len, left)) < before, "the passes of a schedule wait for each other in a circle"
    return Timeline(passes=tuple(run.passes))


class _Simulation:
    """What has been computed and sent so far."""

    def __init__(self, devices: int, times: StageTimes) -> None:
        self.times = times
        self.passes: list[dict[Pass, tuple[float, float]]] = [{} for _ in range(devices)]
        self._device_free = [0.0] * devices
        self._link_free: dict[tuple[int, int], float] = {}
        self._arrived: dict[Pass, float] = {}
        self._rested = False

    def input_of(self, step: Pass) -> float | None:
        """When the input of a pass arrives; None: not known yet."""
        if step.stage == 0 and not step.backward:
            return 0.0
        return self._arrived.get(step)

    def compute(self, device: int, step: Pass) -> None:
        """Compute a pass whose input is known, and send on what it returns."""
        arrived = self.input_of(step)
        assert arrived is not None, "requested by the caller"
        begin = max(self._device_free[device], arrived)
        end = begin + (self.times.backward if step.backward else self.times.forward)[step.stage]
        last = len(self.times.forward) - 1
        if step.backward and step.stage == last and not self._rested:
            end, self._rested = end + self.times.rest, True
        self.passes[device][step] = (begin, end)
        self._device_free[device] = end
        if step.backward and step.stage > 0:
            to, takes = step._replace(stage=step.stage - 1), self.times.send_backward[step.stage]
        elif not step.backward and step.stage < last:
            to, takes = step._replace(stage=step.stage + 1), self.times.send_forward[step.stage]
        else:
            # the last stage goes back at once, the first one has nobody to go back to
            to, takes = step._replace(backward=True), 0.0
        self._arrived[to] = self._send(device, to.stage % len(self.passes), end, takes)

    def _send(self, device: int, other: int, at: float, takes: float) -> float:
        if device == other:
            return at
        arrival = max(at, self._link_free.get((device, other), 0.0)) + takes
        self._link_free[device, other] = arrival
        return arrival
