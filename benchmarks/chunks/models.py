"""GPT and ViT with attention written out, as AutoChunk's evaluation has them, or fused."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Layer(nn.Module):
    """Attention and feed-forward, with or without a causal mask."""

    def __init__(self, dim: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.wide, self.narrow = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        )
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        if self.causal:
            place = torch.arange(x.shape[1], device=x.device)
            scores = scores.masked_fill(place[:, None] < place[None, :], float("-inf"))
        x = x + self.out((torch.softmax(scores, dim=-1) @ v).transpose(1, 2).flatten(2))
        return x + self.feed(x)

    def feed(self, x: Tensor) -> Tensor:
        """Feed-forward, after its norm."""
        return self.narrow(F.gelu(self.wide(self.norm_2(x))))


class Fused(Layer):
    """The same with attention in one kernel."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.feed(x)


class GPT(nn.Module):
    """Prefill: words to the logits of the last one."""

    def __init__(self, dim: int = 256, layers: int = 4, words: int = 1000, heads: int = 0, kind: Any = Layer) -> None:
        super().__init__()
        self.words = nn.Embedding(words, dim)
        self.layers = nn.Sequential(*(kind(dim, heads or dim // 32, causal=True) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, words)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(self.words(words)))[:, -1])


class Language(nn.Module):
    """A GPT that predicts every next word."""

    def __init__(self, dim: int = 128, layers: int = 4, words: int = 2000) -> None:
        super().__init__()
        self.gpt = GPT(dim, layers, words)

    def forward(self, words: Tensor) -> Tensor:
        """The loss."""
        inner = self.gpt.norm(self.gpt.layers(self.gpt.words(words)))
        return F.cross_entropy(self.gpt.head(inner[:, :-1]).flatten(0, 1), words[:, 1:].flatten())


class ViT(nn.Module):
    """Patches to classes."""

    def __init__(self, dim: int = 192, layers: int = 4, *, patch: int = 8, heads: int = 0) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, patch, stride=patch)
        self.layers = nn.Sequential(*(Layer(dim, heads or dim // 32, causal=False) for _ in range(layers)))
        self.head = nn.Linear(dim, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.layers(self.patches(images).flatten(2).transpose(1, 2)).mean(1))
