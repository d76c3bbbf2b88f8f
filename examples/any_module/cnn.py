"""A convolutional network with batch norm on tracks along the genome."""

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Stage(nn.Module):
    """Convolution, batch norm, rectifier."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(inside, outside, 7, padding=3, bias=False)
        self.norm = nn.BatchNorm1d(outside)

    def forward(self, x: Tensor) -> Tensor:
        """[sample, inside, position] -> [sample, outside, position]."""
        return F.relu(self.norm(self.conv(x)))


class TrackCNN(pl.LightningModule):
    """Tells classes of sequences apart; trunk and head have optimisers of their own, which the module steps."""

    def __init__(self, channels: int = 32, stages: int = 5, classes: int = 6) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.trunk = nn.Sequential(Stage(4, channels), *(Stage(channels, channels) for _ in range(stages - 1)))
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(channels, classes))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Cross-entropy."""
        x, classes = batch
        loss = F.cross_entropy(self.head(F.max_pool1d(self.trunk(x), 4).mean(-1)), classes)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        self.log("loss", loss)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """Momentum for the trunk, Adam for the head."""
        return [
            torch.optim.SGD(self.trunk.parameters(), lr=0.1, momentum=0.9),
            torch.optim.Adam(self.head.parameters(), lr=1e-3),
        ]


def make_batch(samples: int = 8, length: int = 512, classes: int = 6) -> tuple[Tensor, Tensor]:
    """Tracks and their classes."""
    return torch.randn(samples, 4, length), torch.randint(classes, (samples,))
