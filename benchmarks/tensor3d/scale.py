"""Count what a rank holds, sends and takes for the models of Tables I and II of the AxoNN paper, on 64 to 1,024 A100.

    python -m benchmarks.tensor3d.scale gpt [--only GPT-5B]    (about eight minutes)
    python -m benchmarks.tensor3d.scale unet                   (about four minutes)
    python -m benchmarks.tensor3d.scale encoder                (one minute)
    python -m benchmarks.tensor3d.scale --quick                (GPT-5B, fully sharded)

Predictions: nothing is run on a GPU. A rank's step runs on fake tensors on the device "meta", with the layouts that
are found; collectives are those of that run. Seconds follow from the operators and the data sheet of an A100 (40 GiB;
bf16 products, links of nodes of four), no communication hidden. Blocks of a GPT are alike: models of one and of two
blocks are counted, of three and four for the peak, and the difference is taken as often as there are blocks. Bytes
sent are of bf16, bytes held those of mixed precision: 16 a parameter; activations are counted in float32 and so are
twice too large.

A batch has two sequences of 2,048 tokens a device, blocks are recomputed (the paper's batch is lost in our text). Table
III has shares of 312 Tflop/s, by the formula of Narayanan et al.; ours is by the same one.
"""

import argparse
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch

from benchmarks.models import GPT, Net, UNet
from benchmarks.page import table
from benchmarks.tensor3d.models import MLP
from lightning_amp.costs.device_rates import collective_seconds, rates_for
from lightning_amp.errors import AmpError
from lightning_amp.footprint.run.run_settings import BY_ITSELF
from lightning_amp.lightning.profiling.dry_steps import DrySteps
from lightning_amp.lightning.profiling.step_of_module import StepOfModule
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.tensor3d.grid_seconds import one_bandwidth
from lightning_amp.techniques.tensor3d.row import TensorParallel3D

A100 = rates_for("A100", products="tf32").on_nodes_of(4)
# float32 is counted: products of bf16 take half, and so do bytes moved in the device
BF16 = replace(A100, matmul_flops=2 * A100.matmul_flops, memory_bytes=2 * A100.memory_bytes)
LENGTH, WORDS, MEMORY = 2048, 51200, 40 * 2**30
Grid = tuple[int, int, int]


class Paper(NamedTuple):
    """A row of Tables I and III."""

    depth: int
    width: int
    heads: int
    devices: int
    axonn: int
    megatron: int
    zero3: int


GPTS = {
    "GPT-5B": Paper(24, 4096, 32, 64, 67, 37, 55),
    "GPT-10B": Paper(32, 5120, 40, 128, 63, 42, 57),
    "GPT-20B": Paper(32, 7168, 56, 256, 67, 42, 57),
    "GPT-40B": Paper(38, 9216, 72, 512, 64, 44, 55),
    "GPT-80B": Paper(42, 12288, 96, 1024, 57, 42, 27),
}
UNETS = {"250M": (256, 64), "500M": (416, 128), "1B": (512, 256), "2B": (768, 512), "4B": (1024, 1024)}
"""Channels and devices, of Table II."""


@dataclass(frozen=True)
class Counted:
    """Of one rank in one step, without the average over copies of the grid.

    Attributes:
        compute: Seconds of operators.
        gathers, scatters: Seconds of collectives of parameters, and of their gradients.
        forward, backward: Seconds of the others, by pass.
        flat: Seconds of all collectives, were the bandwidth between any two ranks that within a node.
        sent: Bytes that it puts into collectives.
        peak, held: Bytes at its peak, and of parameters.
    """

    compute: float
    gathers: float
    scatters: float
    forward: float
    backward: float
    flat: float
    sent: float
    peak: float
    held: float

    @property
    def sent_s(self) -> float:
        """Seconds of all collectives."""
        return self.gathers + self.scatters + self.forward + self.backward

    def and_more(self, other: "Counted", times: int) -> "Counted":
        """With what another one has more, so many times."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Counted(*(a + times * (b - a) for a, b in pairs))


def counted(make: Callable[[], Net], batch: Callable[[], Any], grid: Grid) -> Counted:
    """One rank of a grid, by a dry run."""
    with torch.device("meta"):
        module, rows = make(), batch()
    ranks = grid[0] * grid[1] * grid[2]
    steps = DrySteps("tensor3d", TensorParallel3D(grid="x".join(map(str, grid))), ranks, chosen=False)
    seen = StepOfModule(module, lambda: rows, run_settings=BY_ITSELF, steps=steps).profiled(BF16)
    profile, by, flat = seen.profile, Counter[str](), one_bandwidth(A100.links)
    inner = {"x": 1, "y": grid[0], "z": grid[0] * grid[1]}
    for one, message in zip(steps.sent, steps.messages(), strict=True):
        kind = "backward" if one.backward else "forward"
        kind = {"all_gather": "gathers", "reduce_scatter": "scatters"}.get(one.kind, kind)
        priced, n_bytes = message.kind, one.n_bytes / 2
        by[kind] += collective_seconds(priced, n_bytes, one.ranks, A100.links, inner=inner[one.axis])
        by["flat"] += collective_seconds(priced, n_bytes, one.ranks, flat)
    own = seen.seconds - steps.sent_seconds(BF16.links)
    sent = sum(one.n_bytes for one in steps.sent) / 2
    seconds = [by[kind] for kind in ("gathers", "scatters", "forward", "backward", "flat")]
    return Counted(own, *seconds, sent, profile.peak_bytes, profile.by_kind["parameters"])


@cache
def of_gpt(name: str, grid: Grid, rows: int, first: int = 1) -> Counted:
    """A whole GPT, from two with `first` blocks and one more; the peak grows evenly from the third block on."""
    paper = GPTS[name]

    def of(depth: int) -> Counted:
        make = lambda: GPT(paper.width, paper.heads, depth, WORDS, LENGTH, recompute=True)  # noqa: E731
        return counted(make, lambda: torch.zeros(rows, LENGTH + 1, dtype=torch.long), grid)

    return of(first).and_more(of(first + 1), paper.depth - first)


def step_of(found: Counted, grid: Grid, devices: int) -> tuple[float, float]:
    """Seconds and bytes sent, with the average over copies of the grid (Eq. 8)."""
    inner = grid[0] * grid[1] * grid[2]
    copies, gradients = devices // inner, found.held / 2
    average = collective_seconds("all_reduce", gradients, copies, A100.links, inner=inner)
    return found.compute + found.sent_s + average, found.sent + (gradients if copies > 1 else 0)


def grids_of(devices: int) -> Iterable[Grid]:
    """A few, by hand: 4 or 8 ranks for features in different shapes, a part of the rest for z."""
    for x, y in ((4, 1), (2, 2), (8, 1)):
        rest = devices // (x * y)
        yield from {(x, y, z): None for z in (rest // 16, 8) if 1 <= z <= rest}


def fastest_of(name: str) -> Grid:
    """Of the grids of a GPT's devices the fastest that fits, else that of the least peak."""
    n, found = GPTS[name].devices, list[tuple[float, Grid]]()
    for grid in grids_of(n):
        try:
            found.append((step_of(of_gpt(name, grid, 2 * grid[0] * grid[1]), grid, n)[0], grid))
        except AmpError as error:
            print(f"{name} {grid}: {error}", file=sys.stderr)
    peaks = dict[int, Grid]()
    for _, grid in sorted(found):
        peak = exact_of(name, n, grid)[2].peak
        if peak <= MEMORY:
            return grid
        peaks[round(peak)] = grid
    return peaks[min(peaks)]


WAYS = ("3D tensor and data", "1D tensor (y) and data", "fully sharded (z)")


def exact_of(name: str, n: int, grid: Grid) -> tuple[float, float, Counted]:
    """Seconds, bytes sent and counts of a GPT on n devices; its peak is counted from the third block on."""
    one = of_gpt(name, grid, 2 * grid[0] * grid[1], first=3)
    return (*step_of(one, grid, n), one)


def share_of_peak(name: str, n: int, seconds: float) -> float:
    """Of 312 Tflop/s, by the formula of Narayanan et al."""
    paper = GPTS[name]
    layers = 96 * 2 * n * LENGTH * paper.depth * paper.width**2
    flops = layers * (1 + LENGTH / (6 * paper.width) + WORDS / (16 * paper.depth * paper.width))
    return flops / n / seconds / 312e12


GPT_HEADER = ["model, devices", "way", "grid x, y, z (copies)", "held and peak of a rank", "sent by a rank", "a step"]
GPT_HEADER += ["computing", "of 312 Tflop/s", "the paper"]


def gpt_rows(name: str, grid_3d: Grid | None) -> Iterator[list[str]]:
    """A row for each way to split one GPT; without a grid for the fully sharded one alone."""
    paper, n = GPTS[name], GPTS[name].devices
    grids = (grid_3d, (1, 8, 1), (1, 1, n))
    theirs = (f"AxoNN {paper.axonn} %", f"Megatron-LM {paper.megatron} %, with a pipeline", f"ZeRO-3 {paper.zero3} %")
    for way, grid, measured in list(zip(WAYS, grids, theirs, strict=True))[0 if grid_3d else 2 :]:
        assert grid is not None, "the first way is left out"
        seconds, sent, found = exact_of(name, n, grid)
        yield [
            f"{name}, {n:,}",
            way,
            grid_and_copies(grid, n),
            f"{format_bytes(round(4 * found.held))}, {format_bytes(round(found.peak))}"
            + (" (does not fit)" if found.peak > MEMORY else ""),
            format_bytes(round(sent)),
            f"{seconds:.2f} s",
            f"{found.compute:.2f} s",
            f"{share_of_peak(name, n, seconds):.0%}",
            measured,
        ]


def grid_and_copies(grid: Grid, n: int) -> str:
    """As in the tables."""
    return f"{grid[0]}, {grid[1]}, {grid[2]} ({n // (grid[0] * grid[1] * grid[2])})"


UNET_HEADER = [
    "U-Net, devices",
    "parameters",
    "grid x, y, z (copies)",
    "held and peak of a rank",
    "sent by a rank",
    "a step",
]


def unets() -> Iterator[list[str]]:
    """Table II; the layers of the paper's nets are not in our text."""
    for name, (channels, n) in UNETS.items():
        make = lambda c=channels: UNet(c, levels=4, blocks=3, groups=32)  # noqa: E731
        with torch.device("meta"):
            size = sum(p.numel() for p in make().parameters())
        for grid in ((4, 1, n // 16), (1, 1, n)):
            rows, begin = 2 * grid[0] * grid[1], [f"{name}, {n:,}", f"{size / 1e6:,.0f} million"]
            try:
                found = counted(make, lambda b=rows: torch.zeros(b, 6, 64, 64), grid)
            except AmpError as error:
                yield [*begin, grid_and_copies(grid, n), f"refused: {str(error)[-160:]}", "", ""]
                continue
            seconds, sent = step_of(found, grid, n)
            yield [
                *begin,
                grid_and_copies(grid, n),
                f"{format_bytes(round(4 * found.held))}, {format_bytes(round(found.peak))}",
                format_bytes(round(sent)),
                f"{seconds:.2f} s",
            ]


class Fused(MLP):
    """Whose optimizer has no temporary tensors of a parameter's size."""

    def configure_optimizers(self) -> Any:
        """Adam in one kernel."""
        return torch.optim.Adam(self.parameters(), 1e-3, fused=True)


ENCODER_HEADER = ["grid x, y, z", "Adam", "parameters", "held and peak of a rank", "sent by a rank"]


def encoder() -> Iterator[list[str]]:
    """20 million features into 512, on 8 devices."""
    features, grids = 20_000_000, ((8, 1, 1), (4, 2, 1), (4, 1, 2), (1, 1, 8), (1, 8, 1))
    for kind, grid in ((kind, grid) for kind in (Fused, MLP) for grid in grids):
        make = lambda kind=kind: kind(features, 512, 64)  # noqa: E731
        found = counted(make, lambda b=grid[0] * grid[1]: torch.zeros(b, features), grid)
        yield [
            ", ".join(map(str, grid)),
            "fused" if kind is Fused else "plain",
            format_bytes(4 * (features + 512 * 3) * 512),
            f"{format_bytes(round(4 * found.held))}, {format_bytes(round(found.peak))}",
            format_bytes(round(2 * found.sent)),
        ]


def main() -> None:
    """Count, and print a table, row by row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("gpt", "unet", "encoder"), default="gpt")
    parser.add_argument("--only", default="", help="part of the names of GPTs")
    parser.add_argument("--quick", action="store_true", help="GPT-5B, fully sharded")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    names = [name for name in GPTS if asked.only in name]
    gpts = (row for name in names for row in gpt_rows(name, fastest_of(name)))
    tables = {"gpt": (GPT_HEADER, gpts), "unet": (UNET_HEADER, unets()), "encoder": (ENCODER_HEADER, encoder())}
    header, rows = (GPT_HEADER, gpt_rows("GPT-5B", None)) if asked.quick else tables[asked.what]
    for line in table(header, rows):
        print(line, flush=True)


if __name__ == "__main__":
    main()
