"""The modules of replay's tests, which have no lists of blocks, and an autoencoder of flat sequences of layers."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.techniques.replay import models
from tests.techniques.replay.models import Trained


class VAE(Trained):
    """Encoder and decoder are flat sequences of layers."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        act = nn.SiLU
        self.encoder = nn.Sequential(
            nn.Conv2d(1, width, 3, 1, 1), act(), nn.Conv2d(width, width, 3, 1, 1), act(),
            nn.Conv2d(width, 2 * width, 3, 2, 1), act(), nn.Conv2d(2 * width, 2 * width, 3, 1, 1), act(),
            nn.Conv2d(2 * width, 4 * width, 3, 2, 1), act(), nn.Conv2d(4 * width, 8, 1),
        )  # fmt: skip
        self.decoder = nn.Sequential(
            nn.Conv2d(4, 4 * width, 1), act(), nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), act(),
            nn.Conv2d(2 * width, 2 * width, 3, 1, 1), act(), nn.ConvTranspose2d(2 * width, width, 2, 2), act(),
            nn.Conv2d(width, width, 3, 1, 1), act(), nn.Conv2d(width, 1, 1),
        )  # fmt: skip

    def loss(self, batch: Tensor) -> Tensor:
        """Of images [b, 1, h, w]."""
        mean, spread = self.encoder(batch).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (0.5 * spread).exp()
        divergence = -0.5 * (1 + spread - mean.square() - spread.exp()).mean()
        return functional.mse_loss(self.decoder(z), batch) + 0.1 * divergence


MODELS: dict[str, tuple[Callable[[], Trained], Callable[[int], Tensor]]] = {
    **models.MODELS,
    "VAE": (VAE, lambda n: torch.randn(8 * n, 1, 64, 64)),
}
"""By name: the module, and n batches."""
