"""Blocks in the manner of AlphaFold's Evoformer on a table of pairs, such as bins of a chromosome."""

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Multiplication(nn.Module):
    """Triangle multiplication: edge (i, j) sees all (i, k), (j, k)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.gate, self.norm_out, self.out = nn.Linear(dim, dim), nn.LayerNorm(dim), nn.Linear(dim, dim)

    def forward(self, pair: Tensor) -> Tensor:
        """[sample, i, j, dim] -> the same."""
        x = self.norm(pair)
        product = torch.einsum("bikc,bjkc->bijc", self.a(x), self.b(x))
        return torch.sigmoid(self.gate(x)) * self.out(self.norm_out(product))


class TriangleAttention(nn.Module):
    """Attention along every row of the table, with a bias of the edges."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(dim)
        self.qkv, self.bias = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, heads, bias=False)
        self.out = nn.Linear(dim, dim)

    def forward(self, pair: Tensor) -> Tensor:
        """[sample, i, j, dim] -> the same."""
        x = self.norm(pair)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(2, 3) for part in self.qkv(x).chunk(3, dim=-1))
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + self.bias(x).permute(0, 3, 1, 2).unsqueeze(1)
        mixed = torch.softmax(scores, dim=-1) @ v
        return self.out(mixed.transpose(2, 3).flatten(3))


class Block(nn.Module):
    """One block of the stack."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.multiplication, self.attention = Multiplication(dim), TriangleAttention(dim, heads)
        self.transition = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.ReLU(), nn.Linear(2 * dim, dim))

    def forward(self, pair: Tensor) -> Tensor:
        """[sample, i, j, dim] -> the same."""
        pair = pair + F.dropout(self.multiplication(pair), 0.1, self.training)
        pair = pair + F.dropout(self.attention(pair), 0.1, self.training)
        return pair + self.transition(pair)


class Evoformer(pl.LightningModule):
    """Predicts a distance class of every pair."""

    def __init__(self, features: int = 8, dim: int = 16, heads: int = 4, layers: int = 2, classes: int = 8) -> None:
        super().__init__()
        self.embed = nn.Linear(features, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.head = nn.Linear(dim, classes)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Cross-entropy of every pair's class."""
        pair, classes = batch
        pair = self.embed(pair)
        for block in self.blocks:
            pair = block(pair)
        loss = F.cross_entropy(self.head(pair).flatten(0, 2), classes.flatten())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def make_batch(samples: int = 1, side: int = 48, features: int = 8, classes: int = 8) -> tuple[Tensor, Tensor]:
    """Features and class of every pair."""
    return torch.randn(samples, side, side, features), torch.randint(classes, (samples, side, side))
