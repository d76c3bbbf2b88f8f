"""What overlaps, flag by flag: two ranks on two "nodes" that a slow link joins, really run.

    sudo python -m benchmarks.tensor3d.overlap [--mbit 200] [--rounds 3] [--quick] [--write]

As root: two network namespaces, joined by a pair of virtual links whose rate `tc` limits in both directions
(benchmarks/pipeline/shaped_links.py), one gloo rank of one thread in each. The model is a chain of linear layers. On
the grid 1 x 1 x 2 parameters are gathered and gradients summed over the link, on 2 x 1 x 1 outputs of layers and their
gradients. All settings take turns in a round, which has its own processes. The first two steps of a fit are not timed:
they compare collectives, and keep their order.

A rank has a core to itself. Where ranks share cores one computes while another waits, whatever the settings, and
little is left to hide: with four ranks on two cores, matrix products by hand under an all-gather hid 13 % of it, with
two ranks 34 %. On a link of 500 Mbit/s an all-reduce takes much of a core itself, and products by hand hide 26 % of it;
on one of 200 Mbit/s they hide 35 %, which is all of the products' seconds.

What communication takes is the step with everything waited for at once, less the same step where the link is not
limited; the share hidden is what a setting spares of it. `--write` puts the table into docs/reports/tensor3d.md.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from benchmarks.page import ROOT, origin, paragraph, read_part, table, write_part
from benchmarks.pipeline.shaped_links import BURST, linked, refuse_without_root
from benchmarks.tensor3d.nodes import on_nodes, step_seconds
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.quantities import format_seconds
from lightning_amp.techniques.tensor3d.row import OVERLAP

PAGE, PART = ROOT / "docs" / "reports" / "tensor3d.md", "tensor3d.overlap"
RANKS, PER_NODE = 2, 1
STEPS, SKIPPED = 6, 2
FREE = "none, link not limited"
SETTINGS: dict[str, tuple[str, int]] = {
    FREE: ("", 0),
    "none": ("", 0),
    **{name: (name, 0) for name in OVERLAP.split(",")},
    "all three": (OVERLAP, 0),
    "all three, cache": (OVERLAP, 2**30),
}
"""What overlaps, and the bytes of the cache."""
SIZES = {
    (1, 1, 2): (4, 1024, 8192, tuple(SETTINGS)),
    # parameters are not gathered. All-reduces of the forward pass, half of them, cannot be hidden
    (2, 1, 1): (8, 4096, 256, (FREE, "none", "all_reduce", "all three")),
}
"""Of a grid: layers, features, rows, and the settings that make a difference."""


class Chain(LightningModule):
    """Linear layers of one width."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        made = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)]
        self.layers = nn.Sequential(*made)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        found: Tensor = (self.layers(batch) - 1).square().mean()
        return found

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(strategy: AMPStrategy, layers: int, width: int, rows: int) -> float:
    """Median seconds of a step."""
    torch.manual_seed(0)
    module, batches = Chain(layers, width), [torch.randn(rows, width) for _ in range(STEPS)]
    return step_seconds(strategy, module, batches, skipped=SKIPPED)


def on_this_rank(mbit: int, grid: tuple[int, ...]) -> None:
    """One fit of each setting on this rank; rank 0 prints one line of JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    layers, width, rows, settings = SIZES[grid]
    rows //= grid[2]
    first = AMPStrategy(strategies="tensor3d", tensor_grid=(grid[0], grid[1], grid[2]))
    fit(first, layers, width, rows)
    box = [None if first.plan is None else first.plan.to_json()]
    dist.broadcast_object_list(box, 0)
    plan, seconds = Plan.from_json(str(box[0])), dict[str, float]()
    for name in settings:
        overlap, cache = SETTINGS[name]
        limit(None if name == FREE else mbit)
        rules = [
            replace(rule, spec=replace(rule.spec, overlap=overlap, cache_bytes=cache))
            if rule.strategy == "tensor3d"
            else rule
            for rule in plan.rules
        ]
        seconds[name] = fit(AMPStrategy(plan=replace(plan, rules=tuple(rules))), layers, width, rows)
    if dist.get_rank() == 0:
        print(json.dumps(seconds), flush=True)
    dist.destroy_process_group()


def limit(mbit: int | None) -> None:
    """Limit what this namespace sends, or do so no more."""
    dist.barrier()
    if int(os.environ["LOCAL_RANK"]) == 0:
        command = ["tc", "qdisc", "replace", "dev", os.environ["GLOO_SOCKET_IFNAME"], "root"]
        kind = ["pfifo", "limit", "1000"]
        if mbit is not None:
            kind = ["tbf", "rate", f"{mbit}mbit", "burst", str(BURST), "latency", "1s"]
        subprocess.run([*command, *kind], check=True)
    dist.barrier()


def lines_of(
    found: dict[tuple[int, ...], list[dict[str, float]]], mbit: int, rounds: int, command: str
) -> Iterator[str]:
    """The part of the page."""
    yield from paragraph(
        f"""Real runs on a shaped link. {origin(command)} Two gloo ranks of one thread, one in each of two network
        namespaces that a link of {mbit} Mbit/s joins; linear layers, float32.
        Settings took turns; a step is the median of {rounds} rounds, beside the least and the most. Communication takes
        the step with nothing overlapped less the step with the link not limited; the share hidden is what a setting
        spares of it. A cache spares gathers, which is counted as hidden."""
    )
    rows = []
    for grid, one in found.items():
        layers, width, n, settings = SIZES[grid]
        seconds = {name: [of_round[name] for of_round in one] for name in settings}
        none, free = median(seconds["none"]), median(seconds[FREE])
        for name, times in seconds.items():
            share = (none - median(times)) / (none - free)
            rows.append(
                [
                    *(
                        " x ".join(map(str, grid)),
                        f"{layers} of {width}, {n}",
                        name,
                        format_seconds(median(times)),
                    ),
                    f"{format_seconds(min(times))} to {format_seconds(max(times))}",
                    "" if name in (FREE, "none") else f"{share:.0%}",
                ]
            )
    yield from table(["grid", "layers, rows", "overlaps", "a step", "rounds", "communication hidden"], rows)


def main() -> None:
    """Run, and print or write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mbit", type=int, default=200, help="rate of the link")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--write", action="store_true", help="put the table into docs/reports/tensor3d.md")
    parser.add_argument("--grid", type=int, nargs=3, help="one of the grids alone")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    rounds = 1 if asked.quick else asked.rounds
    if asked.rank:
        on_this_rank(asked.mbit, tuple(asked.grid))
        return
    refuse_without_root()
    if asked.write:
        read_part(PAGE, PART)  # a page without markers is refused before anything is measured
    grids = [tuple(asked.grid)] if asked.grid else list(SIZES)
    found: dict[tuple[int, ...], list[dict[str, float]]] = {grid: [] for grid in grids}
    with linked(asked.mbit):
        for grid in [grid for _ in range(rounds) for grid in grids]:
            words = ["--rank", "--mbit", str(asked.mbit), "--grid", *map(str, grid)]
            found[grid].append(on_nodes("benchmarks.tensor3d.overlap", words, RANKS, PER_NODE))
            print(grid, json.dumps(found[grid][-1]), file=sys.stderr, flush=True)
    command = f"python -m benchmarks.tensor3d.overlap{' --quick' * asked.quick} --write"
    lines = list(lines_of(found, asked.mbit, rounds, command))
    if asked.write:
        write_part(PAGE, PART, lines)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
