"""Memory of a training step: what the device gave out beside the memory model (EPM) and the simulated step.

Twelve decoders and plans; the second step is measured, after the optimiser's state and the last step's gradients are
there. On CUDA `max_memory_allocated` above what was given out before the decoder was made, so without the context; on
a CPU the library's own count of tensors.

Known limits: the simulation and the model count tensors; an allocator rounds each to 512 bytes, and kernels may take
scratch memory.
"""

from functools import partial
from statistics import median

import torch

from benchmarks.gpu.device import FLOAT32, Allocated, free_bytes
from benchmarks.gpu.run_parts import Work
from benchmarks.gpu.subject import EAGER, OURS, Subject, plan_of
from benchmarks.side_by_side.cases import Size
from lightning_amp.quantities import format_bytes
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
        if work.clock.left < 0:
            work.record.note(f"{what}: not reached, the time was over.")
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
    if free is not None and plan.predicted_peak_bytes > free:
        predicted = (
            f"{format_bytes(plan.predicted_peak_bytes)} were predicted, and {format_bytes(free)} are free"
        )
        work.record.note(f"{size}, {','.join(strategies)}: not run, {predicted}.")
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
