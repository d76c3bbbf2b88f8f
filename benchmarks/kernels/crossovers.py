"""For which sizes a technique pays on a GPU, as the time model predicts it.

    python -m benchmarks.kernels.crossovers [--write]

Decoders of K 32, D 128 and w = min(640, N / 4) on one device with the memory and the rates of its data sheet
(costs/device_rates.py), in float32 without TF32; kernels are counted as for a device that has them launched.
All legal plans are compared as the policy "auto" does. `--write` puts the tables into docs/reports/gpu.md.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.page import ROOT, paragraph, table, write_part
from benchmarks.side_by_side.cases import Size
from lightning_amp.costs.device_rates import DEVICES, MEMORY_GIB
from lightning_amp.installing.describe_module import describe
from lightning_amp.planning.plan.plan import Candidate
from lightning_amp.planning.policies.auto import TIE, candidates
from lightning_amp.planning.time.model_seconds import on_device
from lightning_amp.simulation.models_without_values import decoder_subject

PAGE = ROOT / "docs" / "reports" / "gpu.md"
ANCHORS = (600, 1000, 2000, 2700, 5400, 10800, 16200, 27000)
CELLS = (8, 64, 256)
STRATA, DIM, WINDOW = 32, 128, 640
TECHNIQUES = ("S4", "fused", "sdpa", "sparse", "stream", "recompute")


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """All plans of a decoder on a device.

    Attributes:
        anchors: N.
        cells: B.
        device: Name in `DEVICES`.
        budget: Memory of the device in bytes.
        plans: The chosen one first.
    """

    anchors: int
    cells: int
    device: str
    budget: int
    plans: tuple[Candidate, ...]

    @property
    def fitting(self) -> list[Candidate]:
        """Those that the device has memory for."""
        return [plan for plan in self.plans if plan.peak_bytes <= self.budget]

    def pays(self, technique: str) -> bool:
        """Whether the best plan with a technique is faster than the best without, or there is none without."""
        seconds = [
            min((p.step_seconds for p in self.fitting if (technique in p.strategies) == used), default=None)
            for used in (True, False)
        ]
        return seconds[0] is not None and (seconds[1] is None or TIE * seconds[0] < seconds[1])


def compare(anchors: int, cells: int, devices: Sequence[str] = tuple(MEMORY_GIB)) -> list[Compared]:
    """One decoder on every device."""
    size = Size(
        anchors=anchors, strata=STRATA, cells=cells, dim=DIM, window=min(WINDOW, anchors // 4)
    ).decoder()
    shape = describe(decoder_subject(size, batch_size=cells).module, batch_size=cells)
    found = []
    for name in devices:
        budget = MEMORY_GIB[name] * 2**30
        of_device = on_device(shape, DEVICES[name])
        plans = candidates(of_device, devices=1, budget=budget, rates=DEVICES[name])
        found.append(Compared(anchors=anchors, cells=cells, device=name, budget=budget, plans=plans))
    return found


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


def first_not_fitting(found: Sequence[Compared]) -> str:
    """From how many anchors on a device has no memory for the eager decoder."""
    too_large = [one.anchors for one in found if not any(set(p.strategies) <= {"S1"} for p in one.fitting)]
    return f"{min(too_large):,}" if too_large else "never"


def lines() -> Iterator[str]:
    """The part of the page."""
    found = [one for anchors in ANCHORS for cells in CELLS for one in compare(anchors, cells)]
    yield from paragraph(
        """Predicted, not run on a GPU: the plan that `auto` takes, and the milliseconds of a training step of
        the decoder alone. "eager" is the decoder as it is."""
    )
    rows = [
        [f"{anchors:,}", str(cells)]
        + [_plan(one) for one in found if (one.anchors, one.cells) == (anchors, cells)]
        for anchors in ANCHORS
        for cells in CELLS
    ]
    yield from table(["N", "B", *MEMORY_GIB], rows)
    yield from paragraph(
        """The numbers of anchors, of those above, for which the best plan with a technique is more than 2 % faster than
        the best one without it, or alone fits; and from how many on the eager decoder does not fit."""
    )
    rows = []
    for device in MEMORY_GIB:
        for cells in CELLS:
            some = [one for one in found if (one.device, one.cells) == (device, cells)]
            rows.append([device, str(cells), *(where(some, t) for t in TECHNIQUES), first_not_fitting(some)])
    yield from table(["device", "B", *TECHNIQUES, "eager does not fit"], rows)


def _plan(one: Compared) -> str:
    chosen = one.plans[0]
    names = " + ".join(name for name in chosen.strategies if name != "S1") or "eager"
    return f"{names}, {1000 * chosen.step_seconds:.3g}" + ("" if one.fitting else " (does not fit)")


def main() -> None:
    """Print the tables, or write them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help=f"write them into {PAGE.relative_to(ROOT)}")
    if parser.parse_args().write:
        write_part(PAGE, "crossovers", lines())
    else:
        print("\n".join(lines()))


if __name__ == "__main__":
    main()
