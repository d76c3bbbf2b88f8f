"""Least bytes of a step with replayed operators, predicted and measured, and whether it trains as before.

    python -m benchmarks.replay [--only NAME ...] [--shares 0.75 0.5]

For each module: the peak of a plain step, that of `replay` without a budget, with budgets of shares of the plain peak,
and with the fewest bytes that it reaches under any budget, each predicted by the plan, measured by the meter in the
second step of a real fit, with processor seconds of a step by those of a plain one; three steps in float64 are
compared with plain ones. First, how long it takes to record an operator. About four minutes.
"""

import argparse
import time
import warnings
from contextlib import ExitStack
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.replay.models import MODELS
from benchmarks.training.whole_step import QUIET
from lightning_amp import AMPStrategy
from lightning_amp.errors import AmpError
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.replay.choose_cuts import AT_ONCE
from lightning_amp.techniques.replay.tape import Tape
from tests.any_module import Meter
from tests.techniques.replay.models import Trained, difference

STEPS = 3


class Watch(Meter):
    """Counts the second step, and times the others."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = list[float]()

    @property
    def peak(self) -> int:
        """Of the second step."""
        return self.live.peak

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        """Begin."""
        super().on_train_batch_start(trainer, module, batch, batch_idx)
        self._begun = time.process_time()

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """End."""
        if batch_idx != self.at:
            self.seconds.append(time.process_time() - self._begun)
        super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)


def fit(name: str, strategy: Any, *, steps: int, double: bool = False, **options: Any) -> tuple[Trained, Watch, Any]:
    """Train a module; returns it, the meter and the plan."""
    make, batches = MODELS[name]
    torch.manual_seed(0)
    module, data, meter = make(), batches(steps), Watch()
    if double:
        module = module.double()
        data = data.double() if data.is_floating_point() else data
    trainer = Trainer(
        strategy=strategy,
        max_epochs=1,
        callbacks=[meter],
        precision="64-true" if double else "32-true",
        **{"accelerator": "cpu", "devices": 1, **QUIET, **options},
    )
    torch.manual_seed(1)
    trainer.fit(module, DataLoader(data, len(data) // steps))
    return module, meter, getattr(trainer.strategy, "plan", None)


def recording() -> tuple[int, float]:
    """Return the operators of a step of small tensors, and the least processor seconds to record one of them."""
    layers = (nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(12))
    module, batch = nn.Sequential(*layers), torch.randn(2, 8, 16, requires_grad=True)

    def seconds(tape: Tape | None) -> float:
        begun = time.process_time()
        with ExitStack() as stack:
            for one in () if tape is None else (tape, tape.hooks()):
                stack.enter_context(one)
            module(batch).sum()
        return time.process_time() - begun

    tapes = [Tape([(2**62, AT_ONCE)]) for _ in range(30)]
    recorded, plain = min(map(seconds, tapes)), min(seconds(None) for _ in tapes)
    return tapes[0].at, (recorded - plain) / tapes[0].at


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--shares", nargs="*", type=float, default=[0.75, 0.5])
    parser.add_argument("--steps", type=int, default=10)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    operators, each = recording()
    print(f"recording takes {1e6 * each:.0f} us an operator (the least of 30 steps of {operators} operators)\n")
    print("| module | budget | plain | predicted | measured | share | time | difference |")
    print("|---|---|---|---|---|---|---|---|")
    for name in asked.only:
        plain = fit(name, "auto", steps=asked.steps)[1]
        exact = fit(name, "auto", steps=STEPS, double=True)[0]
        for share in (None, *asked.shares, 0.0):
            memory = {} if share is None else {"device_memory": int(share * plain.peak) or "1KiB"}
            options = {"strategies": "replay", "on_predicted_oom": "refuse" if share else "warn", **memory}
            try:
                _, meter, plan = fit(name, AMPStrategy(**options), steps=asked.steps)
            except AmpError as error:
                print(f"| {name} | {share:.0%} | {format_bytes(plain.peak)} | {str(error).partition(';')[0]} |")
                continue
            double = {"device_memory": int(2 * share * plain.peak)} if share else memory
            module = fit(name, AMPStrategy(**{**options, **double}), steps=STEPS, double=True)[0]
            ratio = median(meter.seconds[1:]) / median(plain.seconds[1:])
            cells = (
                name,
                "none" if share is None else f"{share:.0%}" if share else "least",
                format_bytes(plain.peak),
                format_bytes(plan.predicted_peak_bytes),
                format_bytes(meter.peak),
                f"{meter.peak / plain.peak:.0%}",
                f"{ratio:.2f}",
                f"{difference(module, exact):.1e}",
            )
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
