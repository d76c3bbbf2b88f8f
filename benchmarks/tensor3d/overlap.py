"""What overlaps, flag by flag: two ranks on two "nodes" that a slow link joins, really run.

    sudo python -m benchmarks.tensor3d.overlap [--mbit 200] [--rounds 3] [--quick] [--write]

As root: two network namespaces with a link of limited rate (benchmarks/nodes.py), one gloo rank of one thread in each.
The model is a chain of linear layers. On the grid 1 x 1 x 2 parameters are gathered and gradients summed over the link,
on 2 x 1 x 1 outputs of layers and their gradients. All settings take turns in a round, which has its own processes. The
first two steps of a fit are not timed: they compare collectives, and keep their order.

A rank has a core to itself. Where ranks share cores one computes while another waits, whatever the settings, and little
is left to hide. On a link of 500 Mbit/s an all-reduce takes much of a core itself.

What communication takes is the step with everything waited for at once, less the same step where the link is not
limited; the share hidden is what a setting spares of it. `--write` puts the table into docs/reports/tensor3d.md. About
eight minutes on two quiet cores, with --quick (one grid, three settings, one round) one minute.
"""

import argparse
import json
import warnings
from collections.abc import Iterator
from dataclasses import replace
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from benchmarks.nodes import limit_from_inside, linked, on_nodes, step_seconds
from benchmarks.page import ROOT, origin, read_part, write_as_it_grows
from lightning_amp import AMPStrategy
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.quantities import format_seconds
from lightning_amp.techniques.tensor3d.row import OVERLAP

PAGE, PART, STEPS = ROOT / "docs" / "reports" / "tensor3d.md", "tensor3d.overlap", 6
FREE = "none, link not limited"
SETTINGS: dict[str, tuple[str, int]] = {
    FREE: ("", 0),
    "none": ("", 0),
    **{name: (name, 0) for name in OVERLAP.split(",")},
    "all three": (OVERLAP, 0),
    "all three, cache": (OVERLAP, 2**30),
}
"""What overlaps, and the bytes of the cache."""
SIZES: dict[str, tuple[int, int, int, tuple[str, ...]]] = {
    "1 x 1 x 2": (4, 1024, 8192, tuple(SETTINGS)),
    # parameters are not gathered. All-reduces of the forward pass, half of them, cannot be hidden
    "2 x 1 x 1": (8, 4096, 256, (FREE, "none", "all_reduce", "all three")),
}
"""Of a grid: layers, features, rows, and the settings that make a difference."""
QUICK = {"1 x 1 x 2": (2, 512, 2048, (FREE, "none", "all three"))}
HEADER = ["grid", "layers, rows", "overlaps", "a step", "rounds", "communication hidden"]


class Chain(LightningModule):
    """Linear layers of one width."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Squared errors."""
        found: Tensor = (self.layers(batch) - 1).square().mean()
        return found

    def configure_optimizers(self) -> Any:
        """Plain descent."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


def on_this_rank(mbit: int, grid: str, *, quick: bool) -> None:
    """One fit of each setting on this rank; rank 0 prints one line of JSON."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    layers, width, rows, settings = (QUICK if quick else SIZES)[grid]
    x, y, z = map(int, grid.split(" x "))

    def fit(strategy: AMPStrategy) -> float:
        torch.manual_seed(0)
        return step_seconds(strategy, Chain(layers, width), [torch.randn(rows // z, width) for _ in range(STEPS)])

    first = AMPStrategy(strategies="tensor3d", tensor_grid=(x, y, z))
    fit(first)
    box = [None if first.plan is None else first.plan.to_json()]
    dist.broadcast_object_list(box, 0)
    plan, seconds = Plan.from_json(str(box[0])), dict[str, float]()
    for name in settings:
        overlap, cache = SETTINGS[name]
        limit_from_inside(None if name == FREE else mbit)
        rules: list[Any] = [
            replace(rule, spec=replace(rule.spec, overlap=overlap, cache_bytes=cache))  # type: ignore
            if rule.strategy == "tensor3d"
            else rule
            for rule in plan.rules
        ]
        seconds[name] = fit(AMPStrategy(plan=replace(plan, rules=tuple(rules))))
    if dist.get_rank() == 0:
        print(json.dumps(seconds), flush=True)
    dist.destroy_process_group()


def rows(mbit: int, rounds: int, *, quick: bool) -> Iterator[list[str]]:
    """A row for each setting of each grid."""
    for grid, (layers, width, n, settings) in (QUICK if quick else SIZES).items():
        words = ["--rank", "--mbit", str(mbit), "--grid", grid, *["--quick"] * quick]
        with linked(mbit):
            found = [on_nodes("benchmarks.tensor3d.overlap", words) for _ in range(rounds)]
        seconds = {name: [one[name] for one in found] for name in settings}
        none, free = median(seconds["none"]), median(seconds[FREE])
        for name, times in seconds.items():
            share = "" if name in (FREE, "none") else f"{(none - median(times)) / (none - free):.0%}"
            spread = f"{format_seconds(min(times))} to {format_seconds(max(times))}"
            yield [grid, f"{layers} of {width}, {n}", name, format_seconds(median(times)), spread, share]


def main() -> None:
    """Run, and print or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=int, default=200, help="rate of the link")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one grid, small, three settings, one round")
    parser.add_argument("--write", action="store_true", help="put the table into docs/reports/tensor3d.md")
    parser.add_argument("--grid", choices=list(SIZES), help=argparse.SUPPRESS)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank:
        on_this_rank(asked.mbit, asked.grid, quick=asked.quick)
        return
    if asked.write:
        read_part(PAGE, PART)  # a page without markers is refused before anything is measured
    rounds = 1 if asked.quick else asked.rounds
    first = f"""Real runs on a shaped link. {origin("python -m benchmarks.tensor3d.overlap --write")} Two gloo ranks of
        one thread, one in each of two network namespaces that a link of {asked.mbit} Mbit/s joins; linear layers,
        float32. Settings took turns; a step is the median of {rounds} rounds, beside the least and the most.
        Communication takes the step with nothing overlapped less the step with the link not limited; the share hidden
        is what a setting spares of it. A cache spares gathers, which is counted as hidden."""
    write_as_it_grows(PAGE, PART, first, HEADER, rows(asked.mbit, rounds, quick=asked.quick), write=asked.write)


if __name__ == "__main__":
    main()
