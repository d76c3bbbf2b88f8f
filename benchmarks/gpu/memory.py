"""Memory of a training step: what the device gave out against the memory model (EPM) and the simulated step.

Twelve decoders and plans; the second step is measured, after the optimiser's state and the last step's gradients are
there. On CUDA `max_memory_allocated` above what was given out before the decoder was made, so without the context; on
a CPU the library's own count of tensors.

Known limits: the simulation and the model count tensors; an allocator rounds each to 512 bytes, and kernels may take
scratch memory. `at_peak` lists what is allocated at the peak, by the line of the library that asked for it:

    allocator   torch's peak, above what was allocated before the decoder was made
    tensors     the meter's count of tensors in the same step on the device
    simulated   the count on fake tensors

Where `tensors` is the simulated count, what is above it is memory that kernels take for themselves, and rounding.
"""

from collections import Counter
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks.decoders import Size
from benchmarks.gpu.device import FLOAT32, Allocated, free_bytes, wait
from benchmarks.gpu.runner import SkipPart, Work
from benchmarks.gpu.subject import EAGER, OURS, Subject, plan_of
from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.simulation.models_without_values import decoder_subject
from lightning_amp.simulation.simulate import simulate

Case = tuple[Size, tuple[str, ...]]
GOAL = 0.10
"""How far measured and predicted may be apart."""
LARGE, SMALL = {"strata": 32, "dim": 128}, {"strata": 10, "dim": 64}
CASES: tuple[Case, ...] = (
    (Size(anchors=5400, cells=64, **LARGE), OURS),
    (Size(anchors=113_505, cells=1, **LARGE), OURS),
    (Size(anchors=5400, cells=64, **LARGE), EAGER),
    (Size(anchors=27_000, cells=128, **LARGE), OURS),
    (Size(anchors=5400, cells=256, **LARGE), OURS),
    (Size(anchors=5400, cells=64, **SMALL), ("S1", "S3", "S4")),
    (Size(anchors=5400, cells=64, **SMALL), ("S1", "recompute")),
    (Size(anchors=27_000, cells=64, **SMALL), ("S1", "S3", "S4")),
    (Size(anchors=27_000, cells=64, **SMALL), ("S1", "fused", "sparse")),
    (Size(anchors=27_000, cells=64, **SMALL), ("S1", "S4", "fused", "sparse", "recompute")),
    (Size(anchors=113_505, cells=1, **SMALL), ("S1", "S4", "fused")),
    (Size(anchors=27_000, cells=64, **SMALL), ("S1", "sdpa", "sparse")),
    (Size(anchors=5400, cells=256, **LARGE), ("S1", "S4", "sdpa", "sparse", "stream")),
    (Size(anchors=113_505, cells=1, **SMALL), EAGER),
)
WHICH = (0, 6, 9, 12)
"""Of memory's cases: those that were furthest from the prediction."""
LINES, FRAMES = 14, 3
"""Rows for each case, and frames of the library's own for each."""


def tiny(case: Case) -> Case:
    """The same plan for few anchors."""
    size, strategies = case
    anchors = 60 + size.anchors // 1000
    return Size(anchors=anchors, strata=3, cells=min(size.cells, 4), dim=8, window=16), strategies


def run(work: Work) -> None:
    """A row for each case, as far as the time and the device's memory go."""
    for case in CASES:
        size, strategies = tiny(case) if work.tiny else case
        what = f"{size}, D {size.dim}, {','.join(strategies)}"
        if not work.has_time(what, 0.0):
            continue
        try:
            _measure(work, size, strategies)
        except torch.OutOfMemoryError as error:
            work.record.note(f"{what}: {str(error).splitlines()[0]}")
    rows = work.record.entry["rows"]
    off = [max(abs(row["epm_ratio"] - 1), abs(row["simulated_ratio"] - 1)) for row in rows]
    if off:
        work.record.fact(
            shapes=len(rows),
            within_goal=sum(x <= GOAL for x in off),
            goal=f"measured within {GOAL:.0%} of both",
            median_epm_ratio=median(row["epm_ratio"] for row in rows),
            median_simulated_ratio=median(row["simulated_ratio"] for row in rows),
        )


def _measure(work: Work, size: Size, strategies: tuple[str, ...]) -> None:
    device, free = work.device, free_bytes(work.device)
    # dense counts, as the memory model has them
    plan = plan_of(size.decoder(), strategies, cells=size.cells, device=device, sparse=False)
    if not work.has_room(f"{size}, {','.join(strategies)}", plan.predicted_peak_bytes, free):
        return
    allocated = Allocated(device)
    subject = Subject(size, plan, device=device, precision=FLOAT32, sparse=False)
    subject.step()
    measured = allocated.peak_of(subject.step, subject.held)
    reserved = torch.cuda.memory_reserved(device) if device.type == "cuda" else None
    del subject
    make = partial(decoder_subject, size.decoder(), batch_size=size.cells)
    simulated = simulate(make, plan, rank=0, device_type=device.type)
    work.record.row(
        size=str(size),
        D=size.dim,
        strategies=",".join(strategies),
        measured_bytes=measured,
        epm_bytes=plan.predicted_peak_bytes,
        simulated_bytes=simulated.peak_bytes,
        reserved_bytes=reserved,
        epm_ratio=measured / plan.predicted_peak_bytes,
        simulated_ratio=measured / simulated.peak_bytes,
    )


def at_peak(work: Work) -> None:
    """Two kinds of rows: the three counts of each case, and the largest parts of the allocator's peak."""
    if work.device.type != "cuda":
        raise SkipPart("torch keeps a history of allocations on CUDA only")
    for index in WHICH:
        size, strategies = tiny(CASES[index]) if work.tiny else CASES[index]
        what = f"{size}, D {size.dim}, {','.join(strategies)}"
        plan = plan_of(size.decoder(), strategies, cells=size.cells, device=work.device, sparse=False)
        allocated = Allocated(work.device)
        subject = Subject(size, plan, device=work.device, precision=FLOAT32, sparse=False)
        subject.step()
        with LiveBytes() as meter:
            meter.watch(subject.held)
            subject.step()
        wait(work.device)
        before = torch.cuda.memory_allocated(work.device)
        torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=400_000)
        peak = allocated.peak_of(subject.step, subject.held)
        (trace,) = (t for t in torch.cuda.memory._snapshot()["device_traces"] if t)
        torch.cuda.memory._record_memory_history(enabled=None)
        simulated = simulate(
            partial(decoder_subject, size.decoder(), batch_size=size.cells), plan, rank=0, device_type="cuda"
        )
        work.record.row(
            case=what,
            allocator_bytes=peak,
            tensors_bytes=meter.peak,
            simulated_bytes=simulated.peak_bytes,
            before_bytes=before,
        )
        for (where, one), times in _largest(trace):
            work.record.row(case=what, total_bytes=one * times, each_bytes=one, times=times, where=where)
        del subject


def _largest(trace: list[dict[str, Any]]) -> list[tuple[tuple[str, int], int]]:
    """Allocations of the trace that live when its sum is largest: line and bytes, how often."""
    sums = [0]
    for event in trace:
        sign = {"alloc": 1, "free_completed": -1}.get(event["action"], 0)
        sums.append(sums[-1] + sign * event["size"])
    alive: dict[int, tuple[str, int]] = {}
    for event in trace[: sums.index(max(sums))]:
        if event["action"] == "alloc":
            alive[event["addr"]] = _where(event.get("frames", [])), event["size"]
        elif event["action"] == "free_completed":
            alive.pop(event["addr"], None)
    found = Counter(alive.values())
    return sorted(found.items(), key=lambda one: -one[0][1] * one[1])[:LINES]


def _where(frames: list[dict[str, Any]]) -> str:
    own = [f for f in frames if "lightning_amp" in f["filename"] or "benchmarks" in f["filename"]]
    named = (f"{f['filename'].rpartition('/')[2]}:{f['line']} {f['name']}" for f in own[:FRAMES])
    return " < ".join(named) or (frames[0]["name"] if frames else "the backward pass, or no frame")
