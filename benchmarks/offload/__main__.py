"""Bytes of device and host of steps whose activations wait on the host or run again, predicted and measured.

    python -m benchmarks.offload [--only NAME ...] [--share 0.75]

For each module, with `recompute` and `offload` by name, and with `replay`, `offload` and both under a budget: the peak,
predicted by the plan and measured by the meter in the second step of a real fit; bytes of the pool on the host,
predicted and measured; bytes that leave in a step; the largest difference of parameters and buffers to a plain fit
after three steps. On a CPU, whose memory is the host's: bytes and numbers are those of a device, times are not. Modules
of timm and transformers are left out where these are not installed. About four minutes.
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

from benchmarks.training.whole_step import QUIET
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


Case = tuple[Callable[[], Trained], Callable[[int], Tensor]]
CASES: dict[str, Case] = {"transformer (Llama)": MODELS["Llama"], "U-Net": MODELS["U-Net"], "points": MODELS["points"]}
if find_spec("timm"):
    CASES["ViT (timm)"] = Vit, lambda n: torch.randn(32 * n, 3, 64, 64)
if find_spec("transformers"):
    CASES["GPT-2 (transformers)"] = Gpt2, lambda n: torch.randint(0, 1000, (4 * n, 128))


class OnHost(Meter):
    """Counts the second step, on the device and on the host."""

    host_bytes = moved_bytes = 0

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Read the pool."""
        super().on_train_batch_end(trainer, module, outputs, batch, batch_idx)
        if (moves := moves_of(module)) is not None:
            self.host_bytes, self.moved_bytes = moves.pool.n_bytes, sum(moves.sizes)


def fit(case: Case, strategy: Any) -> tuple[LightningModule, OnHost, Any]:
    """Train a module; returns it, the meter and the plan."""
    torch.manual_seed(0)
    (make, batches), meter = case, OnHost()
    module, data = make(), batches(STEPS)
    options: Any = {"accelerator": "cpu", "devices": 1, **QUIET}
    trainer = Trainer(strategy=strategy, max_epochs=1, callbacks=[meter], **options)
    torch.manual_seed(1)
    trainer.fit(module, DataLoader(data, len(data) // STEPS))
    return module, meter, getattr(trainer.strategy, "plan", None)


def row(name: str, names: str, budget: int | None, plain: tuple[LightningModule, OnHost, Any]) -> list[str]:
    """Cells of one fit."""
    whole = plain[1].live.peak
    begin = [name, names, "none" if budget is None else format_bytes(budget), format_bytes(whole)]
    try:
        module, meter, plan = fit(CASES[name], AMPStrategy(strategies=names, device_memory=budget))
    except AmpError as error:
        reason = "not possible" if "not possible" in str(error) else str(error).partition(";")[0]
        return [*begin, f"refused: {reason}" if "refused" not in reason else reason]
    specs = [rule.spec for rule in plan.rules if rule.strategy == "offload"]
    return [
        *begin,
        f"{plan.predicted_peak_bytes:,}",
        f"{meter.live.peak:,}",
        f"{meter.live.peak / whole:.0%}",
        f"{sum(spec.host_bytes for spec in specs):,}",
        f"{meter.host_bytes:,}",
        f"{meter.moved_bytes:,}",
        str(sum(len(spec.numbers) for spec in specs)),
        f"{difference(module, plain[0]):g}",  # type: ignore[arg-type]
    ]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument(
        "--share", type=float, default=0.75, help="budget of further fits, as a share of the plain peak"
    )
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    header = ["module", "techniques", "budget", "plain", "device, predicted", "measured", "of plain"]
    header += ["host, predicted", "measured", "moved", "tensors", "difference"]
    print(f"| {' | '.join(header)} |\n|{'---|' * len(header)}")
    for name in asked.only:
        plain = fit(CASES[name], "auto")
        budget = int(asked.share * plain[1].live.peak)
        for names, bound in (
            ("recompute", None),
            ("offload", None),
            ("replay", budget),
            ("offload", budget),
            ("replay,offload", budget),
        ):
            cells = row(name, names, bound, plain)
            print("| " + " | ".join([*cells, *[""] * (len(header) - len(cells))]) + " |", flush=True)


if __name__ == "__main__":
    main()
