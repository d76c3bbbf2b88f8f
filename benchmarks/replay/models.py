"""Modules without lists of blocks: parts are attributes, lists of layers, functions, and the head is in the step."""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional


class Trained(LightningModule):
    """Three steps of AdamW."""

    def loss(self, batch: Any) -> Tensor:
        """Of a batch."""
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss, logged."""
        loss = self.loss(batch)
        self.log("train", loss)
        return loss

    def configure_optimizers(self) -> Any:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Residual(nn.Module):
    """Two convolutions, with a shortcut."""

    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(before, after, 3, stride, 1), nn.Conv2d(after, after, 3, 1, 1)
        self.norm1, self.norm2 = nn.BatchNorm2d(after), nn.BatchNorm2d(after)
        self.shortcut = nn.Conv2d(before, after, 1, stride) if (before, stride) != (after, 1) else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Same channels or more, of each place or each other one."""
        inner = functional.relu(self.norm1(self.one(x)))
        return functional.relu(self.norm2(self.two(inner)) + self.shortcut(x))


class UNet(Trained):
    """Two levels, parts as attributes."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem, self.down1 = nn.Conv2d(1, width, 3, 1, 1), Residual(width, width)
        self.down2, self.down3 = Residual(width, 2 * width, 2), Residual(2 * width, 4 * width, 2)
        self.middle = Residual(4 * width, 4 * width)
        self.grow2, self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), Residual(4 * width, 2 * width)
        self.grow1, self.up1 = nn.ConvTranspose2d(2 * width, width, 2, 2), Residual(2 * width, width)
        self.out = nn.Conv2d(width, 1, 1)

    def loss(self, batch: Tensor) -> Tensor:
        """Of images [b, 1, h, w]."""
        one = self.down1(self.stem(batch))
        two = self.down2(one)
        up = self.up2(torch.cat([self.grow2(self.middle(self.down3(two))), two], 1))
        up = self.up1(torch.cat([self.grow1(up), one], 1))
        return functional.mse_loss(self.out(up), batch)


class ResNet(Trained):
    """Eight residual parts as attributes, and a head."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, width, 3, 1, 1), nn.BatchNorm2d(width)
        self.a1, self.a2 = Residual(width, width), Residual(width, width)
        self.b1, self.b2 = Residual(width, 2 * width, 2), Residual(2 * width, 2 * width)
        self.c1, self.c2 = Residual(2 * width, 4 * width, 2), Residual(4 * width, 4 * width)
        self.d1, self.d2 = Residual(4 * width, 8 * width, 2), Residual(8 * width, 8 * width)
        self.head = nn.Linear(8 * width, 10)

    def loss(self, batch: Tensor) -> Tensor:
        """Of images [b, 1, h, w]; the class is that of the largest mean of a column."""
        x = functional.relu(self.norm(self.stem(batch)))
        for part in (self.a1, self.a2, self.b1, self.b2, self.c1, self.c2, self.d1, self.d2):
            x = part(x)
        return functional.cross_entropy(self.head(x.mean((2, 3))), batch[:, 0, :, :10].mean(1).argmax(1))


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


class WaveNet(Trained):
    """Dilated convolutions in lists, joined in `loss`."""

    def __init__(self, width: int = 16, layers: int = 10) -> None:
        super().__init__()
        self.stem, self.out = nn.Conv1d(1, width, 1), nn.Conv1d(width, 1, 1)
        dilations = [2 ** (i % 5) for i in range(layers)]
        self.filters = nn.ModuleList(nn.Conv1d(width, width, 3, dilation=d, padding=d) for d in dilations)
        self.gates = nn.ModuleList(nn.Conv1d(width, width, 3, dilation=d, padding=d) for d in dilations)
        self.skips = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in dilations)

    def loss(self, batch: Tensor) -> Tensor:
        """Of waves [b, 1, n]."""
        x, total = self.stem(batch), torch.zeros((), dtype=batch.dtype)
        for one, gate, skip in zip(self.filters, self.gates, self.skips, strict=True):
            inner = skip(one(x).tanh() * gate(x).sigmoid())
            x, total = x + inner, total + inner
        return functional.mse_loss(self.out(functional.relu(total)), batch)


class Rotary(nn.Module):
    """A layer of Llama's form."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.first, self.second = heads, nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, 3 * width, bias=False)
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Of rows [b, n, width], with the angles of positions."""
        b, n, width = x.shape
        y = self.first(x)
        q, k, v = (part(y).view(b, n, self.heads, -1).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = (t * cos + torch.cat([-t.chunk(2, -1)[1], t.chunk(2, -1)[0]], -1) * sin for t in (q, k))
        found = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(found.transpose(1, 2).reshape(b, n, width))
        y = self.second(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class Llama(Trained):
    """Layers as attributes; head and loss are in the step, where the largest tensor is."""

    def __init__(self, width: int = 32, heads: int = 4, words: int = 2000) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        for i in range(4):
            setattr(self, f"layer{i}", Rotary(width, heads))
        self.norm = nn.RMSNorm(width)

    def loss(self, batch: Tensor) -> Tensor:
        """Of words [b, n]."""
        x, n = self.embed(batch[:, :-1]), batch.shape[1] - 1
        size = x.shape[-1] // self.layer0.heads
        steps = torch.arange(n, dtype=x.dtype)[:, None] / 10 ** (torch.arange(size // 2, dtype=x.dtype) / size)
        angles = torch.cat([steps, steps], -1)
        for i in range(4):
            x = getattr(self, f"layer{i}")(x, angles.cos(), angles.sin())
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


class Points(Trained):
    """A model of points in the manner of Transolver: slices that points are soft members of."""

    def __init__(self, width: int = 32, slices: int = 16) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(3, width), nn.Linear(width, 1)
        for i in range(4):
            setattr(self, f"assign{i}", nn.Linear(width, slices))
            setattr(self, f"mix{i}", nn.Linear(width, width))
            setattr(self, f"wide{i}", nn.Linear(width, 2 * width))
            setattr(self, f"narrow{i}", nn.Linear(2 * width, width))
            setattr(self, f"norm{i}", nn.LayerNorm(width))

    def loss(self, batch: Tensor) -> Tensor:
        """Of points [b, n, 3]."""
        x = self.enter(batch)
        for i in range(4):
            y = getattr(self, f"norm{i}")(x)
            weights = getattr(self, f"assign{i}")(y).softmax(-1)
            tokens = weights.transpose(1, 2) @ y / weights.sum(1)[..., None]
            x = x + weights @ getattr(self, f"mix{i}")(tokens)
            x = x + getattr(self, f"narrow{i}")(functional.gelu(getattr(self, f"wide{i}")(x)))
        return functional.mse_loss(self.leave(x)[..., 0], batch.square().sum(-1))


MODELS: dict[str, tuple[Callable[[], Trained], Callable[[int], Tensor]]] = {
    "U-Net": (UNet, lambda n: torch.randn(8 * n, 1, 64, 64)),
    "ResNet": (ResNet, lambda n: torch.randn(8 * n, 1, 64, 64)),
    "VAE": (VAE, lambda n: torch.randn(8 * n, 1, 64, 64)),
    "WaveNet": (WaveNet, lambda n: torch.randn(8 * n, 1, 2000)),
    "Llama": (Llama, lambda n: torch.randint(0, 2000, (4 * n, 129))),
    "points": (Points, lambda n: torch.rand(4 * n, 2000, 3)),
}
"""By name: the module, and n batches."""
