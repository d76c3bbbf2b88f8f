"""Models of the paper's kinds at any size, GPT and U-Net (models.py), ViT, a wide MLP, a gene transformer."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models import GPT, Block, Net, UNet


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
