"""Tables and figures of the AxoNN paper (arXiv 2305.13525) that can be predicted without a GPU, next to its figures.

    python -m benchmarks.tensor3d.paper [--only NAME ...] [--write]

`--write` puts the tables into docs/paper/axonn.md, each as soon as it is made. Nothing is run: one rank's step is
counted on fake tensors (scale.py), seconds follow from the data sheet of an A100 on nodes of four, and no communication
is hidden. Half an hour of a processor.
"""

import argparse
import warnings
from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.models import GPT
from benchmarks.page import ROOT, origin, paragraph, show_parts, table
from benchmarks.tensor3d.scale import (
    A100,
    GPT_HEADER,
    GPTS,
    LENGTH,
    MEMORY,
    UNET_HEADER,
    WORDS,
    Grid,
    exact_of,
    gpt_rows,
    grid_and_copies,
    of_gpt,
    share_of_peak,
    step_of,
    unets,
)
from lightning_amp.costs.device_rates import collective_seconds
from lightning_amp.techniques.tensor3d.grid_seconds import factorings, one_bandwidth

PAGE = ROOT / "docs" / "paper" / "axonn.md"
RUNNING, RUNNING_GPUS, VALIDATED_GPUS = "GPT-20B", 16, 32
"""The running example of Section IV, and the validation of Section V-C."""
EFFICIENT = 5
STRONG = (128, 256, 512, 1024)
GRIDS: dict[str, Grid] = {
    "GPT-5B": (2, 2, 1),
    "GPT-10B": (4, 1, 2),
    "GPT-20B": (4, 1, 8),
    "GPT-40B": (4, 1, 8),
    "GPT-80B": (4, 1, 16),
}
"""The fastest of up to 24 that fit, (docs/reports/tensor3d.md)."""


def sizes() -> Iterator[str]:
    """Table I, in parameters."""
    rows = []
    for name, paper in GPTS.items():
        with torch.device("meta"):
            block, two = (GPT(paper.width, paper.heads, depth, WORDS, LENGTH) for depth in (1, 2))
        one, other = (sum(p.numel() for p in module.parameters()) for module in (block, two))
        rows.append(
            [name, f"{paper.depth}", f"{paper.width:,}", f"{(one + (paper.depth - 1) * (other - one)) / 1e9:.1f}"]
        )
    yield from table(["model", "layers", "width", "10^9 parameters, counted"], rows)


def possible(n: int) -> Iterator[Grid]:
    """Grids whose parameters, gradients and optimiser state leave a tenth of a device, 16 bytes a parameter."""
    for x, y, z, _ in factorings(n):
        if 16 * 20.5e9 / (x * y * z) <= 0.9 * MEMORY:
            yield x, y, z


def hidden() -> Iterator[str]:
    """Figures 3 and 4: what communication there is to hide, on the grid that is fastest."""
    # a batch of 32k tokens: one sequence a device
    found = {grid: of_gpt(RUNNING, grid, grid[0] * grid[1]) for grid in possible(RUNNING_GPUS)}
    grid = min(found, key=lambda g: step_of(found[g], g, RUNNING_GPUS)[0])
    one, (seconds, _) = found[grid], step_of(found[grid], grid, RUNNING_GPUS)
    kinds = {
        "all-reduce of inputs' gradients, behind the weights' gradients": (one.backward, "5 %"),
        "reduce-scatter of gradients, behind the backward pass": (one.scatters, "8 %"),
        "all-gather of parameters, behind the layer before": (one.gathers, "19 %, and 9 % by the cache"),
        "all-reduce of outputs, which is not hidden": (one.forward, "-"),
    }
    rows = [[name, f"{part:.2f} s", f"{part / seconds:.0%}", theirs] for name, (part, theirs) in kinds.items()]
    rows.append(["computing", f"{one.compute:.2f} s", f"{one.compute / seconds:.0%}", "-"])
    yield from paragraph(
        f"{RUNNING} on {RUNNING_GPUS} GPUs, grid {grid_and_copies(grid, RUNNING_GPUS)}, {seconds:.2f} s."
    )
    yield from table(["part of a step", "predicted", "of the step, at most hidden", "the paper gains"], rows)


def validated() -> Iterator[str]:
    """Figure 7: all grids, by the placement-aware and the placement-agnostic model of communication."""
    n, aware, agnostic = VALIDATED_GPUS, dict[Grid, float](), dict[Grid, float]()
    for x, y, z in possible(n):
        grid, copies, average = (x, y, z), n // (x * y * z), {}
        one = of_gpt(RUNNING, grid, 2 * x * y)
        for links in (A100.links, one_bandwidth(A100.links)):
            average[links] = collective_seconds("all_reduce", one.held / 2, copies, links, inner=x * y * z)
        aware[grid] = one.sent_s + average[A100.links]
        agnostic[grid] = one.flat + average[one_bandwidth(A100.links)]
    first, flat = (sorted(model, key=model.__getitem__) for model in (aware, agnostic))
    yield from paragraph(
        f"""{RUNNING} on {n} GPUs, {2 * n} sequences, {len(aware)} grids that hold their parameters. The grid that the
        placement-aware model puts first is number {flat.index(first[0]) + 1} of the placement-agnostic one;
        {len({*first[:EFFICIENT]} & {*flat[:EFFICIENT]})} of the first {EFFICIENT} are the same. In the paper the
        fastest grid is first and twelfth."""
    )
    rows = [
        [grid_and_copies(grid, n), f"{aware[grid]:.3f} s", f"{agnostic[grid]:.3f} s", f"{flat.index(grid) + 1}"]
        for grid in first[:EFFICIENT]
    ]
    yield from table(["grid (copies)", "sending in a step, aware", "agnostic", "place by the agnostic"], rows)


def strong() -> Iterator[str]:
    """Figure 9: the largest GPT, one batch of 2,048 sequences, two at a time on each of more and more devices."""
    name, rows = "GPT-80B", list[list[str]]()
    for n in STRONG:
        for way, grid in (("3D", GRIDS[name]), ("fully sharded", (1, 1, n))):
            seconds, _, found = exact_of(name, n, grid)
            times = STRONG[-1] // n
            rows.append(
                [
                    f"{n:,}",
                    way,
                    grid_and_copies(grid, n),
                    f"{times * seconds:.0f} s",
                    f"{times * found.compute:.0f} s",
                    f"{share_of_peak(name, n, seconds):.0%}",
                    "fits" if found.peak <= MEMORY else "does not fit",
                ]
            )
    yield from table(["devices", "way", "grid (copies)", "a batch", "computing", "of 312 Tflop/s", "40 GiB"], rows)


def weak() -> Iterator[str]:
    """Table III and Figure 11; Figure 10 by its seconds of computing."""
    yield from table(GPT_HEADER, (row for name, grid in GRIDS.items() for row in gpt_rows(name, grid)))


def images() -> Iterator[str]:
    """Figure 12."""
    yield from table(UNET_HEADER, unets())


SECTIONS = {
    "Table I, parameters": sizes,
    "Figures 3 and 4, what can be hidden": hidden,
    "Figure 7, two models of communication": validated,
    "Figure 9, strong scaling": strong,
    "Table III, Figures 10 and 11, weak scaling": weak,
    "Figure 12, U-Nets": images,
}
"""Heading of every part, and its lines."""


def main() -> None:
    """Print or write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), help="some of the tables")
    parser.add_argument("--write", action="store_true", help="put them into docs/paper/axonn.md")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    first = list(paragraph(f"Predicted. {origin('python -m benchmarks.tensor3d.paper --write')}"))

    def lines_of(name: str) -> list[str]:
        return [f"### {name}", "", *first, *SECTIONS[name]()]

    names = asked.only or SECTIONS
    parts = (("", f"tensor3d.paper.{SECTIONS[name].__name__}", partial(lines_of, name)) for name in names)
    show_parts(PAGE, parts, write=asked.write)


if __name__ == "__main__":
    main()
