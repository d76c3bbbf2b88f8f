"""Two models of which benchmarks/pipeline.py makes stages: a GPT of any size, and a VGG-like CNN without batch norm.

Their blocks' seconds are measured one by one, forward and backward, with the gradient of the block's input.
"""

import time
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """Pre-norm attention and feed-forward."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2))
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """[text, word, dim] -> the same."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norms[0](x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class GPT(pl.LightningModule):
    """The next word is predicted."""

    def __init__(self, *, words: int, dim: int, heads: int, layers: int, length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, words, bias=False)

    def before(self, batch: Tensor) -> Tensor:
        """What precedes the blocks."""
        return self.words(batch) + self.places(torch.arange(batch.shape[1], device=batch.device))

    def after(self, x: Tensor, batch: Tensor) -> Tensor:
        """What follows them."""
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Cross-entropy of every next word."""
        x = self.before(batch)
        for block in self.blocks:
            x = block(x)
        return self.after(x, batch)

    def configure_optimizers(self) -> Any:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class VGG(nn.Module):
    """VGG-16's convolutions, and its first layers of a classifier, on images of 64 x 64."""

    def __init__(self) -> None:
        super().__init__()
        wide = [3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512]
        pools = {1, 3, 6, 9, 12}
        layers = [
            nn.Sequential(
                nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), *([nn.MaxPool2d(2)] if i in pools else [])
            )
            for i, (a, b) in enumerate(pairwise(wide))
        ]
        layers += [nn.Sequential(nn.Flatten(), nn.Linear(2048, 2048), nn.ReLU())]
        self.blocks, self.head = nn.ModuleList(layers), nn.Linear(2048, 10)

    def before(self, batch: Tensor) -> Tensor:
        """The images."""
        return batch

    def after(self, x: Tensor, batch: Tensor) -> Tensor:
        """The loss."""
        return F.cross_entropy(self.head(x), torch.zeros(len(batch), dtype=torch.int64))


def measured(module: Any, batch: Tensor, repeats: int) -> dict[str, np.ndarray]:
    """Seconds of every block, forward and backward, [K] each, and bytes of what it returns.

    What precedes the blocks is part of the first, what follows them of the last. The least of some repeats.
    """
    forward = np.full(len(module.blocks), np.inf)
    backward, sent = forward.copy(), np.zeros(len(module.blocks))
    for _ in range(repeats):
        x, last = batch, len(module.blocks) - 1
        for i, block in enumerate(module.blocks):
            given = x.detach().requires_grad_(x.is_floating_point() and i > 0)
            begin = time.perf_counter()
            made = block(module.before(given) if i == 0 else given)
            loss = module.after(made, batch) if i == last else made
            middle = time.perf_counter()
            loss.backward(torch.ones_like(loss))
            end = time.perf_counter()
            forward[i], backward[i] = min(forward[i], middle - begin), min(backward[i], end - middle)
            sent[i], x = made.nbytes, made.detach()
        for parameter in module.parameters():
            parameter.grad = None
    return {"forward": forward, "backward": backward, "sent": sent}
