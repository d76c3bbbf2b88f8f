"""The decoder side by side with what people use today: memory, time, bytes communicated, and whether all are the same.

    python -m benchmarks.side_by_side [--quick] [--rounds 2]

Prints three tables. Measured are the eager decoder with the attention of the `local-attention` package, HiGLUE's own
answers, S3 with S4 and ours on one device with two threads; DDP, FSDP2, the paper's S1 to S5 and ours on two ranks with
one thread each. Simulated are peaks and bytes sent on more ranks. A case is run in new processes, one after the other
in rounds; medians of the slowest rank count. The exit status is 1 where a case that should be exact is not.

    step      forward pass, backward pass and reduction of gradients
    memory    the kernel's high-water mark above the start, when the decoder, the latents and the batch are there and a
              miniature of them has trained a step; gradients and the optimiser's state come after that. Linux only
    off by    the larger relative difference, from the eager decoder in float32, of the first step's loss and of its
              gradient of the anchors' latents along one random direction
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from benchmarks.page import origin, paragraph, table
from benchmarks.side_by_side.cases import (
    CHECKPOINT,
    DDP,
    EAGER,
    FSDP,
    FSDP_CHECKPOINT,
    OURS_ALONE,
    OURS_NODES,
    OURS_STRATA,
    PAPER_ALONE,
    PAPER_RANKS,
    SUBSAMPLE,
    Case,
    Method,
    Size,
    plan_of,
)
from benchmarks.side_by_side.measure import Measured, measure_all
from lightning_amp.quantities import format_bytes
from lightning_amp.simulation.models_without_values import decoder_subject
from lightning_amp.simulation.simulate import simulate

SIZE, QUICK = Size(anchors=5_400, strata=32, cells=8), Size(anchors=1_350, strata=9, cells=8)
LARGE, QUICK_LARGE = Size(anchors=27_000, strata=10, cells=8), Size(anchors=2_700, strata=8, cells=8)
"""What is measured, and what is simulated."""
ALONE = (EAGER, CHECKPOINT, SUBSAMPLE, PAPER_ALONE, OURS_ALONE)
TWO_RANKS = (DDP, FSDP, FSDP_CHECKPOINT, PAPER_RANKS, OURS_STRATA, OURS_NODES)
SPLIT, RANKS = (PAPER_RANKS, OURS_STRATA, OURS_NODES), (2, 4, 8)
WRONG_FROM = 1e-4
"""Relative difference from the eager decoder, in float32, from which a row that should be exact is wrong."""


Found = Mapping[Case, Measured | str]
"""By case; of one that failed, what it said."""


def cases(size: Size) -> list[Case]:
    """All that is measured."""
    # the decoder of a part is a smaller one with the same buckets
    parts = {m: replace(size, anchors=int(size.anchors * m.part), window=size.decoder().window) for m in ALONE}
    alone = [Case(size=parts[m] if m.part < 1 else size, method=m) for m in ALONE]
    alone += [Case(size=size, method=m, threads=1) for m in (EAGER, OURS_ALONE)]
    return [*alone, *(Case(size=size, method=m, ranks=2, threads=1) for m in TWO_RANKS)]


def off_by(found: Found, case: Case) -> float | None:
    """How far a case is from the eager decoder; None where one of them is not there, or it computes something else."""
    eager, own = found.get(Case(size=case.size, method=EAGER)), found.get(case)
    if not isinstance(eager, Measured) or not isinstance(own, Measured) or case.method.part < 1:
        return None
    differences = abs(own.loss - eager.loss) / abs(eager.loss), abs(own.along - eager.along) / eager.norm
    # what is not a number is the largest
    return max(differences, key=lambda by: (by != by, by))


def wrong(found: Found) -> list[str]:
    """Methods that should be exact and are not; what is not a number is wrong too."""
    off = {case: off_by(found, case) for case in found}
    return [case.method.name for case, by in off.items() if by is not None and not by <= WRONG_FROM]


def measured_tables(found: Found) -> Iterator[str]:
    """On one device and on two ranks."""
    for title, of in (("One device, two threads", 2), ("One thread a rank", 1)):
        own = {case: one for case, one in found.items() if case.threads == of}
        eager = found[next(case for case in own if case.method == EAGER)]
        yield from (f"## {title}", "")
        header = ["method", "ranks", "memory of a rank", "of eager", "step", "times as fast", "sent", "off by"]
        yield from table(header, [[case.method.name, *_cells(found, case, eager)] for case in own])


def _cells(found: Found, case: Case, eager: Measured | str) -> list[str]:
    one, off = found[case], off_by(found, case)
    if isinstance(one, str):
        return [f"{case.ranks}", f"failed: {one}", "", "", "", "", ""]
    ratios = ["", ""]
    if isinstance(eager, Measured):
        ratios = [f"1/{eager.peak_bytes / one.peak_bytes:.1f}", f"{eager.seconds / one.seconds:.2f}"]
    return [
        f"{case.ranks}",
        format_bytes(one.peak_bytes),
        ratios[0],
        f"{one.seconds:.2f} s",
        ratios[1],
        format_bytes(one.sent_bytes) if case.ranks > 1 else "",
        "not exact" if case.method.part < 1 else "" if off is None else f"{off:.0e}",
    ]


def simulated(case: Case) -> tuple[int, int]:
    """Most bytes of a rank, and most that one hands to collectives: of the first, a middle and the last rank."""
    make = partial(decoder_subject, case.size.decoder(), batch_size=case.size.cells)
    ranks = sorted({0, case.ranks // 2, case.ranks - 1})
    results = [simulate(make, plan_of(case), rank=rank) for rank in ranks]
    return max(one.peak_bytes for one in results), max(sum(one.comm_bytes.values()) for one in results)


def simulated_table(size: Size, *, methods: Sequence[Method], ranks: Sequence[int]) -> Iterator[str]:
    """Peaks on one device, and of ranks."""
    wanted = [Case(size=size, method=m) for m in (EAGER, CHECKPOINT, PAPER_ALONE, OURS_ALONE)]
    wanted += [Case(size=size, method=m, ranks=n) for m in methods for n in ranks]
    rows = [[case.method.name, f"{case.ranks}", *map(format_bytes, simulated(case))] for case in wanted]
    yield from (f"## Simulated, {size}", "")
    yield from table(["method", "ranks", "peak of a rank", "sent"], rows)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, one round")
    parser.add_argument("--rounds", type=int, default=2)
    asked = parser.parse_args()
    size, large = (QUICK, QUICK_LARGE) if asked.quick else (SIZE, LARGE)
    print("\n".join(paragraph(f"{origin('python -m benchmarks.side_by_side')} Measured: {size}.")))
    found = measure_all(cases(size), rounds=1 if asked.quick else asked.rounds)
    print("\n".join(measured_tables(found)), flush=True)
    print("\n".join(simulated_table(large, methods=SPLIT, ranks=RANKS[:2] if asked.quick else RANKS)))
    if names := wrong(found):
        sys.exit(f"these should be exact and are not: {', '.join(names)}")


if __name__ == "__main__":
    main()
