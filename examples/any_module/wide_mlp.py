"""A wide autoencoder of expression: its parameters are most of the memory."""

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F


class WideMLP(pl.LightningModule):
    """Rebuilds a cell's expression."""

    def __init__(self, genes: int = 1200, width: int = 768) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(genes, width), nn.LeakyReLU(), nn.Dropout(0.2), nn.Linear(width, width), nn.ELU(),
            nn.Linear(width, genes),
        )  # fmt: skip

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Mean squared error."""
        loss = F.mse_loss(self.net(batch), batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def make_batch(cells: int = 16, genes: int = 1200) -> Tensor:
    """Expression of cells."""
    return torch.rand(cells, genes)
