"""LightningModules that know nothing of ranks, with one batch of one long sample."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models import Net, ViT


class Causal(nn.Module):
    """A block of a causal transformer."""

    def __init__(self, dim: int, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.norm, self.mix = heads, nn.LayerNorm(dim), nn.Linear(dim, 3 * dim)
        self.back = nn.Linear(dim, dim)
        self.feed = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        q, k, v = self.mix(self.norm(x)).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.back(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.feed(x)


class GPT(Net):
    """A causal transformer over tokens."""

    def __init__(self, length: int, dim: int = 64, depth: int = 4, words: int = 256) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(words, dim), nn.Parameter(torch.zeros(length, dim))
        self.blocks = nn.Sequential(*(Causal(dim) for _ in range(depth)))
        self.head = nn.Linear(dim, words)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.blocks(self.embed(batch) + self.positions)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch.flatten())


class UNet(Net):
    """Two levels of convolutions with group norm, and skips; of an image or a volume."""

    def __init__(self, dim: int = 16, dims: int = 2) -> None:
        super().__init__()
        Conv, Up, Pool = (getattr(nn, f"{name}{dims}d") for name in ("Conv", "ConvTranspose", "MaxPool"))

        def conv(inside: int, outside: int) -> nn.Sequential:
            return nn.Sequential(Conv(inside, outside, 3, padding=1), nn.GroupNorm(4, outside), nn.SiLU())

        self.top, self.middle, self.low = conv(3, dim), conv(dim, 2 * dim), conv(2 * dim, 4 * dim)
        self.up1, self.up2 = (Up(2 * n * dim, n * dim, 2, 2) for n in (2, 1))
        self.back1, self.back2, self.out = conv(4 * dim, 2 * dim), conv(2 * dim, dim), Conv(dim, 3, 1)
        self.pool = Pool(2)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        top = self.top(batch)
        middle = self.middle(self.pool(top))
        low = self.low(self.pool(middle))
        middle = self.back1(torch.cat([middle, self.up1(low)], 1))
        return (self.out(self.back2(torch.cat([top, self.up2(middle)], 1))) - batch).square().mean()


class Points(Net):
    """Attention between slices of a point cloud, as in Transolver (Wu et al. 2024)."""

    def __init__(self, dim: int = 64, slices: int = 32, depth: int = 4) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, dim), nn.Linear(dim, 1)
        self.weights = nn.ModuleList(nn.Linear(dim, slices) for _ in range(depth))
        self.mix = nn.ModuleList(nn.MultiheadAttention(dim, 4, batch_first=True) for _ in range(depth))
        self.feed = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
            for _ in range(depth)
        )

    def forward(self, points: Tensor) -> Tensor:
        x = self.embed(points)
        for weights, mix, feed in zip(self.weights, self.mix, self.feed, strict=True):
            w = weights(x).softmax(-1)
            tokens = torch.einsum("bnd,bns->bsd", x, w) / w.sum(1)[..., None]
            tokens = tokens + mix(tokens, tokens, tokens, need_weights=False)[0]
            x = x + torch.einsum("bsd,bns->bnd", tokens, w)
            x = x + feed(x)
        return self.head(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self(batch)[..., 0] - batch.norm(dim=-1)).square().mean()


class Neighbours(Net):
    """Attention of every pixel to a window around it, as in NATTEN (Hassani et al. 2023), written with `unfold`."""

    def __init__(self, dim: int = 16, window: int = 7, depth: int = 2, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.window = heads, window
        self.embed, self.head = nn.Conv2d(3, dim, 1), nn.Conv2d(dim, 3, 1)
        self.mix = nn.ModuleList(nn.Conv2d(dim, 3 * dim, 1) for _ in range(depth))
        self.feed = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(2, dim), nn.Conv2d(dim, 2 * dim, 1), nn.GELU(), nn.Conv2d(2 * dim, dim, 1))
            for _ in range(depth)
        )

    def windows(self, x: Tensor) -> Tensor:
        """[b, h, d, y, x] -> [b, h, d, y, x, window * window]; zeros beyond the border."""
        half = self.window // 2
        padded = F.pad(x, (half, half, half, half))
        return padded.unfold(3, self.window, 1).unfold(4, self.window, 1).flatten(-2)

    def forward(self, image: Tensor) -> Tensor:
        x = self.embed(image)
        for mix, feed in zip(self.mix, self.feed, strict=True):
            q, k, v = (t.unflatten(1, (self.heads, -1)) for t in mix(x).chunk(3, 1))
            scores = torch.einsum("bhdyx,bhdyxw->bhyxw", q, self.windows(k)) / q.shape[2] ** 0.5
            # a window has no pixel beyond the border
            inside = self.windows(torch.ones_like(k[:, :, :1]))[:, :, 0] > 0
            weights = scores.masked_fill(~inside, -torch.inf).softmax(-1)
            x = x + torch.einsum("bhyxw,bhdyxw->bhdyx", weights, self.windows(v)).flatten(1, 2)
            x = x + feed(x)
        return self.head(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self(batch) - batch.roll(1, 2)).square().mean()


class Translate(Net):
    """An encoder, and a decoder that attends to it."""

    def __init__(self, words: int = 32, dim: int = 16, depth: int = 2) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(words, dim), nn.Embedding(words, dim)
        self.net = nn.Transformer(dim, 2, depth, depth, 2 * dim, dropout=0.0, batch_first=True)
        self.head = nn.Linear(dim, words)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        source, target = batch["source"], batch["target"]
        seen = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=self.head.weight.dtype)
        x = self.net(self.source(source), self.target(target), tgt_mask=seen, src_key_padding_mask=source == 0)
        return F.cross_entropy(self.head(x).flatten(0, 1), target.flatten())


class Case(NamedTuple):
    """A module, its batch, and the dims that are split."""

    make: Callable[[], Net]
    batch: Callable[[], Any]
    dims: str


CASES = {
    "GPT, 4,096 tokens": Case(lambda: GPT(4096), lambda: torch.randint(256, (1, 4096)), "batch:1"),
    "ViT, 512 x 512": Case(lambda: ViT(512), lambda: torch.randn(1, 3, 512, 512), "batch:2"),
    "U-Net, 512 x 512": Case(UNet, lambda: torch.randn(1, 3, 512, 512), "batch:2"),
    "Transolver, 65,536 points": Case(Points, lambda: torch.randn(1, 65536, 3), "batch:1"),
}
GROWING: dict[str, Callable[[int], Case]] = {
    "U-Net, 512 x 512": lambda n: Case(UNet, lambda: torch.randn(1, 3, 512 * n, 512), "batch:2"),
    "Transolver, 65,536 points": lambda n: Case(Points, lambda: torch.randn(1, 65536 * n, 3), "batch:1"),
}
"""By the number of ranks: every rank has a sample of one size."""
