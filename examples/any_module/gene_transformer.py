"""A transformer over genes in the manner of scGPT: masked expression values are predicted from the others."""

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Pre-norm self-attention and feed-forward."""

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm_attention, self.norm_forward = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.forward_in, self.forward_out = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """[cell, gene, dim] -> the same."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm_attention(x)).chunk(3, dim=-1)
        )
        rate = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=rate)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        inner = F.dropout(F.gelu(self.forward_in(self.norm_forward(x))), self.dropout, self.training)
        return x + self.forward_out(inner)


class GeneTransformer(pl.LightningModule):
    """Predicts expression values that are hidden from it."""

    def __init__(self, genes: int = 1000, dim: int = 64, heads: int = 4, layers: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.gene = nn.Embedding(genes, dim)
        self.value = nn.Sequential(nn.Linear(1, dim), nn.ReLU(), nn.Linear(dim, dim))
        self.blocks = nn.ModuleList(Block(dim, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 1)

    def forward(self, genes: Tensor, values: Tensor) -> Tensor:
        """Values of all genes, [cell, gene]."""
        x = self.gene(genes) + self.value(values.unsqueeze(-1))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).squeeze(-1)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Mean squared error of what was hidden."""
        hidden = batch["hidden"].to(batch["values"].dtype)
        found = self(batch["genes"], batch["values"] * (1 - hidden))
        loss = (F.mse_loss(found, batch["values"], reduction="none") * hidden).sum() / hidden.sum().clamp(min=1)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def make_batch(cells: int = 8, length: int = 96, genes: int = 1000) -> dict[str, Tensor]:
    """Cells of which every seventh gene is hidden."""
    return {
        "genes": torch.randint(genes, (cells, length)),
        "values": torch.rand(cells, length),
        "hidden": (torch.arange(length) % 7 == 0).repeat(cells, 1),
    }
