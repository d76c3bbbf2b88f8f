"""Models of the paper's kinds at any size: GPT, GPT-2, U-Net, ViT, a wide MLP, a gene transformer."""

from collections.abc import Callable
from typing import Any, NamedTuple

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
    """Two convolutions with group norm beside a 1x1, as of diffusion models."""

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
    """Full attention over patches of an image, with a class token."""

    def __init__(
        self, width: int, heads: int, depth: int, side: int, patch: int, classes: int, bias: bool = True
    ) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.randn(1, (side // patch) ** 2 + 1, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads, bias=bias, causal=False) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def loss(self, batch: Tensor) -> Tensor:
        """Against class 0, 1, ... of the rows' own numbers."""
        x = self.patch(batch).flatten(2).transpose(1, 2)
        x = self.blocks(torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places)
        logits = self.head(self.norm(x)[:, 0])
        return F.cross_entropy(logits, batch.flatten(1).argmax(1) % logits.shape[1])


class MLP(Net):
    """Wide layers, a gated one among them."""

    def __init__(self, features: int, wide: int, out: int, bias: bool = True) -> None:
        super().__init__()
        self.one, self.gate = nn.Linear(features, wide, bias), nn.Linear(wide, 2 * wide, bias)
        self.two, self.out = nn.Linear(wide, wide, bias), nn.Linear(wide, out, bias)

    def loss(self, batch: Tensor) -> Tensor:
        """Squared errors."""
        value, gate = self.gate(F.relu(self.one(batch))).chunk(2, -1)
        return (self.out(F.relu(self.two(value * gate.sigmoid()))) - 1).square().mean()


class Genes(Net):
    """Attention over genes with their values; a masked gene is predicted."""

    def __init__(self, genes: int, width: int, heads: int, depth: int, bias: bool = True) -> None:
        super().__init__()
        self.names, self.value = nn.Embedding(genes, width), nn.Linear(1, width, bias)
        layer: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": True, "bias": bias}
        self.net = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(width, heads, 2 * width, **layer), depth, enable_nested_tensor=False
        )
        self.out = nn.Linear(width, 1, bias)

    def loss(self, batch: Tensor) -> Tensor:
        """Of every third gene."""
        at = torch.arange(batch.shape[1], device=batch.device)
        hidden = at % 3 == 0
        x = self.names(at) + self.value(batch.masked_fill(hidden, 0.0)[..., None])
        return (self.out(self.net(x))[..., 0] - batch)[:, ::3].square().mean()


class Case(NamedTuple):
    """A module by a bias flag, and a batch of so many rows."""

    make: Callable[[bool], Net]
    batch: Callable[[int], Tensor]


CASES = {
    "GPT": Case(lambda bias: GPT(12, 4, 2, 21, 6, bias=bias), lambda b: torch.randint(21, (b, 7))),
    "GPT-2, tied head, 3 heads": Case(
        lambda bias: GPT(9, 3, 2, 13, 6, bias=bias, tied=True), lambda b: torch.randint(13, (b, 7))
    ),
    "U-Net, group norm": Case(lambda bias: UNet(8, bias=bias), lambda b: torch.randn(b, 6, 6, 8)),
    "U-Net, odd widths": Case(lambda bias: UNet(9, groups=3, bias=bias), lambda b: torch.randn(b, 6, 6, 8)),
    "ViT": Case(lambda bias: ViT(10, 2, 2, 6, 3, 7, bias), lambda b: torch.randn(b, 3, 6, 6)),
    "wide MLP": Case(lambda bias: MLP(13, 23, 5, bias), lambda b: torch.randn(b, 13)),
    "gene transformer": Case(lambda bias: Genes(11, 8, 2, 1, bias), lambda b: torch.randn(b, 11)),
}
