"""Rank all grids of eight ranks by prediction, and by seconds: two "nodes" of four ranks that a slow link joins.

    sudo python -m benchmarks.tensor3d.ranking [--mbit 200] [--rounds 1] [--only GPT] [--quick] [--write]

As root: two network namespaces with a link of limited rate (benchmarks/nodes.py), four gloo ranks of one thread in
each; ranks of one namespace are joined by its loopback, whose rate is limited too, to `WITHIN` times that of the link.
Every grid x * y * z * copies of eight ranks but plain data parallelism trains the same batch, so that ranks of z and
copies read fewer rows each. Models are small and their batches wide, so that communication takes most of a step. Links
are measured in the namespaces first, as `lightning-amp calibrate --links` does.

Two predictions of a step's seconds: the placement-aware one, which the strategy uses (Eq. 1 to 10 of AxoNN), and the
placement-agnostic one, in which any two ranks have the bandwidth of a node. Both add the computation of a rank, by the
rates of one CPU core, as often as ranks share a core. The table has the rank correlation (Spearman) of each with the
measured seconds, and how many of the five grids that it puts first are among the five fastest. `--write` puts it into
docs/reports/tensor3d.md. About 15 minutes; with --quick (two ranks, two grids, a small MLP) one minute.
"""

import argparse
import json
import os
import warnings
from collections.abc import Iterator
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.models import GPT
from benchmarks.nodes import linked, on_nodes, step_seconds
from benchmarks.page import ROOT, origin, paragraph, read_part, table, write_part
from benchmarks.tensor3d.models import MLP
from lightning_amp import AMPStrategy
from lightning_amp.costs.device_rates import CPU_CORE, Links
from lightning_amp.footprint.run.run_settings import BY_ITSELF
from lightning_amp.lightning.profiling.dry_steps import DrySteps
from lightning_amp.lightning.profiling.step_of_module import StepOfModule
from lightning_amp.quantities import format_bytes, format_seconds
from lightning_amp.simulation.calibrate_links import links_of, measured_between
from lightning_amp.techniques.tensor3d.grid_seconds import factorings, one_bandwidth, sent_seconds
from lightning_amp.techniques.tensor3d.row import TensorParallel3D

PAGE, PART, NAME = ROOT / "docs" / "reports" / "tensor3d.md", "tensor3d.ranking", "benchmarks.tensor3d.ranking"
RANKS, QUICK_RANKS, WITHIN = 8, 2, 8
STEPS, SKIPPED, TOP, AT_ONCE = 8, 2, 5, 7
"""At once: grids that one start of the ranks trains; each leaves threads of its groups behind."""
Grid = tuple[int, int, int, int]


class Size(NamedTuple):
    """A model, and the rows of the batch that all ranks train together."""

    make: Any
    batch: Any
    rows: int


SIZES = {
    "GPT": Size(lambda: GPT(384, 8, 2, 512, 64), lambda b: torch.randint(512, (b, 65)), 32),
    "MLP": Size(lambda: MLP(1024, 1024, 256), lambda b: torch.randn(b, 1024), 2048),
    "small MLP": Size(lambda: MLP(256, 256, 64), lambda b: torch.randn(b, 256), 512),
}


class Predicted(NamedTuple):
    """Of one rank in one step: seconds and bytes."""

    compute: float
    aware: float
    agnostic: float
    sent_bytes: float


def grids_of(ranks: int) -> list[Grid]:
    """All but plain data parallelism; 1 x 2 is 2 x 1, for both deals of roles are compared."""
    every = factorings(ranks)
    return [grid for grid in every if grid[:3] != (1, 1, 1) and not (grid[0] == 1 and grid[1] > 1)]


def predicted(size: Size, grid: Grid, ranks: int, links: Links) -> Predicted:
    """Seconds and bytes of a dry run, where ranks share the cores of this machine."""
    torch.manual_seed(0)
    module, batch = size.make(), size.batch(size.rows // (grid[2] * grid[3]))
    spec = TensorParallel3D(grid="x".join(map(str, grid[:3])))
    steps = DrySteps("tensor3d", spec, spec.model_ranks, run_ranks=ranks, chosen=False)
    seen = StepOfModule(module, lambda: batch, run_settings=BY_ITSELF, steps=steps).profiled(CPU_CORE)
    compute = (seen.seconds - steps.sent_seconds(CPU_CORE.links)) * max(1.0, ranks / (os.cpu_count() or 1))
    messages, sizes = steps.messages(), dict(zip(("x", "y", "z", "data"), grid, strict=True))
    aware, agnostic = (sent_seconds(messages, sizes, one) for one in (links, one_bandwidth(links)))
    return Predicted(compute, compute + aware, compute + agnostic, sum(m.n_bytes for m in messages))


def on_this_rank(name: str, numbers: list[int]) -> None:
    """Links, or one fit of each grid; rank 0 prints one line of JSON."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks, size, found = dist.get_world_size(), SIZES[name], dict[str, Any]()
    if not numbers:
        found["links"] = measured_between(dist.get_rank(), ranks, torch.device("cpu"))
    for grid in (grids_of(ranks)[i] for i in numbers):
        torch.manual_seed(0)
        module, rows = size.make(), size.rows // (grid[2] * grid[3])
        strategy = AMPStrategy(strategies="tensor3d", tensor_grid=grid[:3])
        found[str(grid)] = step_seconds(strategy, module, [size.batch(rows) for _ in range(STEPS)], skipped=SKIPPED)
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def correlation(a: list[float], b: list[float]) -> float:
    """Spearman's: the correlation of ranks."""
    places = [torch.tensor(one, dtype=torch.float64).argsort().argsort().double() for one in (a, b)]
    return float(torch.corrcoef(torch.stack(places))[0, 1])


def lines_of(name: str, guessed: dict[Grid, Predicted], rounds: list[dict[str, float]]) -> Iterator[str]:
    """The table of a model."""
    seconds = {grid: median(one[str(grid)] for one in rounds) for grid in guessed}
    fastest, said = sorted(seconds, key=seconds.__getitem__), list[str]()
    for kind in ("aware", "agnostic"):
        values = {grid: float(getattr(one, kind)) for grid, one in guessed.items()}
        first = sorted(values, key=values.__getitem__)[:TOP]
        related = correlation([*seconds.values()], [*values.values()])
        said.append(
            f"placement-{kind}: correlation {related:.2f}, {len({*first} & {*fastest[:TOP]})} of {len(first)}, its"
            f" first grid takes {seconds[first[0]] / seconds[fastest[0]]:.2f} of the fastest one's seconds"
        )
    yield from paragraph(f"{name}, {SIZES[name].rows} rows a step. " + "; ".join(said) + ".")
    rows = [
        [
            ", ".join(map(str, grid)),
            *map(format_seconds, (seconds[grid], one.aware, one.agnostic, one.compute)),
            format_bytes(round(one.sent_bytes)),
        ]
        for grid, one in ((grid, guessed[grid]) for grid in fastest)
    ]
    yield from table(["x, y, z, copies", "measured", "aware", "agnostic", "computation in it", "sent"], rows)


def main() -> None:
    """Run, and print or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=int, default=200, help="rate of the link")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--only", choices=list(SIZES), help="one of the models")
    parser.add_argument("--quick", action="store_true", help="two ranks, their two grids, a small MLP")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/reports/tensor3d.md")
    parser.add_argument("--rank", nargs="*", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    names, ranks = ([asked.only] if asked.only else ["GPT", "MLP"]), RANKS
    if asked.quick:
        names, ranks = ["small MLP"], QUICK_RANKS
    if asked.rank is not None:
        on_this_rank(names[0], asked.rank)
        return
    if asked.write:
        read_part(PAGE, PART)  # a page without markers is refused before anything is measured
    grids, found = grids_of(ranks), dict[str, list[dict[str, float]]]()
    with linked(asked.mbit, asked.mbit * WITHIN):
        links = links_of(CPU_CORE.links, on_nodes(NAME, ["--rank"], ranks, ranks // 2)["links"]).links
        for name in names * asked.rounds:
            of_round = dict[str, float]()
            for begin in range(0, len(grids), AT_ONCE):
                numbers = map(str, range(begin, min(begin + AT_ONCE, len(grids))))
                of_round |= on_nodes(NAME, ["--only", name, "--rank", *numbers], ranks, ranks // 2)
            found.setdefault(name, []).append(of_round)
    lines = list(
        paragraph(
            f"""Grids by prediction and by seconds. {origin(f"python -m {NAME} --write")} {ranks} gloo ranks of one
            thread, {ranks // 2} in each of two network namespaces that a link of {asked.mbit} Mbit/s joins, the
            loopback of each limited to {WITHIN} times that; {links.intra_bandwidth / 1e6:.0f} MB/s measured within a
            node and {links.inter_bandwidth / 1e6:.0f} between, {format_seconds(links.latency)} a message. Medians of
            {STEPS - SKIPPED} steps; rounds: {asked.rounds}."""
        )
    )
    for name, rounds in found.items():
        lines += lines_of(name, {grid: predicted(SIZES[name], grid, ranks, links) for grid in grids}, rounds)
    if asked.write:
        write_part(PAGE, PART, lines)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
