"""Train harmless-looking modules on grids of 2 and 4 ranks, and compare each with one process, in float64.

    python -m benchmarks.tensor3d.attacks [--tables weights] [--only NAME] [--grids 2,1,1 2,2,1] [--list]

Three steps of SGD through the Trainer, with a batch of four rows: losses, parameters, buffers and logged values of
every rank. A module on a grid is

    exact     to 1e-10
    drawn     where random numbers of split features are others than those of whole ones, and all ranks agree
    refused   where every rank raises an error of the library, with one message that says why
    wrong     the rest, without an error
    raw       where a rank raises an error of torch or of Python, also in the words of one of the library
    hangs     where ranks give no answer for 60 seconds, or some of them raise an error and others wait

Exit status 1 where there is a wrong, raw or hanging one. Processes are started once; a quarter of an hour on two cores.
"""

import argparse
import logging
import sys
import warnings
from collections import Counter
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.tensor3d.attacks.around import AROUND
from benchmarks.tensor3d.attacks.kept import KEPT
from benchmarks.tensor3d.attacks.layers import LAYERS
from benchmarks.tensor3d.attacks.losses import LOSSES
from benchmarks.tensor3d.attacks.mixed import MIXED
from benchmarks.tensor3d.attacks.nets import NETS
from benchmarks.tensor3d.attacks.values import VALUES
from benchmarks.tensor3d.attacks.weights import WEIGHTS
from benchmarks.tensor3d.ranks import Found, Ranks
from benchmarks.tensor3d.small import QUIET, Attack
from lightning_amp import AMPStrategy
from tests.lightning.strategy.strategy_cases import RunningRanks
from tests.odd_modules.collection.row import SAMPLES

Grid = tuple[int, int, int]
GRIDS: list[Grid] = [(2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1)]
TABLES = {
    "weights": WEIGHTS,
    "kept": KEPT,
    "layers": LAYERS,
    "nets": NETS,
    "mixed": MIXED,
    "values": VALUES,
    "losses": LOSSES,
    "around": AROUND,
}
ATTACKS = {one.name: one for table in TABLES.values() for one in table}
STEPS, BOUND, PATIENCE_S = 3, 1e-10, 60.0
UNNAMED = "whose training step fails: "
"""In a message: an error of torch or of Python follows."""
KINDS = ("exact", "drawn", "refused", "wrong", "raw", "hangs")


def trained(one: Attack, rank: int = 0, grid: Grid | None = None, ranks: int = 1) -> dict[str, Tensor]:
    """Everything that has to be equal after three steps; with more ranks than a grid takes plain data parallelism."""
    seed_everything(3, verbose=False)
    batches = [one.batch() for _ in range(STEPS)]
    given: dict[str, Any] = {"devices": 1}
    if ranks > 1:
        model = 1 if grid is None else grid[0] * grid[1]
        rows = SAMPLES * model // ranks
        cut = slice(rank // model * rows, (rank // model + 1) * rows)
        batches = [mapped(batch, cut) for batch in batches]
        how: dict[str, Any] = {"strategies": "S1"} if grid is None else {"strategies": "tensor3d", "tensor_grid": grid}
        given = {"strategy": AMPStrategy(**how), "devices": ranks, "plugins": [RunningRanks(rank, ranks)]}
    module = one.make().double()
    trainer = Trainer(**QUIET, **given)
    trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    found = {f"state {name}": value for name, value in module.state_dict().items()}
    for name in ("losses", "seen"):
        found |= {f"{name} {i}": value for i, value in enumerate(getattr(module, name, ()))}
    logged = trainer.callback_metrics.items()
    found |= {f"logged {name}": value for name, value in logged if name != "loss"}
    return {name: value.detach().clone() for name, value in found.items()}


def mapped(batch: Any, cut: slice) -> Any:
    """Some rows of a batch."""
    return tuple(mapped(one, cut) for one in batch) if isinstance(batch, tuple) else batch[cut]


def apart(found: list[dict[str, Tensor]], right: list[dict[str, Tensor]]) -> tuple[float, str]:
    """The largest difference of any rank, and of what; losses of data ranks are shares of one."""
    worst, where = 0.0, ""
    for key, value in right[0].items():
        own, rights = [one.get(key) for one in found], [one[key] for one in right]
        if any(one is None or one.shape != value.shape for one in own):
            return float("inf"), f"{key}: shapes {[one is not None and tuple(one.shape) for one in own]}"
        if key.startswith("losses"):
            own, rights = [torch.stack(own).mean(0)], [torch.stack(rights).mean(0)]  # type: ignore[arg-type]
        for one, other in zip(own, rights if len(rights) > 1 else rights * len(own), strict=True):
            if other.numel():
                scale = other.abs().max().clamp(min=1) if other.is_floating_point() else 1
                error = float(((one - other).abs() / scale).max()) if other.dtype != torch.bool else 0.0
                # not a number is wrong where the right one is
                if not error <= worst and not (error != error and bool((one != one).equal(other != other))):
                    worst, where = error, key
    return worst, where


def on_rank(rank: int, ranks: int, name: str, grid: Grid | None) -> dict[str, Tensor]:
    """One attack on one rank."""
    return trained(ATTACKS[name], rank, grid, ranks)


def judged(found: list[Found], right: list[dict[str, Tensor]], drawn: bool) -> Found:
    """One kind for all ranks."""
    kinds = {kind for kind, _ in found}
    if kinds == {"done"}:
        if drawn:
            right = [found[0][1]]
        error, where = apart([values for _, values in found], right)
        exact = "drawn" if drawn else "exact"
        return (exact, f"{error:.0e}") if error <= BOUND else ("wrong", f"{where} differs by {error:.1e}")
    if kinds == {"refused"}:
        return ("raw" if UNNAMED in found[0][1] else "refused"), found[0][1]
    why = " || ".join(f"{kind}: {text if kind != 'done' else ''}" for kind, text in found)
    return ("raw" if "raw" in kinds and "hangs" not in kinds else "hangs"), why


def main() -> None:
    """Run all, and print a table of counts, and what is not exact."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="attacks whose name has this")
    parser.add_argument("--grids", nargs="+", default=[",".join(map(str, grid)) for grid in GRIDS])
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=[*TABLES])
    parser.add_argument("--list", action="store_true", help="also print what is refused, with its message")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    grids = [(int(a), int(b), int(c)) for a, b, c in (text.split(",") for text in asked.grids)]
    pools, counts = dict[int, Ranks](), {grid: Counter[str]() for grid in grids}
    worst, asked_of = dict[str, str](), Counter[int]()
    for name, one in ((one.name, one) for table in asked.tables for one in TABLES[table]):
        if asked.only not in name:
            continue
        try:
            right = [trained(one)]
        except Exception as error:
            print(f"{name!r}: one process fails: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            continue
        for grid in grids:
            n, against, data = grid[0] * grid[1] * grid[2], right, grid[2] > 1 and one.by_rows
            for wanted in (None, grid) if data else (grid,):
                pools[n] = pools.get(n) or Ranks(n, on_rank, patience=PATIENCE_S)
                found = pools[n].ask(name, wanted)
                if wanted is None:
                    against = [values for _, values in found]
            drawn = one.drawn and grid[0] * grid[1] > 1
            kind, why = judged(found, against, drawn)
            counts[grid][kind] += 1
            worst[name] = max(worst.get(name, ""), kind, key=lambda k: -1 if not k else KINDS.index(k))
            if kind not in ("exact", "drawn", "refused") or (asked.list and kind == "refused"):
                print(f"{name!r} on {grid}: {kind}: {why[:600]}", file=sys.stderr, flush=True)
            asked_of[n] += 1
            # each fit makes process groups, whose threads stay
            if len({kind for kind, _ in found}) > 1 or kind == "hangs" or asked_of[n] % 10 == 0:
                pools.pop(n).end()
    for pool in pools.values():
        pool.end()
    print("| grid | " + " | ".join(KINDS) + " |\n" + "|---" * (len(KINDS) + 1) + "|")
    for grid in grids:
        print("| " + " x ".join(map(str, grid)), *(counts[grid][kind] for kind in KINDS), sep=" | ", end=" |\n")
    if asked.list:
        print(*(f"{kind}: {name}" for name, kind in worst.items() if kind != "exact"), sep="\n", file=sys.stderr)
    total = Counter(worst.values())
    print(f"| {len(worst)} modules, the worst of each", *(total[kind] for kind in KINDS), sep=" | ", end=" |\n")
    sys.exit(total["wrong"] + total["raw"] + total["hangs"] > 0)
