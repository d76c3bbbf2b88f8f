"""For which sizes a technique pays on a GPU, as the time model predicts it.

    python -m benchmarks.kernels.crossovers [--quick] [--write]

Decoders of K 32, D 128 and w = min(640, N / 4) on one device with the memory and the rates of its data sheet
(costs/device_rates.py), in float32 without TF32; kernels are counted as for a device that has them launched. All legal
plans are compared as the policy "auto" does. `--write` puts the tables into docs/reports/gpu.md. Three minutes, with
--quick (three numbers of anchors, 8 cells) ten seconds.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.decoders import Size
from benchmarks.page import ROOT, origin, paragraph, read_part, table, write_part
from lightning_amp.costs.device_rates import DEVICES, MEMORY_GIB
from lightning_amp.costs.profiled_step import TIE
from lightning_amp.installing.describe_module import describe
from lightning_amp.planning.plan.plan import Candidate
from lightning_amp.planning.policies.auto import candidates
from lightning_amp.planning.time.step_seconds import on_device
from lightning_amp.simulation.models_without_values import decoder_subject

PAGE, PART = ROOT / "docs" / "reports" / "gpu.md", "kernels.crossovers"
ANCHORS, CELLS = (600, 1000, 2000, 2700, 5400, 10800, 16200, 27000), (8, 64, 256)
STRATA, DIM, WINDOW = 32, 128, 640
TECHNIQUES = ("S4", "fused", "sdpa", "sparse", "stream", "recompute")


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """All plans of a decoder with so many anchors and cells on a device; the chosen one first."""

    anchors: int
    cells: int
    device: str
    plans: tuple[Candidate, ...]

    @property
    def fitting(self) -> list[Candidate]:
        """Those that the device has memory for."""
        return [plan for plan in self.plans if plan.peak_bytes <= MEMORY_GIB[self.device] * 2**30]

    def pays(self, technique: str) -> bool:
        """Whether the best plan with a technique is faster than the best without, or there is none without."""
        best = [
            min((p.step_seconds for p in self.fitting if (technique in p.strategies) == used), default=None)
            for used in (True, False)
        ]
        return best[0] is not None and (best[1] is None or TIE * best[0] < best[1])

    def __str__(self) -> str:
        names = " + ".join(name for name in self.plans[0].strategies if name != "S1") or "eager"
        unfit = "" if self.fitting else " (does not fit)"
        return f"{names}, {1000 * self.plans[0].step_seconds:.3g}{unfit}"


def compare(anchors: int, cells: int) -> Iterator[Compared]:
    """One decoder on every device."""
    size = Size(anchors=anchors, strata=STRATA, cells=cells, dim=DIM, window=min(WINDOW, anchors // 4)).decoder()
    shape = describe(decoder_subject(size, batch_size=cells).module, batch_size=cells)
    for name, gib in MEMORY_GIB.items():
        rates = DEVICES[name]
        plans = candidates(on_device(shape, rates), devices=1, budget=gib * 2**30, rates=rates)
        yield Compared(anchors=anchors, cells=cells, device=name, plans=tuple(plans))


def where(found: Sequence[Compared], technique: str) -> str:
    """The numbers of anchors for which a technique pays, as runs of those compared; "nowhere" without any."""
    runs: list[list[int]] = [[]]
    for one in sorted(found, key=lambda one: one.anchors):
        if one.pays(technique):
            runs[-1].append(one.anchors)
        elif runs[-1]:
            runs.append([])
    words = [f"{run[0]:,}" + (f" to {run[-1]:,}" if len(run) > 1 else "") for run in runs if run]
    return ", ".join(words) or "nowhere"


def lines(anchors: Sequence[int], cells: Sequence[int]) -> Iterator[str]:
    """The part of the page."""
    found = [one for n in anchors for b in cells for one in compare(n, b)]
    yield from paragraph(
        f"""{origin("python -m benchmarks.kernels.crossovers --write")} Predicted, not run on a GPU: the plan that
        `auto` takes, and the milliseconds of a training step of the decoder alone. "eager" is the decoder as it is."""
    )
    rows = [
        [f"{n:,}", str(b), *(str(one) for one in found if (one.anchors, one.cells) == (n, b))]
        for n in anchors
        for b in cells
    ]
    yield from table(["N", "B", *MEMORY_GIB], rows)
    yield from paragraph(
        """The numbers of anchors, of those above, for which the best plan with a technique is more than 2 % faster than
        the best one without it, or alone fits; and from how many on the eager decoder does not fit."""
    )
    rows = []
    for device in MEMORY_GIB:
        for b in cells:
            some = [one for one in found if (one.device, one.cells) == (device, b)]
            unfit = [one.anchors for one in some if not any(set(p.strategies) <= {"S1"} for p in one.fitting)]
            last = f"{min(unfit):,}" if unfit else "never"
            rows.append([device, str(b), *(where(some, technique) for technique in TECHNIQUES), last])
    yield from table(["device", "B", *TECHNIQUES, "eager does not fit"], rows)


def main() -> None:
    """Print the tables, or write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="three numbers of anchors, 8 cells")
    parser.add_argument("--write", action="store_true", help=f"write them into {PAGE.relative_to(ROOT)}")
    asked = parser.parse_args()
    if asked.write:
        read_part(PAGE, PART)  # a page without markers is refused before anything is counted
    found = list(lines(ANCHORS[::3], CELLS[:1]) if asked.quick else lines(ANCHORS, CELLS))
    if asked.write:
        write_part(PAGE, PART, found)
    print("\n".join(found))


if __name__ == "__main__":
    main()
