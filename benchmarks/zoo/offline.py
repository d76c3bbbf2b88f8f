"""Is the plan of `lightning_amp.plan` the plan of the fit? Models of public libraries, three budgets, 1, 2 and 4 ranks.

    python -m benchmarks.zoo.offline [--only PATTERN ...] [--ranks N ...] [--quick] [--write]

For each model the plan is made without a run and by the setup of a fit, with the same request; both are compared:
techniques, mesh, rules with their settings, predicted peak, and whether it fits. Budgets are shares of the plain step's
predicted peak, in float32 with Adam; where nothing fits, the plans with the fewest bytes are compared. `--write` puts
the table into docs/reports/zoo.md. The status is 1 if a plan differs. Needs the extra `zoo`; half an hour on two cores.
"""

import argparse
import importlib
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import lightning_amp
from benchmarks.any_module.values import seed
from benchmarks.page import origin, write_as_it_grows
from benchmarks.zoo.__main__ import PAGE
from benchmarks.zoo.cases import CASES, QUICK
from benchmarks.zoo.one_run import be_quiet, said
from benchmarks.zoo.subject import made
from lightning_amp import AMPStrategy
from lightning_amp.errors import AmpError
from lightning_amp.planning.plan.plan import Plan
from tests.lightning.strategy.strategy_cases import trainer_of
from tests.ranks import run_ranks

SHARES, RANKS = (1.1, 0.7, 0.45), (1, 2, 4)
MODELS = tuple(dict.fromkeys((*QUICK, "torch_geometric: GCN", "monai: SegResNet 3D")))
SECONDS = 900.0
Facts = dict[str, Any]


def facts(plan: Plan) -> Facts:
    """What is compared."""
    return {
        "techniques": plan.strategies,
        "mesh": (plan.mesh.data, plan.mesh.model),
        "rules": [(rule.strategy, rule.fqn, rule.spec) for rule in plan.rules],
        "peak": plan.predicted_peak_bytes,
        "fits": plan.fits,
    }


def without_a_run(name: str, ranks: int, memory: int) -> Facts:
    """Of the plan of `lightning_amp.plan`."""
    module, batch = made(CASES[name], torch.float32, "Adam")
    try:
        return facts(lightning_amp.plan(module, batch, devices=ranks, device_memory=memory).plan)
    except AmpError as error:
        return {"error": said(error)}


def in_fits(rank: int, ranks: int, name: str, memory: Sequence[int]) -> list[Facts]:
    """Of the plan of a fit under each budget, on this rank."""
    be_quiet()
    found = list[Facts]()
    for n_bytes in memory:
        module, batch = made(CASES[name], torch.float32, "Adam")
        seed(1 + rank)
        strategy = AMPStrategy(device_memory=n_bytes, on_predicted_oom="warn")
        trainer = trainer_of(strategy, rank=rank, ranks=ranks, max_steps=1, num_sanity_val_steps=0)
        try:
            trainer.fit(module, DataLoader([batch] * ranks, batch_size=None))
        except AmpError as error:
            found.append({"error": said(error)})
        else:
            assert strategy.plan is not None, "a fit has one"
            found.append(facts(strategy.plan))
    return found


def differing(offline: Facts, fit: Facts) -> list[str]:
    """What differs, in words; the wording of an error may."""
    if "error" in offline and "error" in fit:
        return []
    names = dict.fromkeys((*offline, *fit))
    return [f"{n}: {offline.get(n)!r}, in the fit {fit.get(n)!r}" for n in names if offline.get(n) != fit.get(n)]


def of_model(name: str, ranks: int, folder: Path) -> Iterator[tuple[float, Facts, list[str]]]:
    """Yield, for each budget, its share, the plan without a run and what differs in a fit on any rank."""
    peak = lightning_amp.profile(*made(CASES[name], torch.float32, "Adam")).peak_bytes
    memory = [int(share * peak) for share in SHARES]
    offline = [without_a_run(name, ranks, n_bytes) for n_bytes in memory]
    of_ranks = run_ranks(in_fits, ranks, folder, name, memory, timeout=SECONDS)
    for share, found, *fits in zip(SHARES, offline, *of_ranks, strict=True):
        said_of = {text for fit in fits for text in differing(found, fit)}
        yield share, found, sorted(said_of)


def rows(names: Sequence[str], ranks: Sequence[int], different: list[str]) -> Iterator[list[str]]:
    """Yield a row for each model and number of ranks."""
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            try:
                importlib.import_module(CASES[name].package)
            except ImportError as error:
                print(f"{name}: left out: {error}")
                continue
            for n in ranks:
                cells = list[str]()
                for share, found, apart in of_model(name, n, Path(folder)):
                    for text in apart:
                        different.append(f"{name}, {n} ranks, {share:.0%}: {text}")
                        print(different[-1], flush=True)
                    cells.append(cell(found, differs=bool(apart)))
                yield [name, str(n), *cells]


def cell(found: Mapping[str, Any], *, differs: bool) -> str:
    """The plan, short."""
    if "error" in found:
        text = "refused"
    else:
        data, model = found["mesh"]
        text = "+".join(found["techniques"]) or "nothing"
        text += f", {data} x {model}" if model > 1 else ""
        text += "" if found["fits"] else ", over the budget"
    return f"**differs** ({text})" if differs else text


def main() -> None:
    """Compare, print, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="PATTERN", help="models whose name fits, of all of the zoo")
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS, help="default: 1 2 4")
    parser.add_argument("--quick", action="store_true", help="two models, on one rank")
    parser.add_argument("--write", action="store_true", help="put the table into docs/reports/zoo.md")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    names = [n for n in CASES if any(fnmatchcase(n, pattern) for pattern in asked.only)] if asked.only else MODELS
    if asked.quick:
        names, asked.ranks = MODELS[:2], (1,)
    different = list[str]()
    header = ["model", "ranks", *(f"{share:.0%}" for share in SHARES)]
    first = origin("python -m benchmarks zoo.offline --write")
    write_as_it_grows(PAGE, "zoo.offline", first, header, rows(names, asked.ranks, different), write=asked.write)
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
