"""Bytes and time of steps whose optimizer is on the host, alone and with updates within the backward pass.

    python -m benchmarks.training.host_optimizer [--only NAME ...] [--steps 6] [--quick]

For each module and optimizer of `training.early_update`: the most bytes of the first two steps, plain, with
`host_optimizer`, and with `early_update` too, predicted by the plan and counted by the meter; the bytes of the host;
the largest difference of parameters, buffers and losses; seconds of a later step, by plain's. On a CPU, whose memory is
the host's: the device's bytes are those that a GPU would have. Modules of transformers, timm and torchvision are left
out where these are not installed. About three minutes.
"""

import argparse
from typing import Any

import torch

from benchmarks.page import origin, paragraph
from benchmarks.training.early_update import MAKE, OPTIMIZERS, cases
from benchmarks.zoo import one_run
from benchmarks.zoo.one_run import Probe, difference, fit, same_draws
from benchmarks.zoo.subject import Case
from lightning_amp import AMPStrategy
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.host_optimizer.row import HostOptimizer
from lightning_amp.techniques.host_optimizer.updates import updates_of

HEADER = (
    *("module", "optimizer", "plain", "with", "device, predicted", "measured", "of plain"),
    *("host, predicted", "measured", "difference", "step / plain"),
)
WITH = ("host_optimizer", "host_optimizer,early_update")


class HostProbe(Probe):
    """Also keeps the bytes of the host."""

    host_bytes = 0

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        """Read them."""
        super().on_train_batch_end(trainer, module, *args)
        updates = updates_of(trainer.optimizers[0])
        HostProbe.host_bytes = 0 if updates is None else updates.n_bytes


def rows(name: str, case: Case, optimizer: str) -> list[list[str]]:
    """Cells of one module and optimizer, a row for each set of techniques."""
    plain, made = fit(case, torch.float32, optimizer, AMPStrategy()), []
    for strategies in WITH:
        found = fit(case, torch.float32, optimizer, AMPStrategy(strategies=strategies))
        assert found.plan is not None, "AMPStrategy has one"
        assert same_draws(found, plain)
        (spec,) = (rule.spec for rule in found.plan.rules if isinstance(rule.spec, HostOptimizer))
        made.append(
            [
                *(name, optimizer, format_bytes(plain.peak), strategies.replace(",", ", ")),
                *(f"{found.plan.predicted_peak_bytes:,}", f"{found.peak:,}", f"{found.peak / plain.peak:.0%}"),
                *(f"{spec.host_bytes:,}", f"{HostProbe.host_bytes:,}"),
                *(f"{difference(found, plain):g}", f"{found.step / plain.step:.2f}"),
            ]
        )
    return made


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(MAKE), default=list(MAKE))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--quick", action="store_true", help="one module and optimizer")
    asked = parser.parse_args()
    one_run.STEPS, one_run.Probe = asked.steps, HostProbe  # type: ignore[misc]
    torch.set_num_threads(1)
    print("\n".join(paragraph(origin("python -m benchmarks.training.host_optimizer"))))
    print(f"\n| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}")
    # plain descent keeps no state
    for case in cases(asked.only, OPTIMIZERS[1:], quick=asked.quick):
        for row in rows(*case):
            print("| " + " | ".join(row) + " |", flush=True)


if __name__ == "__main__":
    main()
