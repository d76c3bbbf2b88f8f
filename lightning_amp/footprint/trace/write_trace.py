"""Write a counted step for the tools that show memory: torch's memory viewer, Perfetto, and Chrome's trace viewer."""

import json
import pickle
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from lightning_amp.errors import PlanError
from lightning_amp.footprint.module_profile import KINDS, Life
from lightning_amp.footprint.trace.caching_allocator import CachingAllocator, Segment
from lightning_amp.footprint.trace.step_trace import STEPS, Event, StepTrace


def form_of(path: Path) -> Callable[[StepTrace], bytes]:
    """Return what makes the content of a file; the ending of its name decides.

    Raises:
        PlanError: The ending is none of `FORMS`.
    """
    if path.suffix not in FORMS:
        raise PlanError(
            f"a trace cannot be written to {str(path)!r}: its name ends in {path.suffix!r}; give .pickle for torch's"
            " memory viewer (pytorch.org/memory_viz), or .json for Perfetto (ui.perfetto.dev) and Chrome"
        )
    return FORMS[path.suffix]


def memory_snapshot(trace: StepTrace) -> bytes:
    """Return the last of several steps as a pickled snapshot in the form of CUDA's memory snapshots of torch.

    A frame has the module as its file and what made the storage as its function. Time is counted in operators.
    """
    allocator, events = CachingAllocator(), []
    names: dict[int, Life] = {}
    for step, event, block in trace.replayed(allocator):
        if event.made:
            names[block.address] = event.life
        if step < STEPS - 1:
            continue
        about = {"addr": block.address, "size": block.size, "stream": 0, "time_us": event.at, "frames": frames(event)}
        actions = ("alloc",) if event.made else ("free_requested", "free_completed")
        events += [{"action": action, **about} for action in actions]
    segments = [_segment(segment, names) for segment in allocator.segments]
    settings = {"expandable_segments": True, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    return pickle.dumps({"segments": segments, "device_traces": [events], "allocator_settings": settings})


def frames(event: Event) -> list[dict[str, Any]]:
    """Return the frames of an event: what the storage is, and whose it is."""
    life = event.life
    shape = "x".join(map(str, life.shape))
    return [
        {"filename": life.fqn or "(the module itself)", "line": event.at, "name": f"{life.name} {shape} {life.dtype}"},
        {"filename": "lightning-amp, predicted", "line": 0, "name": life.kind},
    ]


def _segment(segment: Segment, names: dict[int, Life]) -> dict[str, Any]:
    blocks, block = [], segment.first
    while block is not None:
        state = "inactive" if block.free else "active_allocated"
        of = None if block.free else names.get(block.address)
        blocks.append(
            {
                "address": block.address,
                "size": block.size,
                "requested_size": block.size if of is None else of.n_bytes,
                "state": state,
                "frames": [] if of is None else frames(Event(0, of, True)),
            }
        )
        block = block.after  # type: ignore[assignment]
    used = sum(block["size"] for block in blocks if block["state"] != "inactive")
    return {
        "device": 0,
        "address": segment.address,
        "total_size": segment.size,
        "allocated_size": used,
        "active_size": used,
        "requested_size": used,
        "stream": 0,
        "segment_type": "small" if segment.first.small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": True,
        "frames": [],
        "blocks": blocks,
    }


def trace_events(trace: StepTrace) -> bytes:
    """Return the step as JSON of Chrome's trace events: phases and modules, and bytes by kind as a counter.

    One microsecond stands for one operator.
    """
    return json.dumps({"traceEvents": list(_trace_events(trace)), "displayTimeUnit": "ns"}).encode()


def _trace_events(trace: StepTrace) -> Iterator[dict[str, Any]]:
    about = {"pid": 0, "cat": "step"}
    yield {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "predicted step, 1 us for one operator"}}
    for row, title in enumerate(("phase", "module")):
        yield {"ph": "M", "name": "thread_name", "pid": 0, "tid": row + 1, "args": {"name": title}}
        begin = 0
        for name, operators in groupby(work[row] for work in trace.work):
            length = len(list(operators))
            yield {
                **{"ph": "X", "name": name or "(the module itself)", "tid": row + 1, "ts": begin, "dur": length},
                **about,
            }
            begin += length
    now = dict.fromkeys(KINDS, 0)
    for life in trace.before:
        now[life.kind] += life.n_bytes
    yield {"ph": "C", "name": "bytes", "ts": 0, "args": dict(now), **about}
    # results are there before arguments are released, so that each operator has two values at most
    for (at, made), events in groupby(trace.events(), key=lambda event: (event.at, event.made)):
        for event in events:
            now[event.life.kind] += event.life.n_bytes if made else -event.life.n_bytes
        yield {"ph": "C", "name": "bytes", "ts": at + (0 if made else 0.5), "args": dict(now), **about}


FORMS: dict[str, Callable[[StepTrace], bytes]] = {".pickle": memory_snapshot, ".json": trace_events}
"""Content of a file, by the ending of its name."""
