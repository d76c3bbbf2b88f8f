"""Claim: schedules compute every pass once, nothing early; their times are those of the longest path, and of Eq. 8 for
every number of micro-batches; no search misses a better pair."""

import random
from itertools import accumulate, combinations, pairwise
from typing import Any

import networkx
import numpy as np
import pytest

from benchmarks.pipeline.networks import cross_search
from lightning_amp import PlanError
from lightning_amp.costs.profiled_step import Stage
from lightning_amp.techniques.pipeline.schedule.micro_batches import LayerSeconds, LayerTimes, gpipe_seconds, search_all
from lightning_amp.techniques.pipeline.schedule.schedules import (
    SCHEDULES,
    Order,
    Pass,
    most_in_flight,
    schedule,
    timeline,
)

Numbers = list[float]
SHAPES = [(1, 1, 1), (1, 4, 3), (2, 4, 2), (3, 3, 2), (4, 8, 2), (4, 8, 3), (4, 4, 1), (5, 2, 1), (3, 7, 1)]
"""Devices, micro-batches, stages on a device."""


def all_schedules() -> list[tuple[str, int, int, int]]:
    return [
        (name, devices, micro_batches, stages)
        for name in SCHEDULES
        for devices, micro_batches, stages in SHAPES
        if (name == "interleaved" or stages == 1)
        and (name != "interleaved" or micro_batches % max(1, micro_batches // devices) == 0)
    ]


def stages_of(there: Numbers, back: Numbers, on: Numbers, returned: Numbers) -> list[Stage]:
    """Stages whose seconds these are; the last one sends nothing on, and the first one nothing back."""
    none = {"first": 0, "end": 0, "rank": 0, "peak_bytes": 0, "idle": 0.0}
    on, returned = [*on[:-1], 0.0], [0.0, *returned[1:]]
    return [
        Stage(forward_seconds=f, backward_seconds=b, send_forward_seconds=o, send_backward_seconds=r, **none)
        for f, b, o, r in zip(there, back, on, returned, strict=True)
    ]


def draw(stages: int, seed: int = 0) -> list[Stage]:
    rng = random.Random(seed)
    return stages_of(*([rng.uniform(1, 3) for _ in range(stages)] for _ in range(4)))


def longest_path(orders: tuple[Order, ...], stages: list[Stage]) -> float:
    """The time of a schedule by a graph of what waits for what, edges weighing what is computed or sent."""
    graph = networkx.DiGraph()

    def takes(step: Pass) -> float:
        stage = stages[step.stage]
        return stage.backward_seconds if step.backward else stage.forward_seconds

    def sending(step: Pass) -> float:
        stage = stages[step.stage]
        return stage.send_backward_seconds if step.backward else stage.send_forward_seconds

    for order in orders:
        sent: dict[tuple[int, bool], tuple[str, Pass]] = {}
        for step, after in pairwise((*order, None)):
            graph.add_edge(("begin", step), ("end", step), weight=takes(step))
            if after is not None:
                graph.add_edge(("end", step), ("begin", after), weight=0.0)
            last = len(stages) - 1
            if step.stage == (0 if step.backward else last):
                if not step.backward:
                    graph.add_edge(("end", step), ("begin", step._replace(backward=True)), weight=0.0)
                continue
            to = step._replace(stage=step.stage + (-1 if step.backward else 1))
            if len(orders) == 1:
                graph.add_edge(("end", step), ("begin", to), weight=0.0)
                continue
            cost = sending(step)
            graph.add_edge(("end", step), ("send", step), weight=0.0)
            graph.add_edge(("send", step), ("begin", to), weight=cost)
            # a link carries one after the other
            link = (to.stage % len(orders), len(orders) > 2 and step.backward)
            if link in sent:
                kind, before = sent[link]
                graph.add_edge((kind, before), ("send", step), weight=sending(before))
            sent[link] = ("send", step)
    return networkx.dag_longest_path_length(graph)


@pytest.mark.parametrize(("name", "devices", "micro_batches", "stages"), all_schedules())
def test_every_pass_once_and_nothing_early(name: str, devices: int, micro_batches: int, stages: int) -> None:
    orders = schedule(name, devices, micro_batches, stages_per_device=stages)
    passes = [step for order in orders for step in order]
    assert len(passes) == len(set(passes)) == 2 * devices * stages * micro_batches
    assert all(step.stage % devices == device for device, order in enumerate(orders) for step in order)
    times = draw(devices * stages)
    line = timeline(orders, times)
    assert line.seconds == pytest.approx(longest_path(orders, times))
    begins = {step: begin for device in line.passes for step, (begin, _) in device.items()}
    ends = {step: end for device in line.passes for step, (_, end) in device.items()}
    for step in passes:
        before = step._replace(stage=step.stage + (1 if step.backward else -1))
        if before in ends:
            assert begins[step] >= ends[before]
        if step.backward:
            assert begins[step] >= ends[step._replace(backward=False)]
    assert all(list(done) == list(order) for done, order in zip(line.passes, orders, strict=True))


def even(stages: int, forward: float, backward: float) -> list[Stage]:
    return stages_of([forward] * stages, [backward] * stages, [0.0] * stages, [0.0] * stages)


def test_bubbles_of_equal_stages() -> None:
    # (N - 1) / (p + N - 1), and with v stages on a device (N - 1) / (v p + N - 1) (Narayanan et al. 2021, 2.2)
    for name in ("gpipe", "1f1b"):
        line = timeline(schedule(name, 4, 8), even(4, 1.0, 2.0))
        assert line.seconds == 3.0 * (8 + 3)
        assert line.idle == pytest.approx([3 / 11] * 4)
    twice = timeline(schedule("interleaved", 4, 8, stages_per_device=2), even(8, 0.5, 1.0))
    assert twice.idle == pytest.approx([3 / 19] * 4)


def test_micro_batches_in_flight() -> None:
    assert [most_in_flight(order) for order in schedule("gpipe", 3, 5)] == [{0: 5}, {1: 5}, {2: 5}]
    assert [most_in_flight(order) for order in schedule("1f1b", 3, 5)] == [{0: 3}, {1: 2}, {2: 1}]
    assert [most_in_flight(order) for order in schedule("1f1b", 3, 2)] == [{0: 2}, {1: 2}, {2: 1}]
    # (v - 1) m + 2 (N - 1 - r) + 1 in all: 4 + 6 + 1 on the first device
    orders = schedule("interleaved", 4, 8, stages_per_device=2)
    changes = [[-1 if step.backward else 1 for step in order] for order in orders]
    assert [max(accumulate(one)) for one in changes] == [11, 9, 7, 5]


@pytest.mark.parametrize(("asked", "message"), [
    (("zb", 2, 2, 1), "schedule='zb' is not supported; allowed are 'gpipe', '1f1b', 'interleaved'"),
    (("1f1b", 0, 2, 1), "devices=0 is not supported; allowed is a whole number of 1 or more"),
    (("1f1b", 2, 2.5, 1), r"micro_batches=2\.5 is not supported"),
    (("gpipe", 2, 2, 2), "schedule='gpipe' got 2 stages on a device"),
    (("interleaved", 4, 9, 2), "9 micro-batches on 4 devices, which are 2 rounds of unequal length"),
])  # fmt: skip
def test_it_refuses_a_schedule(asked: tuple, message: str) -> None:
    name, devices, micro_batches, stages = asked
    with pytest.raises(PlanError, match=message):
        schedule(name, devices, micro_batches, stages_per_device=stages)


NAMES = ("forward", "backward", "send_forward", "send_backward")
COUNTS = (1, 2, 3, 4, 6, 8, 12, 16)


def drawn_layers(seed: int, layers: int = 9) -> LayerTimes:
    """Layers whose time is some fixed part and some part that shrinks more or less with the micro-batch."""
    rng = np.random.default_rng(seed)
    p = np.array(COUNTS)[:, None]
    tables = [
        rng.uniform(50, 100, layers) / p ** rng.uniform(0.4, 1, layers) + rng.uniform(0, 9, layers) for _ in NAMES
    ]
    return LayerTimes(counts=COUNTS, **dict(zip(NAMES, tables, strict=True)))


def stages_of_layers(times: LayerTimes, row: int, ends: tuple[int, ...], speeds: list[float] | None = None) -> Any:
    return LayerSeconds(**{name: getattr(times, name)[row] for name in NAMES}).stages(ends, speeds, 9)


def slowest(stages: Any) -> float:
    """rho_1 + rho_2."""
    there, back = (
        max(max(getattr(s, f"{way}_seconds"), getattr(s, f"send_{way}_seconds")) for s in stages)
        for way in ("forward", "backward")
    )
    return there + back


@pytest.mark.parametrize("speeds", [None, [1.0, 0.5, 2.0, 1.0]])
@pytest.mark.parametrize("ends", [(9,), (2, 9), (3, 5, 9), (1, 2, 3, 9), (4, 4, 9)])
def test_the_time_of_a_step_is_that_of_its_schedule(ends: tuple[int, ...], speeds: list[float] | None) -> None:
    times = drawn_layers(0)
    found = gpipe_seconds(times, ends, speeds=speeds)
    for row, p in enumerate(COUNTS):
        stages = stages_of_layers(times, row, ends, speeds)
        line = timeline(schedule("gpipe", len(stages), p), stages)
        assert found[row] == pytest.approx(line.seconds)


@pytest.mark.parametrize("seed", range(10))
def test_searching_all_finds_the_best_of_all_optimal_cuts(seed: int) -> None:
    times = drawn_layers(seed)
    everything = search_all(times, 3)
    every_cut = [(*ends, 9) for n in range(3) for ends in combinations(range(1, 9), n)]
    best_of_rows = []
    for row in range(len(COUNTS)):
        # the least rho_1 + rho_2 that any cut has for this number of micro-batches
        stages = [stages_of_layers(times, row, ends) for ends in every_cut]
        least = min(map(slowest, stages))
        best_of_rows += [
            gpipe_seconds(times, ends).min() for ends, s in zip(every_cut, stages, strict=True) if slowest(s) <= least
        ]
    assert everything.seconds == pytest.approx(min(best_of_rows))
    row = COUNTS.index(everything.micro_batches)
    assert gpipe_seconds(times, everything.ends)[row] == everything.seconds
    # Algorithm 1 may stop short of it
    assert cross_search(times, 3) >= everything.seconds
