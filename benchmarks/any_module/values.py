"""Steps whose values decide shapes or branches, under 75, 50 and 35 % of the bytes of a plain step.

    python -m benchmarks.any_module.values [--quick] [--only NAME ...] [--write]

Each model trains three steps in float64 on one device, plain and under each budget. A row has the techniques of the
plan, the largest difference of a parameter or buffer to the plain run, the predicted and the measured bytes of the
second step, and the processor seconds until training begins. A refused row says what the step requires at least.
`--write` puts the table into docs/reports/any_module.md as it grows. Models whose packages are not there are left out,
and named. Takes 15 minutes on a quiet core, with --quick 2.
"""

import argparse
import random
import re
import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.any_module.value_models import MODELS
from benchmarks.page import ROOT, origin, write_as_it_grows
from lightning_amp import AMPStrategy
from lightning_amp.errors import AmpError
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.reports.plan_report import techniques
from lightning_amp.quantities import format_bytes
from tests.any_module import QUIET, Meter

PAGE, PART = ROOT / "docs" / "reports" / "any_module.md", "any_module.values"
SHARES = (0.75, 0.5, 0.35)
QUICK = ("own experts", "GAT", "loss.item(), isfinite")
STEPS = 3
HEADER = ["model", "budget", "plan", "difference", "predicted", "measured", "ratio", "planning"]
AT_LEAST = re.compile(r"requires at least ([\d.,]+ \w+)")


class Clocked(Meter):
    """Meter that also takes the processor seconds from the start of a fit to training."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Start."""
        self.seconds = -time.process_time()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Stop."""
        self.seconds += time.process_time()


class Run(NamedTuple):
    """What a fit has left: tensors of the module, bytes of its second step, the plan, seconds until training."""

    tensors: list[Tensor]
    peak: int
    plan: Plan | None
    seconds: float


def run(name: str, budget: int | None = None) -> Run:
    """Train a model; the same seeds in each run."""
    seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        module, batch = MODELS[name][0]()
    finally:
        torch.set_default_dtype(torch.float32)
    strategy = None if budget is None else AMPStrategy(device_memory=budget)
    clocked = Clocked()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=STEPS,
        precision="64-true",
        callbacks=[clocked],
        strategy=strategy or "auto",
        **QUIET,
    )
    seed(1)
    trainer.fit(module, DataLoader([batch] * STEPS, batch_size=None))  # type: ignore[arg-type]
    tensors = [value.clone() for value in module.state_dict().values()]
    return Run(tensors, clocked.live.peak, strategy and strategy.plan, clocked.seconds)


def seed(n: int) -> None:
    """Seed all generators that a step may draw from."""
    torch.manual_seed(n)
    np.random.seed(n)
    random.seed(n)


def rows_of(name: str, shares: tuple[float, ...]) -> Iterator[list[str]]:
    """Yield a row for each budget."""
    plain = run(name)
    yield [name, "plain", "", "", "", format_bytes(plain.peak), "", ""]
    for share in shares:
        budget = int(share * plain.peak)
        begun = time.process_time()
        try:
            found = run(name, budget)
        except AmpError as error:
            least = AT_LEAST.search(str(error))
            why = f"refused: at least {least[1]}" if least else f"refused: {str(error).partition(';')[0]}"
            yield [name, f"{share:.0%}", why, "", "", "", "", f"{time.process_time() - begun:.1f} s"]
            continue
        assert found.plan is not None, "it has a budget"
        pairs = zip(plain.tensors, found.tensors, strict=True)
        difference = max(float((a - b).abs().max()) for a, b in pairs if a.numel())
        yield [
            *(name, f"{share:.0%}", techniques(found.plan.strategies), f"{difference:.0e}" if difference else "0"),
            *(format_bytes(found.plan.predicted_peak_bytes), format_bytes(found.peak)),
            *(f"{found.plan.predicted_peak_bytes / found.peak:.4f}", f"{found.seconds:.1f} s"),
        ]


def main() -> None:
    """Measure, and print or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"{', '.join(QUICK)}, at 50 %% of their bytes")
    parser.add_argument("--only", nargs="+", choices=MODELS, help="these models")
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.relative_to(ROOT)}")
    asked = parser.parse_args()
    names = asked.only or list(QUICK if asked.quick else MODELS)
    absent = [name for name in names if MODELS[name][1] and find_spec(MODELS[name][1]) is None]
    if absent:
        print(f"left out, for their packages are not there: {', '.join(absent)}")
    command = f"python -m benchmarks.any_module.values{' --quick' * asked.quick} --write"
    shares = SHARES[1:2] if asked.quick else SHARES
    rows = (row for name in names if name not in absent for row in rows_of(name, shares))
    first = f"{origin(command)} Bytes of the second of {STEPS} steps."
    write_as_it_grows(PAGE, PART, first, HEADER, rows, write=asked.write)


if __name__ == "__main__":
    main()
