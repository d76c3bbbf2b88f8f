"""Write counted steps as a snapshot of CUDA memory, in the form that torch dumps and its memory viewer reads.

The trace begins with the parameters and has `STEPS` steps. Time is counted in operators. The frames of an allocation
are its operator, and the modules that called it, with the file and the line of their `forward` where these are known.
"""

import pickle
from collections.abc import Sequence
from typing import Any

from lightning_amp.footprint.module_profile import Life
from lightning_amp.footprint.trace.caching_allocator import Block, CachingAllocator
from lightning_amp.footprint.trace.step_trace import StepTrace

Frame = dict[str, Any]
CONFIGURATION = "expandable_segments:True"


def memory_snapshot(trace: StepTrace) -> bytes:
    """Return the steps as a pickled snapshot."""
    events: list[dict[str, Any]] = []
    holders: dict[int, Life] = {}
    known: dict[int, list[Frame]] = {}
    now = 0

    def on_segment(action: str, address: int, size: int) -> None:
        events.append({"action": action, "addr": address, "size": size, "stream": 0, "time_us": now, "frames": []})

    def frames_of(life: Life) -> list[Frame]:
        # shared by the events of a storage, so that the file has them once
        if id(life) not in known:
            known[id(life)] = frames(life, trace)
        return known[id(life)]

    allocator = CachingAllocator(on_segment=on_segment)
    for step, event, block in trace.replayed(allocator):
        now, life = step * len(trace.work) + event.at, event.life
        if event.made:
            holders[block.address] = life
        about = {"addr": block.address, "size": life.n_bytes, "stream": 0, "time_us": now, "frames": frames_of(life)}
        actions = ("alloc",) if event.made else ("free_requested", "free_completed")
        events += [{"action": action, **about} for action in actions]
    segments = [
        _segment(blocks, [None if one.free else holders[one.address] for one in blocks], frames_of)
        for blocks in allocator.segments()
    ]
    settings = {"expandable_segments": True, "PYTORCH_CUDA_ALLOC_CONF": CONFIGURATION}
    return pickle.dumps({"segments": segments, "device_traces": [events], "allocator_settings": settings})


def frames(life: Life, trace: StepTrace) -> list[Frame]:
    """Return the frames of a storage, innermost first: its operator, its modules, and its kind."""
    shape = "x".join(map(str, life.shape))
    phase = trace.work[life.birth][0] if life.birth else "before the step"
    found = [{"filename": phase, "line": life.birth, "name": " ".join(filter(None, [life.name, shape, life.dtype]))}]
    fqn = life.fqn
    while True:
        place = trace.places.get(fqn)
        name = fqn or "(the module itself)"
        if place is None:
            found.append({"filename": "(file not known)", "line": 0, "name": name})
        else:
            found.append({"filename": place.file, "line": place.line, "name": f"{name}: {place.kind}.forward"})
        if not fqn:
            break
        fqn = fqn.rpartition(".")[0]
    return [*found, {"filename": "lightning-amp, predicted", "line": 0, "name": life.kind}]


def _segment(blocks: Sequence[Block], held: Sequence[Life | None], frames_of: Any) -> dict[str, Any]:
    rows = [
        {
            "address": block.address,
            "size": block.size,
            "requested_size": block.size if life is None else life.n_bytes,
            "state": "inactive" if life is None else "active_allocated",
            "frames": [] if life is None else frames_of(life),
        }
        for block, life in zip(blocks, held, strict=True)
    ]
    used = sum(block.size for block in blocks if not block.free)
    return {
        "device": 0,
        "address": blocks[0].address,
        "total_size": sum(block.size for block in blocks),
        "allocated_size": used,
        "active_size": used,
        "requested_size": sum(life.n_bytes for life in held if life is not None),
        "stream": 0,
        "segment_type": "small" if blocks[0].small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": True,
        "frames": [],
        "blocks": rows,
    }
