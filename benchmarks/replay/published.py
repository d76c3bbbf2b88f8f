"""Networks of others with budgets, whose plain step takes seconds: bytes, time, and whether they train as before.

    python -m benchmarks.replay.published [--only NAME ...] [--images N] [--budgets 2GiB 0.5] [--steps 4]

ResNet-101 of torchvision on 100 images of 3 x 128 x 128 within 2 GiB is the case of Rockmate's README; ViT-B (12
layers, torchvision) and a U-Net with attention (diffusers) have 16 images. Plain SGD in float32. Budgets are sizes, or
shares of the plain peak. Each row: the plan's peak, the meter's in the second step of a fit, processor time of a step
by that of a plain one, and the difference of all parameters and buffers to plain training. Needs torchvision,
diffusers, 5 GiB and an hour. Rockmate itself runs on GPUs only.
"""

import argparse
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.page import origin
from benchmarks.replay.__main__ import Watch
from benchmarks.training.whole_step import QUIET
from lightning_amp import AMPStrategy
from lightning_amp.quantities import format_bytes
from tests.techniques.replay.models import difference


def resnet() -> nn.Module:
    """Return ResNet-101."""
    from torchvision.models import resnet101

    made: nn.Module = resnet101()
    return made


def vit() -> nn.Module:
    """Return ViT-B of patches of 16 x 16."""
    from torchvision.models import vit_b_16

    made: nn.Module = vit_b_16()
    return made


class Denoiser(nn.Module):
    """A U-Net of four levels with attention, at one moment of the diffusion."""

    def __init__(self) -> None:
        super().__init__()
        from diffusers import UNet2DModel

        self.network = UNet2DModel(sample_size=64, block_out_channels=(64, 128, 256, 256), layers_per_block=2)

    def forward(self, batch: Tensor) -> Tensor:
        """Of images [b, 3, h, w]."""
        found: Tensor = self.network(batch, torch.tensor(3)).sample.square()
        return found


@dataclass(frozen=True)
class Case:
    """A network, the shape of its batch, and its budgets."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    budgets: tuple[str, ...]


CASES = {
    "ResNet-101": Case(resnet, (100, 3, 128, 128), ("2GiB", "1536MiB")),
    "ViT-B": Case(vit, (16, 3, 224, 224), ("0.5", "0.3")),
    "U-Net": Case(Denoiser, (16, 3, 64, 64), ("0.55", "0.4")),
}


class Network(LightningModule):
    """A network whose loss is the mean of its results, as in the README."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.network = case.make()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        """Return the mean of the results for images [b, 3, h, w]."""
        found: Tensor = self.network(batch).mean()
        return found

    def configure_optimizers(self) -> Any:
        """Return SGD without state."""
        return torch.optim.SGD(self.parameters(), 1e-3)


def fit(case: Case, strategy: Any, images: int, steps: int) -> tuple[Network, Watch, Any]:
    """Train; return the module, the meter and the plan."""
    torch.manual_seed(0)
    module, meter = Network(case), Watch()
    data: Any = torch.randn(images * steps, *case.shape[1:])
    trainer = Trainer(
        strategy=strategy, max_epochs=1, callbacks=[meter], **{"accelerator": "cpu", "devices": 1, **QUIET}
    )
    trainer.fit(module, DataLoader(data, images))
    return module, meter, getattr(trainer.strategy, "plan", None)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--images", type=int)
    parser.add_argument("--budgets", nargs="+")
    parser.add_argument("--steps", type=int, default=4)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(origin("python -m benchmarks.replay.published"))
    print("| network | plain | budget | techniques | predicted | measured | of plain | time | difference |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in given.only:
        case = CASES[name]
        images = given.images or case.shape[0]
        module, plain, _ = fit(case, "auto", images, given.steps)
        for budget in given.budgets or case.budgets:
            memory = budget if budget[-1].isalpha() else int(float(budget) * plain.peak)
            other, meter, plan = fit(case, AMPStrategy(device_memory=memory), images, given.steps)
            cells = (
                name,
                format_bytes(plain.peak),
                budget,
                ", ".join(one for one in plan.strategies if one != "S1"),
                f"{plan.predicted_peak_bytes:,}",
                f"{meter.peak:,}",
                f"{meter.peak / plain.peak:.0%}",
                f"{median(meter.seconds[1:]) / median(plain.seconds[1:]):.2f}",
                f"{difference(other, module):.1e}",
            )
            print("| " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
