"""A case that others publish: ResNet-101 on 100 images of 3 x 128 x 128 within 2 GiB, with and without a budget.

    python -m benchmarks.replay.published [--images 100] [--budgets 2GiB 1536MiB] [--steps 4]

The model, batch and first budget are those of Rockmate's README; the network is torchvision's, with plain SGD in
float32. Each row: the plan's peak, the meter's in the second step of a fit, processor seconds of a step by those of a
plain one, and the difference of all parameters and buffers to plain training. Needs torchvision, 5 GiB and half an
hour. Rockmate itself runs on GPUs only.
"""

import argparse
import warnings
from statistics import median
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.page import origin
from benchmarks.replay.__main__ import Watch
from benchmarks.training.whole_step import QUIET
from lightning_amp import AMPStrategy
from lightning_amp.quantities import format_bytes
from tests.techniques.replay.models import difference


class Network(LightningModule):
    """ResNet-101, whose loss is the mean of its results, as in the README."""

    def __init__(self) -> None:
        super().__init__()
        from torchvision.models import resnet101

        self.network = resnet101()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        """Return the mean of the results for images [b, 3, h, w]."""
        found: Tensor = self.network(batch).mean()
        return found

    def configure_optimizers(self) -> Any:
        """Return SGD without state."""
        return torch.optim.SGD(self.parameters(), 1e-3)


def fit(strategy: Any, images: int, steps: int) -> tuple[Network, Watch, Any]:
    """Train; return the module, the meter and the plan."""
    torch.manual_seed(0)
    module, meter = Network(), Watch()
    data: Any = torch.randn(images * steps, 3, 128, 128)
    trainer = Trainer(
        strategy=strategy, max_epochs=1, callbacks=[meter], **{"accelerator": "cpu", "devices": 1, **QUIET}
    )
    trainer.fit(module, DataLoader(data, images))
    return module, meter, getattr(trainer.strategy, "plan", None)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--budgets", nargs="+", default=["2GiB", "1536MiB"])
    parser.add_argument("--steps", type=int, default=4)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(origin("python -m benchmarks.replay.published"))
    print("| budget | techniques | predicted | measured | of plain | time | difference |")
    print("|---|---|---|---|---|---|---|")
    module, plain, _ = fit("auto", given.images, given.steps)
    print(f"| none | plain Lightning | | {format_bytes(plain.peak)} | | 1 | |", flush=True)
    for budget in given.budgets:
        other, meter, plan = fit(AMPStrategy(device_memory=budget), given.images, given.steps)
        cells = (
            budget,
            ", ".join(name for name in plan.strategies if name != "S1"),
            f"{plan.predicted_peak_bytes:,}",
            f"{meter.peak:,}",
            f"{meter.peak / plain.peak:.0%}",
            f"{median(meter.seconds[1:]) / median(plain.seconds[1:]):.2f}",
            f"{difference(other, module):.1e}",
        )
        print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
