"""The modules of replay's tests, which have no lists of blocks, a flat autoencoder and a transformer."""

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


class Block(nn.Module):
    """A layer of a transformer, with norms before attention and products."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.first, self.second = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Of rows [b, n, width]."""
        b, n, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(found.transpose(1, 2).reshape(b, n, width))
        return x + self.down(functional.gelu(self.up(self.second(x))))


class Transformer(Trained):
    """12 layers on vectors."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.enter, self.norm, self.leave = nn.Linear(8, width), nn.LayerNorm(width), nn.Linear(width, 8)
        self.layers = nn.ModuleList(Block(width, 4) for _ in range(12))

    def loss(self, batch: Tensor) -> Tensor:
        """Of vectors [b, n, 8]: the next of each."""
        x = self.enter(batch)
        for layer in self.layers:
            x = layer(x)
        return functional.mse_loss(self.leave(self.norm(x))[:, :-1], batch[:, 1:])


MODELS: dict[str, tuple[Callable[[], Trained], Callable[[int], Tensor]]] = {
    **models.MODELS,
    "VAE": (VAE, lambda n: torch.randn(8 * n, 1, 64, 64)),
    "transformer": (Transformer, lambda n: torch.randn(16 * n, 128, 8)),
}
"""By name: the module, and n batches."""
