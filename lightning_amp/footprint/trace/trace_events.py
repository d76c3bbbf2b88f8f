"""Write a counted step as Chrome's trace events: a slice for each operator in those of its modules, and live bytes."""

import json
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from lightning_amp.footprint.module_profile import KINDS
from lightning_amp.footprint.trace.step_trace import StepTrace

ABOUT = {"pid": 0, "tid": 1, "cat": "step"}
LIVE, BY_KIND = "live bytes", "bytes by kind"
"""Counters: of all tensors, and of each kind."""


def trace_events(trace: StepTrace) -> bytes:
    """Return the step as JSON of Chrome's trace events. One microsecond stands for one operator."""
    names = {"process_name": "predicted step, 1 us for one operator", "thread_name": "phase, modules, operator"}
    heads = [{"ph": "M", "name": key, **ABOUT, "args": {"name": name}} for key, name in names.items()]
    return json.dumps({"traceEvents": [*heads, *_slices(trace), *_counters(trace)], "displayTimeUnit": "ns"}).encode()


def _slices(trace: StepTrace) -> Iterator[dict[str, Any]]:
    """Yield the phase, the modules and the operators, those that begin at the same time from the outside in."""
    found: list[dict[str, Any]] = []
    running: list[dict[str, Any]] = []
    for at, (phase, fqn) in enumerate(trace.work):
        parts = fqn.split(".") if fqn else []
        path = [phase, *(".".join(parts[: k + 1]) for k in range(len(parts)))]
        same = 0
        while same < min(len(path), len(running)) and running[same]["name"] == path[same]:
            same += 1
        for ended in running[same:]:
            ended["dur"] = at - ended["ts"]
        del running[same:]
        running += [{"ph": "X", "name": name, "ts": at, "dur": 0, **ABOUT} for name in path[same:]]
        found += running[same:]
        if trace.operators:
            found.append({"ph": "X", "name": trace.operators[at], "ts": at, "dur": 1, **ABOUT, "args": {"of": fqn}})
    for ended in running:
        ended["dur"] = len(trace.work) - ended["ts"]
    yield from found


def _counters(trace: StepTrace) -> Iterator[dict[str, Any]]:
    now = dict.fromkeys(KINDS, 0)

    def counters(ts: float) -> Iterator[dict[str, Any]]:
        yield {"ph": "C", "name": LIVE, "ts": ts, "args": {"bytes": sum(now.values())}, **ABOUT}
        yield {"ph": "C", "name": BY_KIND, "ts": ts, "args": dict(now), **ABOUT}

    for life in trace.before:
        now[life.kind] += life.n_bytes
    yield from counters(0)
    # results are there before arguments are released, so that each operator has two values at most
    for (at, made), events in groupby(trace.events(), key=lambda event: (event.at, event.made)):
        for event in events:
            now[event.life.kind] += event.life.n_bytes if made else -event.life.n_bytes
        yield from counters(at + (0 if made else 0.5))
