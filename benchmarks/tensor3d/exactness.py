"""Train small models on every grid of 1 to 16 ranks, and compare with one process in float64.

    python -m benchmarks.tensor3d.exactness [--ranks 1 2 4 8 16] [--all] [--only NAME]

Models x grids (x, y, z) with copies, every factoring of the ranks, on 16 ranks 2 x 2 x 2 with 2 copies x with and
without bias: the loss and all gradients of three steps of Adam, joined from all ranks, and the parameters after them.
On 8 ranks a few grids, all with --all. Processes on this machine, connected by gloo; fifteen minutes on two cores.
"""

import argparse
import itertools
import logging
import sys
import time
import warnings
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.tensor3d.models import CASES
from benchmarks.tensor3d.ranks import Ranks
from benchmarks.tensor3d.small import QUIET
from lightning_amp import AMPStrategy
from tests.lightning.strategy.strategy_cases import RunningRanks

ROWS, STEPS, BOUND = 16, 3, 1e-10
FEW = [(2, 2, 2), (4, 2, 1), (1, 2, 4), (2, 1, 2), (1, 1, 8)]
"""Grids of 8 ranks, of which (2, 1, 2) has two copies."""
Grid = tuple[int, int, int]


class Gradients(Callback):
    """The whole gradients of every step."""

    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        """Join them."""
        shards = getattr(trainer.strategy, "_shards", None)
        if shards is None:
            self.found += [p.grad.clone() for p in module.parameters()]
        else:
            self.found += [one.join(one.parameter.grad) for one in shards.units.parameters]


def trained(
    rank: int, ranks: int, name: str, bias: bool, grid: Grid | None = None, options: Any = None
) -> list[Tensor]:
    """Losses, gradients and parameters."""
    seed_everything(1, verbose=False)
    case = CASES[name]
    batches = [case.batch(ROWS) for _ in range(STEPS)]
    batches = [b.double() if b.is_floating_point() else b for b in batches]
    given: dict[str, Any] = {"devices": 1}
    if grid is not None:
        same = grid[0] * grid[1]
        rows = ROWS * same // ranks
        batches = [batch[rank // same * rows :][:rows] for batch in batches]
        strategy = AMPStrategy(strategies="tensor3d", tensor_grid=grid, **(options or {}))
        given = {"strategy": strategy, "devices": ranks, "plugins": [RunningRanks(rank, ranks)]}
    torch.manual_seed(2)
    module = case.make(bias).double()
    module.keep = True
    seen = Gradients()
    trainer = Trainer(**QUIET, **given, callbacks=[seen])
    trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    losses = torch.stack(module.losses)
    if grid is not None:
        torch.distributed.all_reduce(losses)
        losses /= ranks
    return [losses, *seen.found, *(p.detach().clone() for p in module.parameters())]


def difference(rank: int, ranks: int, name: str, bias: bool, grid: Grid, options: Any, right: Any) -> float:
    """The largest on this rank, of a tensor's largest entry where that is above 1."""
    found = trained(rank, ranks, name, bias, grid, options)
    assert len(found) == len(right), "as many gradients"
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1)) for a, b in zip(found, right, strict=True))


def grids_of(ranks: int, every: bool) -> list[Grid]:
    """Every x, y and z whose product divides the ranks; a few on 8, and one on 16."""
    if ranks == 16:
        return [(2, 2, 2)]
    if ranks == 8 and not every:
        return FEW
    sizes = [n for n in range(1, ranks + 1) if ranks % n == 0]
    return [grid for grid in itertools.product(sizes, repeat=3) if ranks % (grid[0] * grid[1] * grid[2]) == 0]


def main() -> None:
    """Run all, and print a table of the worst differences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--all", action="store_true", help="all grids of 8 ranks")
    parser.add_argument("--only", default="")
    parser.add_argument("--each", action="store_true", help="also print each run")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    names = [name for name in CASES if asked.only in name]
    right = {(name, bias): trained(0, 1, name, bias) for name in names for bias in (True, False)}
    worst, failed, runs, began = dict[Any, float](), 0, 0, time.monotonic()
    for ranks in asked.ranks:
        pool = Ranks(ranks, difference, patience=300)
        for i, ((name, bias), grid) in enumerate(itertools.product(right, grids_of(ranks, asked.all))):
            # one of them on each grid
            n = len(grids_of(ranks, asked.all))
            if ranks > 2 and not asked.all and (i // n + i % n + names.index(name)) % 2:
                continue
            found = pool.ask(name, bias, grid, {}, right[name, bias])
            runs += 1
            bad = [f"{kind}: {value}" for kind, value in found if kind != "done"]
            error = float("inf") if bad else max(value for _, value in found)
            if not error <= BOUND:
                failed += 1
                print(f"{name} on {grid} of {ranks}, bias {bias}: {bad or error}", file=sys.stderr, flush=True)
            if asked.each:
                print(f"{name} on {grid} of {ranks}, bias {bias}: {error:.0e}", flush=True)
            # each fit makes process groups, whose threads stay
            if bad or runs % 8 == 0:
                pool.end()
                pool = Ranks(ranks, difference, patience=300)
            worst[name, ranks] = max(worst.get((name, ranks), 0.0), error)
        pool.end()
    heads = [f"{n} ranks, {len(grids_of(n, asked.all))} grids" for n in asked.ranks]
    print("| model | " + " | ".join(heads) + " |\n" + "|---" * (len(heads) + 1) + "|")
    for name in names:
        print(f"| {name} | " + " | ".join(f"{worst[name, n]:.0e}" for n in asked.ranks) + " |")
    print(f"\n{runs} runs, {failed} beyond {BOUND:.0e}, {time.monotonic() - began:.0f} s")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
