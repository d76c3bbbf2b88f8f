"""Models of which stages are made, a GPT of any size and a VGG-like CNN without batch norm; and a decoder of strata."""

import time
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_amp.models.decoders.stratified import StratifiedDecoder


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
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Blocks(pl.LightningModule):
    """A step through a list of blocks, with what precedes and follows them."""

    blocks: nn.ModuleList

    def before(self, batch: Tensor) -> Tensor:
        """What precedes the blocks."""
        return batch

    def after(self, x: Tensor, batch: Tensor) -> Tensor:
        """The loss, of what the blocks return."""
        raise NotImplementedError

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """The loss of a batch."""
        x = self.before(batch)
        for block in self.blocks:
            x = block(x)
        return self.after(x, batch)


class GPT(Blocks):
    """The next word is predicted; with `tied`, by the embedding's weight, and as GPT-2 begins."""

    def __init__(self, *, words: int, dim: int, heads: int, layers: int, length: int, tied: bool = False) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, words, bias=False)
        if tied:
            self.head.weight = self.words.weight
            for parameter in self.parameters():
                if parameter.dim() > 1:
                    nn.init.normal_(parameter, std=0.02)

    def before(self, batch: Tensor) -> Tensor:
        """What precedes the blocks."""
        return self.words(batch) + self.places(torch.arange(batch.shape[1], device=batch.device))

    def after(self, x: Tensor, batch: Tensor) -> Tensor:
        """Cross-entropy of every next word."""
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> Any:
        """AdamW, one parameter after the other: all at once it needs as much again as they have."""
        return torch.optim.AdamW(self.parameters(), lr=1e-4, foreach=False)


class VGG(Blocks):
    """VGG-16's convolutions and a classifier; the class is the brightest of ten parts of an image.

    Args:
        side: Of the images, a multiple of 32.
        narrow: Convolutions and the classifier of one layer are this many times narrower.
        fine: Convolutions, rectifiers and poolings are blocks of their own, as in torchvision.
        whole: All three layers of VGG-16's classifier, for 1,000 classes, are blocks, instead of one of 2,048 and a
            head. With images of 224 x 224 it has the 138 million parameters of VGG-16, without its dropout.
    """

    def __init__(self, *, side: int = 64, narrow: int = 1, fine: bool = False, whole: bool = False) -> None:
        super().__init__()
        wide = [n // narrow for n in (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)]
        pools = {1, 3, 6, 9, 12}
        layers = [
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.ReLU(), *([nn.MaxPool2d(2)] if i in pools else []))
            for i, (a, b) in enumerate(pairwise([3, *wide]))
        ]
        flat, hidden = wide[-1] * (side // 32) ** 2, 4096 if whole else 2048 // narrow
        layers += [nn.Sequential(nn.Flatten(), nn.Linear(flat, hidden), nn.ReLU())]
        if whole:
            layers += [nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU()), nn.Sequential(nn.Linear(hidden, 1000))]
        blocks = [part for layer in layers[:-1] for part in layer] if fine else layers
        head = nn.Identity() if whole else nn.Linear(hidden, 10)
        self.blocks, self.head = nn.ModuleList(blocks), nn.Sequential(layers[-1], head) if fine else head
        for weight in (p for p in self.parameters() if p.ndim > 1):
            # as torchvision's; torch's own would let a signal die on its way through so many layers
            nn.init.kaiming_normal_(weight, nonlinearity="relu")

    def after(self, x: Tensor, batch: Tensor) -> Tensor:
        """Cross-entropy of the classes."""
        parts = batch.flatten(1)[:, : batch[0].numel() // 10 * 10].unflatten(1, (10, -1))
        return F.cross_entropy(self.head(x), parts.sum(-1).argmax(1))

    def configure_optimizers(self) -> Any:
        """As VGG was trained."""
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)


class Strata(pl.LightningModule):
    """A decoder from given latents of cells.

    Args:
        alike: All strata attend to the same anchors and have as many features; else each reads what the one before has
            made of the anchors.
    """

    def __init__(self, *, anchors: int = 60, strata: int = 8, dim: int = 16, alike: bool = False) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.randn(anchors, dim))
        self.decoder = StratifiedDecoder(
            dim,
            [range(anchors - (strata if alike else k)) for k in range(strata)],
            stratum_index=range(alike, strata + alike),
            n_anchors=anchors,
            n_batches=1,
            chained=not alike,
            window=10,
        )

    def cells(self, n: int, draw: torch.Generator | None = None) -> dict[str, Tensor]:
        """A batch of n cells."""
        x = torch.poisson(torch.full((n, self.decoder.n_features), 1.5, dtype=self.v.dtype), generator=draw)
        u = torch.randn(n, self.decoder.dim, dtype=self.v.dtype, generator=draw)
        return {"x": x, "u": u, "batch": torch.zeros(n, dtype=torch.int64), "library": x.sum(1, keepdim=True)}

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Minus the mean log-likelihood of the cells' counts."""
        loss: Tensor = self.decoder(v=self.v, **batch)
        return loss

    def configure_optimizers(self) -> Any:
        """Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def measured(module: Any, batch: Tensor, repeats: int) -> dict[str, np.ndarray]:
    """Seconds of every block, forward and backward, [K] each, and bytes of what it returns.

    What precedes the blocks is part of the first, what follows them of the last. The least of some repeats.
    """
    last = len(module.blocks) - 1
    forward = np.full(last + 1, np.inf)
    backward, sent = forward.copy(), np.zeros(last + 1)
    for _ in range(repeats):
        x = batch
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
        module.zero_grad(set_to_none=True)
    return {"forward": forward, "backward": backward, "sent": sent}
