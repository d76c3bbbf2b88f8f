"""Rank all grids of eight ranks by prediction, and by seconds: two "nodes" of four ranks that a slow link joins.

    sudo python -m benchmarks.tensor3d.ranking [--mbit 200] [--rounds 1] [--only GPT] [--write]

As root: two network namespaces, joined by a pair of virtual links whose rate `tc` limits in both directions, four gloo
ranks of one thread in each; ranks of one namespace are joined by its loopback, whose rate is limited too, to
`WITHIN` times that of the link. Every grid x * y * z * copies of eight ranks but plain data parallelism trains the same
batch, so that ranks of z and copies read fewer rows each. Models are small and their batches wide, so that
communication takes most of a step. Links are measured in the namespaces first, as `lightning-amp calibrate --links`
does.

Two predictions of a step's seconds: the placement-aware one, which the strategy uses (Eq. 1 to 10 of AxoNN), and the
placement-agnostic one, in which any two ranks have the bandwidth of a node. Both add the computation of a rank, by the
rates of one CPU core, as often as ranks share a core. The table has the rank correlation (Spearman) of each with the
measured seconds, and how many of the five grids that it puts first are among the five fastest.
"""

import argparse
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.page import ROOT, origin, paragraph, read_part, table, write_part
from benchmarks.pipeline.shaped_links import BURST, NAMESPACES, linked, refuse_without_root
from benchmarks.tensor3d.models import GPT, MLP
from benchmarks.tensor3d.nodes import on_nodes, step_seconds
from lightning_amp.costs.device_rates import CPU_CORE
from lightning_amp.costs.link_seconds import Links
from lightning_amp.footprint.inner_run import BY_ITSELF
from lightning_amp.lightning.profiling.dry_steps import DrySteps
from lightning_amp.lightning.profiling.step_of_module import StepOfModule
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.quantities import format_bytes, format_seconds
from lightning_amp.simulation.calibrate_links import links_of, measured_between
from lightning_amp.techniques.tensor3d.grid_seconds import factorings, one_bandwidth, sent_seconds
from lightning_amp.techniques.tensor3d.row import TensorParallel3D

PAGE, PART = ROOT / "docs" / "reports" / "tensor3d.md", "tensor3d.ranking"
RANKS, PER_NODE, WITHIN = 8, 4, 8
STEPS, SKIPPED, TOP, AT_ONCE = 8, 2, 5, 7
"""At once: grids that one start of the ranks trains; each leaves threads of its groups behind."""
Grid = tuple[int, int, int, int]
GRIDS: list[Grid] = [
    grid
    for grid in factorings(RANKS)
    # 1 x 2 is 2 x 1: both deals of roles are compared
    if grid[:3] != (1, 1, 1) and not (grid[0] == 1 and grid[1] > 1)
]


class Size(NamedTuple):
    """A model, and the rows of the batch that all ranks train together."""

    make: Any
    batch: Any
    rows: int


SIZES = {
    "GPT": Size(lambda: GPT(384, 8, 2, 512, 64), lambda b: torch.randint(512, (b, 65)), 32),
    "MLP": Size(lambda: MLP(1024, 1024, 256), lambda b: torch.randn(b, 1024), 2048),
}


@dataclass(frozen=True)
class Predicted:
    """Of one rank in one step."""

    compute: float
    aware: float
    agnostic: float
    sent_bytes: float


def rows_of(size: Size, grid: Grid) -> int:
    """Rows of one rank's loader."""
    return size.rows // (grid[2] * grid[3])


def predicted(size: Size, grid: Grid, links: Links, shared: float) -> Predicted:
    """Seconds and bytes of a dry run; `shared` ranks have one core."""
    torch.manual_seed(0)
    module, batch = size.make(), size.batch(rows_of(size, grid))
    spec = TensorParallel3D(grid="x".join(map(str, grid[:3])))
    steps = DrySteps("tensor3d", spec, spec.model_ranks, run_ranks=RANKS, chosen=False)
    seen = StepOfModule(module, lambda: batch, around=BY_ITSELF, steps=steps).profiled(CPU_CORE)
    compute = (seen.seconds - steps.sent_seconds(CPU_CORE.links)) * shared
    messages, sizes = steps.messages(), dict(zip(("x", "y", "z", "data"), grid, strict=True))
    aware, agnostic = (sent_seconds(messages, sizes, one) for one in (links, one_bandwidth(links)))
    return Predicted(compute, compute + aware, compute + agnostic, sum(m.n_bytes for m in messages))


def fit(size: Size, grid: Grid) -> float:
    """Median seconds of a step, on this rank."""
    torch.manual_seed(0)
    module, rows = size.make(), rows_of(size, grid)
    strategy = AMPStrategy(strategies="tensor3d", tensor_grid=(grid[0], grid[1], grid[2]))
    return step_seconds(strategy, module, [size.batch(rows) for _ in range(STEPS)], skipped=SKIPPED)


def on_this_rank(name: str, grids: list[Grid]) -> None:
    """Links, or one fit of each grid; rank 0 prints one line of JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if grids:
        found: Any = {str(grid): fit(SIZES[name], grid) for grid in grids}
    else:
        found = {"links": measured_between(dist.get_rank(), RANKS, torch.device("cpu"))}
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def limit_loopback(mbit: int) -> None:
    """Limit what ranks of one node send to each other."""
    for name in NAMESPACES:
        inside = ["ip", "netns", "exec", name]
        rate = ["rate", f"{mbit}mbit", "burst", str(4 * BURST), "latency", "1s"]
        subprocess.run([*inside, "tc", "qdisc", "add", "dev", "lo", "root", "tbf", *rate], check=True)


def correlation(a: list[float], b: list[float]) -> float:
    """Spearman's: the correlation of ranks."""
    places = [torch.tensor(one, dtype=torch.float64).argsort().argsort().double() for one in (a, b)]
    return float(torch.corrcoef(torch.stack(places))[0, 1])


def lines_of(
    name: str, guessed: dict[Grid, Predicted], rounds: list[dict[str, float]], links: Links
) -> Iterator[str]:
    """The table of a model."""
    seconds = {grid: median(one[str(grid)] for one in rounds) for grid in guessed}
    measured = list(seconds.values())
    fastest = sorted(seconds, key=seconds.__getitem__)
    said = []
    for kind in ("aware", "agnostic"):
        values = {grid: getattr(one, kind) for grid, one in guessed.items()}
        first = sorted(values, key=values.__getitem__)[:TOP]
        both = len({*first} & {*fastest[:TOP]})
        said.append(
            f"placement-{kind}: correlation {correlation(measured, list(values.values())):.2f}, {both} of {TOP}, its"
            f" first grid takes {seconds[first[0]] / seconds[fastest[0]]:.2f} of the fastest one's seconds"
        )
    yield from paragraph(f"{name}, {SIZES[name].rows} rows a step. " + "; ".join(said) + ".")
    rows = []
    for grid in fastest:
        one = guessed[grid]
        rows.append(
            [
                ", ".join(map(str, grid)),
                format_seconds(seconds[grid]),
                format_seconds(one.aware),
                format_seconds(one.agnostic),
                format_seconds(one.compute),
                format_bytes(round(one.sent_bytes)),
            ]
        )
    yield from table(["x, y, z, copies", "measured", "aware", "agnostic", "computation in it", "sent"], rows)


def main() -> None:
    """Run, and print or write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mbit", type=int, default=200, help="rate of the link")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", choices=SIZES, help="one of the models")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/reports/tensor3d.md")
    parser.add_argument("--rank", nargs="*", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    names = [asked.only] if asked.only else list(SIZES)
    if asked.rank is not None:
        on_this_rank(names[0], [GRIDS[int(i)] for i in asked.rank])
        return
    refuse_without_root()
    if asked.write:
        read_part(PAGE, PART)  # a page without markers is refused before anything is measured
    rounds = asked.rounds
    module, shared = "benchmarks.tensor3d.ranking", RANKS / (os.cpu_count() or 1)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    with linked(asked.mbit):
        limit_loopback(asked.mbit * WITHIN)
        messages = on_nodes(module, ["--rank"], RANKS, PER_NODE)["links"]
        links = links_of(CPU_CORE.links, messages).links
        print(links, file=sys.stderr, flush=True)
        for _, name in [(i, name) for i in range(rounds) for name in names]:
            of_round = dict[str, float]()
            for begin in range(0, len(GRIDS), AT_ONCE):
                numbers = map(str, range(begin, min(begin + AT_ONCE, len(GRIDS))))
                of_round |= on_nodes(module, ["--only", name, "--rank", *numbers], RANKS, PER_NODE)
            found[name].append(of_round)
            print(name, json.dumps(of_round), file=sys.stderr, flush=True)
    command = f"python -m {module} --write"
    lines = list(
        paragraph(
            f"""Grids by prediction and by seconds. {origin(command)} Eight gloo ranks of one thread, four in each of
            two network namespaces that a link of {asked.mbit} Mbit/s joins, the loopback of each limited to {WITHIN}
            times that; {links.intra_bandwidth / 1e6:.0f} MB/s
            measured within a node and {links.inter_bandwidth / 1e6:.0f} between, {format_seconds(links.latency)} a
            message. Medians of {STEPS - SKIPPED} steps; rounds: {rounds}."""
        )
    )
    for name in names:
        guessed = {grid: predicted(SIZES[name], grid, links, shared) for grid in GRIDS}
        lines += lines_of(name, guessed, found[name], links)
    if asked.write:
        write_part(PAGE, PART, lines)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
