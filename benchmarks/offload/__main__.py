"""Bytes of device and host of steps whose activations wait on the host or run again, predicted and measured.

    python -m benchmarks.offload [--only NAME ...] [--share 0.75]
    python -m benchmarks.offload --zoo [--only NAME ...] [--share 0.75]

For each module, with `recompute` and `offload` by name, and with `replay`, `offload` and both under a budget: the peak,
predicted by the plan and measured by the meter in the second step of a real fit; bytes of the pool on the host,
predicted and measured; bytes that leave in a step; the largest difference of losses, parameters and buffers to a plain
fit of three steps. On a CPU, whose memory is the host's: bytes and numbers are those of a device, times are not.
`--zoo` has one model of each library of benchmarks/zoo instead, in float64, with `offload` by name, and with `replay`
beside it under a budget. Models are left out where their package is not installed. About four minutes, or three.
"""

import argparse
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader

from benchmarks.any_module.values import seed
from benchmarks.training.whole_step import QUIET
from benchmarks.zoo import cases
from benchmarks.zoo.subject import made
from lightning_amp import AMPStrategy
from lightning_amp.errors import AmpError
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.offload.install import moves_of
from tests.any_module import Meter
from tests.techniques.replay.models import MODELS, Trained, difference

STEPS = 3


class Gpt2(Trained):
    """GPT-2 of transformers, four layers."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        self.net = GPT2LMHeadModel(GPT2Config(n_layer=4, n_embd=128, n_head=4, vocab_size=1000, n_positions=128))

    def loss(self, batch: Tensor) -> Tensor:
        """Of the next words."""
        found: Tensor = self.net(input_ids=batch, labels=batch).loss
        return found


class Vit(Trained):
    """A ViT of timm, with stochastic depth."""

    def __init__(self, name: str = "vit_tiny_patch16_224", *, depth: int = 4, img_size: int = 64) -> None:
        super().__init__()
        import timm

        self.net = timm.create_model(name, depth=depth, img_size=img_size, num_classes=10, drop_path_rate=0.1)

    def loss(self, batch: Tensor) -> Tensor:
        """Of classes that the images have by their mean."""
        return functional.cross_entropy(self.net(batch), (batch.mean((1, 2, 3)) > 0).long())


Start = Callable[[], tuple[LightningModule, DataLoader[Any]]]


def of(make: Callable[[], Trained], batches: Callable[[int], Tensor]) -> Start:
    """A module and its loader, the same in each call."""

    def start() -> tuple[LightningModule, DataLoader[Any]]:
        torch.manual_seed(0)
        module, data = make(), batches(STEPS)
        return module, DataLoader(data, len(data) // STEPS)  # type: ignore[arg-type]

    return start


def of_zoo(name: str) -> Start:
    """A model of the zoo, and its batch as often as there are steps."""

    def start() -> tuple[LightningModule, DataLoader[Any]]:
        module, batch = made(cases.CASES[name], torch.float64)
        return module, DataLoader([batch] * STEPS, batch_size=None)  # type: ignore[arg-type]

    return start


CASES: dict[str, Start] = {
    "transformer (Llama)": of(*MODELS["Llama"]),
    "U-Net": of(*MODELS["U-Net"]),
    "points": of(*MODELS["points"]),
}
if find_spec("timm"):
    CASES["ViT (timm)"] = of(Vit, lambda n: torch.randn(32 * n, 3, 64, 64))
if find_spec("transformers"):
    CASES["GPT-2 (transformers)"] = of(Gpt2, lambda n: torch.randint(0, 1000, (4 * n, 128)))
ZOO = {name: of_zoo(name) for name in cases.QUICK if find_spec(cases.CASES[name].package)}
WAYS = ("recompute", False), ("offload", False), ("replay", True), ("offload", True), ("replay,offload", True)
"""Techniques, and whether under a budget."""
WAYS_OF_ZOO = ("S1,offload", False), ("S1,replay,offload", True)


class OnHost(Meter):
    """Counts the second step, on the device and on the host, and has the losses."""

    host_bytes = moved_bytes = 0

    def __init__(self) -> None:
        super().__init__()
        self.losses = list[float]()

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Read the pool."""
        super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)
        self.losses.append(float(outputs["loss"]))
        if (moves := moves_of(module)) is not None:
            self.host_bytes, self.moved_bytes = moves.pool.n_bytes, sum(moves.sizes)


def fit(start: Start, strategy: Any) -> tuple[LightningModule, OnHost, Any]:
    """Train a module; returns it, the meter and the plan."""
    (module, loader), meter = start(), OnHost()
    double = next(module.parameters()).dtype == torch.float64
    options: Any = {"accelerator": "cpu", "devices": 1, "precision": "64-true" if double else "32-true", **QUIET}
    trainer = Trainer(strategy=strategy, max_epochs=1, callbacks=[meter], **options)
    seed(1)
    trainer.fit(module, loader)
    return module, meter, getattr(trainer.strategy, "plan", None)


def row(start: Start, names: str, budget: int | None, plain: tuple[LightningModule, OnHost, Any]) -> list[str]:
    """Cells of one fit."""
    whole = plain[1].live.peak
    begin = [names, "none" if budget is None else format_bytes(budget), format_bytes(whole)]
    try:
        module, meter, plan = fit(start, AMPStrategy(strategies=names, device_memory=budget))
    except AmpError as error:
        return [*begin, "not possible" if "not possible" in str(error) else f"refused: {str(error).partition(';')[0]}"]
    specs = [rule.spec for rule in plan.rules if rule.strategy == "offload"]
    of_losses = max(abs(a - b) for a, b in zip(meter.losses, plain[1].losses, strict=True))
    return [
        *begin,
        f"{plan.predicted_peak_bytes:,}",
        f"{meter.live.peak:,}",
        f"{meter.live.peak / whole:.0%}",
        f"{sum(spec.host_bytes for spec in specs):,}",
        f"{meter.host_bytes:,}",
        f"{meter.moved_bytes:,}",
        str(sum(len(spec.numbers) for spec in specs)),
        f"{max(of_losses, difference(module, plain[0])):g}",  # type: ignore[arg-type]
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zoo", action="store_true", help="models of public libraries")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="some of the modules")
    parser.add_argument(
        "--share", type=float, default=0.75, help="budget of further fits, as a share of the plain peak"
    )
    asked = parser.parse_args()
    starts, ways = (ZOO, WAYS_OF_ZOO) if asked.zoo else (CASES, WAYS)
    if unknown := set(asked.only or ()) - starts.keys():
        parser.error(f"--only {min(unknown)!r} is no module of this table; allowed are {', '.join(map(repr, starts))}")
    absent = [name for name in cases.QUICK if name not in ZOO] if asked.zoo and not asked.only else []
    if absent:
        print(f"left out, for their packages are not there: {', '.join(absent)}\n")
    warnings.simplefilter("ignore")
    header = ["module", "techniques", "budget", "plain", "device, predicted", "measured", "of plain"]
    header += ["host, predicted", "measured", "moved", "tensors", "difference"]
    print(f"| {' | '.join(header)} |\n|{'---|' * len(header)}")
    for name in asked.only or starts:
        plain = fit(starts[name], "auto")
        budget = int(asked.share * plain[1].live.peak)
        for names, bound in ways:
            cells = [name, *row(starts[name], names, budget if bound else None, plain)]
            print("| " + " | ".join([*cells, *[""] * (len(header) - len(cells))]) + " |", flush=True)


if __name__ == "__main__":
    main()
