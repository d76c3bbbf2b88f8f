"""The four kinds of model of AutoChunk's evaluation, small, with attention written out as they wrote it.

Each has a length: of text for GPT, the side of an image for ViT and U-Net, that of the table of pairs for Evoformer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.page import ROOT


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
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        )
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        if self.causal:
            place = torch.arange(x.shape[1], device=x.device)
            scores = scores.masked_fill(place[:, None] < place[None, :], float("-inf"))
        x = x + self.out((torch.softmax(scores, dim=-1) @ v).transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.norm_2(x))))


class GPT(nn.Module):
    """Prefill: words to the logits of the last one."""

    def __init__(self, dim: int = 256, layers: int = 4, words: int = 1000) -> None:
        super().__init__()
        self.words = nn.Embedding(words, dim)
        self.layers = nn.Sequential(*(Layer(dim, dim // 32, causal=True) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, words)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(self.words(words)))[:, -1])


class ViT(nn.Module):
    """Patches of 8 pixels to classes."""

    def __init__(self, dim: int = 192, layers: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, dim, 8, stride=8)
        self.layers = nn.Sequential(*(Layer(dim, dim // 32, causal=False) for _ in range(layers)))
        self.head = nn.Linear(dim, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.layers(self.patches(images).flatten(2).transpose(1, 2)).mean(1))


@cache
def example(name: str) -> Any:
    """A file of examples/any_module."""
    spec = spec_from_file_location(f"chunks_{name}", ROOT / "examples" / "any_module" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    found = module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@dataclass(frozen=True, slots=True)
class Model:
    """A model in evaluation mode, its arguments for a length, and the lengths that are run."""

    name: str
    make: Callable[[], nn.Module]
    args: Callable[[int], tuple[Tensor, ...]]
    length: int
    quick_length: int
    dims: int

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make().eval()


MODELS = (
    Model("GPT prefill", GPT, lambda n: (torch.randint(1000, (1, n)),), 1024, 256, 1),
    Model("ViT", ViT, lambda n: (torch.randn(1, 3, n, n),), 256, 128, 2),
    Model(
        "U-Net with attention",
        lambda: example("unet").UNet(),
        lambda n: (torch.randn(2, 3, n, n),),
        96,
        48,
        2,
    ),
    Model(
        "Evoformer",
        lambda: example("evoformer").Block(32, 4),
        lambda n: (torch.randn(1, n, n, 32),),
        96,
        48,
        2,
    ),
)
