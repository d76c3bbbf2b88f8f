"""The four kinds of model of AutoChunk's evaluation, small, with attention written out as they wrote it; and the
modules of examples/any_module.

Each of the four has a length: of text for GPT, the side of an image for ViT and U-Net, that of the table of pairs for
Evoformer. A module of examples/any_module computes its loss.
"""

import sys
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


class Fused(Layer):
    """The same with attention in one kernel."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.norm_2(x))))


class GPT(nn.Module):
    """Prefill: words to the logits of the last one."""

    def __init__(
        self, dim: int = 256, layers: int = 4, words: int = 1000, heads: int = 0, kind: Any = Layer
    ) -> None:
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


@cache
def example(name: str) -> Any:
    """A file of examples/any_module."""
    spec = spec_from_file_location(f"chunks_{name}", ROOT / "examples" / "any_module" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    found = module_from_spec(spec)
    # torch.compile looks for a function's module by its name
    sys.modules[found.__name__] = found
    spec.loader.exec_module(found)
    return found


class Loss(nn.Module):
    """A LightningModule's loss without a Trainer: a module whose forward is the training step."""

    def __init__(self, module: nn.Module, step: Callable[..., Tensor]) -> None:
        super().__init__()
        self.module, self.step = module, step

    def forward(self, *batch: Any) -> Tensor:
        return self.step(self.module, *batch)


def _training_step(module: Any, batch: Any) -> Tensor:
    return module.training_step(batch, 0)


def _denoise(module: Any, images: Tensor) -> Tensor:
    return F.mse_loss(module(images), images)


def _classify(module: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(module.head(F.max_pool1d(module.trunk(batch[0]), 4).mean(-1)), batch[1])


def _nothing(*_: Any, **__: Any) -> None:
    """What `log` does without a Trainer."""


EXAMPLES: dict[str, dict[str, int]] = {
    "gene_transformer": {"cells": 8, "length": 256},
    "geneformer": {"cells": 8, "length": 192},
    "gpt2": {"texts": 8, "length": 128},
    "vit": {"images": 8},
    "unet": {"images": 4, "side": 64},
    "evoformer": {"samples": 1, "side": 64},
    "wide_mlp": {"cells": 64},
    "cnn": {"samples": 16, "length": 2048},
}
"""Modules of examples/any_module with the sizes of their batch; these step their optimisers themselves:"""
STEPS = {"unet": _denoise, "cnn": _classify}


def build_example(name: str, *, quick: bool) -> tuple[nn.Module, tuple[Any, ...]]:
    """A module that computes the loss of an example, without dropout, and a batch.

    Raises:
        ImportError: A package that the example needs is not there.
    """
    file = example(name)
    torch.manual_seed(0)
    kinds = (c for c in vars(file).values() if isinstance(c, type) and c.__module__ == file.__name__)
    (kind,) = (c for c in kinds if hasattr(c, "training_step"))
    module = kind()
    module.log = _nothing
    batch = file.make_batch(**({} if quick else EXAMPLES[name]))
    return Loss(module, STEPS.get(name, _training_step)).eval(), (batch,)


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
