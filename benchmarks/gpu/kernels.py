"""Kernels of a step by torch's profiler: how many, how long the device waits between them, and the ten longest.

On a CPU there are no kernels; the operators that take longest by themselves are listed, and there are no gaps.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.decoders import Size
from benchmarks.gpu.device import BF16, FLOAT32, Precision, free_bytes, wait
from benchmarks.gpu.runner import SkipPart, Work
from benchmarks.gpu.speed import SPARE
from benchmarks.gpu.subject import EAGER, OURS, Subject, plan_of

LONGEST = 10
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel")
SIZE, TINY = Size(anchors=5400, strata=32, cells=256), Size(anchors=90, strata=3, cells=8, dim=8, window=16)
CASES: tuple[tuple[tuple[str, ...], Precision], ...] = ((OURS, FLOAT32), (EAGER, FLOAT32), (OURS, BF16))


def run(work: Work) -> None:
    """One row for each plan, and a table of its longest kernels."""
    size = TINY if work.tiny else SIZE
    for strategies, precision in CASES:
        name = f"{','.join(strategies)}, {precision.name}"
        free = free_bytes(work.device)
        if not work.has_time(name):
            continue
        plan = plan_of(size.decoder(), strategies, cells=size.cells, device=work.device)
        if not work.has_room(name, plan.predicted_peak_bytes, None if free is None else int(SPARE * free)):
            continue
        subject = Subject(size, plan, device=work.device, precision=precision, sparse=True)
        _measure(work, subject, name, strata=size.strata)


def _measure(work: Work, subject: Subject, name: str, *, strata: int) -> None:
    device = work.device
    subject.step()
    wait(device)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as found:
        subject.step()
        wait(device)
    events = found.events() or []
    if device.type == "cuda":
        rows = _kernel_rows(work, events, name, strata)
    else:
        rows = [(e.key, e.self_cpu_time_total * 1e-6, e.count) for e in found.key_averages()]
        work.record.row(step=name, operators=sum(row[2] for row in rows))
    for kernel, seconds, count in sorted(rows, key=lambda row: -row[1])[:LONGEST]:
        work.record.row(step=name, kernel=kernel[:80], times=count, all_seconds=seconds)


def _kernel_rows(work: Work, events: Iterable[Any], name: str, strata: int) -> list[tuple[str, float, int]]:
    """Name, seconds and number of every kind of kernel; records how many there are and the gaps between them."""
    host: Counter[str] = Counter(e.name for e in events if e.device_type == DeviceType.CPU)
    kernels = [e for e in events if e.device_type == DeviceType.CUDA and not getattr(e, "is_user_annotation", False)]
    seconds, times = Counter[str](), Counter[str]()
    for kernel in kernels:
        seconds[kernel.name] += 1e-6 * (kernel.time_range.end - kernel.time_range.start)
        times[kernel.name] += 1
    if not kernels:
        raise SkipPart("torch's profiler saw no kernels here: it may not read the device's counters")
    spans = sorted((k.time_range.start, k.time_range.end) for k in kernels)
    busy, span = covered(spans), spans[-1][1] - spans[0][0]
    copies = sum(n for kind, n in times.items() if kind.startswith(("Memcpy", "Memset")))
    work.record.row(
        step=name,
        kernels=len(kernels) - copies,
        kernels_per_stratum=(len(kernels) - copies) / strata,
        copies=copies,
        busy_seconds=1e-6 * busy,
        span_seconds=1e-6 * span,
        share_of_gaps=1 - busy / span,
        launches=sum(host[call] for call in LAUNCHES),
        host_waits=sum(host[call] for call in WAITS),
    )
    return [(kind, seconds[kind], times[kind]) for kind in times]


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Time in which at least one of some spans, in the order of their beginnings, runs."""
    total, until = 0.0, float("-inf")
    for start, end in spans:
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
