"""What is allocated at the peak of a decoder's step on CUDA, by the line of the library that asked for it.

allocator   torch's peak, above what was allocated before the decoder was made
tensors     the meter's count of tensors in the same step on the device
simulated   the count on fake tensors

Where `tensors` is the simulated count, what is above it is memory that kernels take for themselves, and rounding.
"""

from collections import Counter
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.device import FLOAT32, Allocated, wait
from benchmarks.gpu.memory import CASES, tiny
from benchmarks.gpu.record import SkipPart
from benchmarks.gpu.run_parts import Work
from benchmarks.gpu.subject import Subject, plan_of
from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.simulation.models_without_values import decoder_subject
from lightning_amp.simulation.simulate import simulate

WHICH = (0, 6, 9, 12)
"""Of memory's cases: those that were furthest from the prediction."""
LINES, FRAMES = 14, 3
"""Rows for each case, and frames of the library's own for each."""


def run(work: Work) -> None:
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
