"""Transformers and a U-Net of any size, LightningModules that know nothing of ranks, for the papers' tables."""

from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Net(pl.LightningModule):
    """Trained by Adam.

    Attributes:
        losses: Of all steps, where `keep` is set.
    """

    keep = False

    def __init__(self) -> None:
        super().__init__()
        self.losses = list[Tensor]()

    def loss(self, batch: Any) -> Tensor:
        """The loss of a batch."""
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """The loss."""
        loss = self.loss(batch)
        if self.keep:
            self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self) -> Any:
        """Adam, also of what is on the device meta."""
        return torch.optim.Adam(self.parameters(), 1e-3)


class Block(nn.Module):
    """Attention and an MLP, each after a norm."""

    def __init__(self, width: int, heads: int, *, bias: bool = True, causal: bool = True, wide: int = 4) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias), nn.Linear(width, width, bias)
        self.up, self.down = nn.Linear(width, wide * width, bias), nn.Linear(wide * width, width, bias)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, places, width] -> the same."""
        b, n, d = x.shape
        q, k, v = self.qkv(self.first(x)).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(found.transpose(1, 2).reshape(b, n, d))
        return x + self.down(F.gelu(self.up(self.second(x))))


class GPT(Net):
    """A causal transformer over words; `tied` shares the table with the head, as GPT-2 does."""

    def __init__(
        self,
        width: int,
        heads: int,
        depth: int,
        words: int,
        length: int,
        *,
        bias: bool = True,
        tied: bool = False,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.recompute = recompute
        self.embed, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads, bias=bias) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def loss(self, batch: Tensor) -> Tensor:
        """Of the next word."""
        x = self.embed(batch[:, :-1])
        x = x + self.places(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), batch[:, 1:].flatten())


class Residual(nn.Module):
    """Two convolutions with group norm, and a 1x1 around them, as of diffusion models."""

    def __init__(self, inner: int, out: int, groups: int, bias: bool = True) -> None:
        super().__init__()
        self.n1, self.n2 = nn.GroupNorm(groups, inner), nn.GroupNorm(groups, out)
        self.c1 = nn.Conv2d(inner, out, 3, padding=1, bias=bias)
        self.c2 = nn.Conv2d(out, out, 3, padding=1, bias=bias)
        self.skip = nn.Conv2d(inner, out, 1, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[rows, channels, height, width] -> with the channels of the outside."""
        found = self.c2(F.silu(self.n2(self.c1(F.silu(self.n1(x))))))
        return found + self.skip(x)


class UNet(Net):
    """Residual blocks on levels of width `channels` times 1, 2, 2, ... with skips by cat; it is trained on noise."""

    def __init__(self, channels: int, levels: int = 2, blocks: int = 1, groups: int = 4, *, bias: bool = True) -> None:
        super().__init__()
        widths = [channels * min(2**i, 2) for i in range(levels)]
        self.start, self.down, self.up = (nn.Conv2d(3, channels, 3, padding=1), nn.ModuleList(), nn.ModuleList())
        skips, now = [channels], channels
        for i, width in enumerate(widths):
            for _ in range(blocks):
                self.down.append(Residual(now, width, groups, bias))
                skips.append(now := width)
            if i < levels - 1:
                self.down.append(nn.Conv2d(now, now, 3, 2, 1))
                skips.append(now)
        self.middle = Residual(now, now, groups, bias)
        for i, width in reversed([*enumerate(widths)]):
            for _ in range(blocks + 1):
                self.up.append(Residual(now + skips.pop(), width, groups, bias))
                now = width
            if i:
                self.up.append(nn.ConvTranspose2d(now, now, 2, 2))
        self.end, self.out = nn.GroupNorm(groups, now), nn.Conv2d(now, 3, 3, padding=1)

    def loss(self, batch: Tensor) -> Tensor:
        """Of the noise; a batch has the image and the noise, [rows, 6, height, width]."""
        image, noise = batch.chunk(2, 1)
        kept = [x := self.start(image + noise)]
        for layer in self.down:
            kept.append(x := layer(x))
        x = self.middle(x)
        for layer in self.up:
            x = layer(torch.cat([x, kept.pop()], 1) if isinstance(layer, Residual) else x)
        return (self.out(F.silu(self.end(x))) - noise).square().mean()


class ViT(Net):
    """Full attention over patches of an image, or of a volume."""

    def __init__(self, side: int, dim: int = 64, depth: int = 4, patch: int = 4, dims: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.patch = (nn.Conv2d if dims == 2 else nn.Conv3d)(3, dim, patch, patch)
        self.positions = nn.Parameter(torch.zeros(1, dim, *[side // patch] * dims))
        layer = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, heads, 4 * dim, **layer)  # type: ignore[arg-type]
            for _ in range(depth)
        )
        self.head = nn.Linear(dim, 1)

    def loss(self, batch: Tensor) -> Tensor:
        """Of the mean of all patches."""
        x = (self.patch(batch) + self.positions).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return (self.head(x.mean(1)) - 1).square().mean()
