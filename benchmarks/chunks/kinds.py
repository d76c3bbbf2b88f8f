"""The kinds of models of AutoChunk's evaluation by the length of their input, and the losses of examples/any_module."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.chunks.models import GPT, ViT
from tests.any_module import load, make


class Loss(nn.Module):
    """The loss of a LightningModule without a Trainer."""

    def __init__(self, module: nn.Module, loss: Callable[[Any, Any], Tensor]) -> None:
        super().__init__()
        self.module, self.loss = module, loss

    def forward(self, batch: Any) -> Tensor:
        """Of a batch."""
        return self.loss(self.module, batch)


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
"""Modules of examples/any_module with the sizes of their batch; these two step their optimizers themselves:"""
LOSSES: dict[str, Callable[[Any, Any], Tensor]] = {
    "unet": lambda module, images: F.mse_loss(module(images), images),
    "cnn": lambda module, batch: F.cross_entropy(
        module.head(F.max_pool1d(module.trunk(batch[0]), 4).mean(-1)), batch[1]
    ),
}


def example_loss(name: str, **sizes: int) -> tuple[nn.Module, tuple[Any, ...]]:
    """The loss of a module of examples/any_module, without dropout, and a batch."""
    module, batch = make(name, **sizes)
    vars(module)["log"] = lambda *_, **__: None
    loss = LOSSES.get(name, lambda module, batch: module.training_step(batch, 0))
    return Loss(module, loss).eval(), (batch,)


@dataclass(frozen=True, slots=True)
class Model:
    """A kind of model of AutoChunk's evaluation.

    Attributes:
        make: The model.
        args: Its arguments, by the length: of text, or of the side of an image or of a table of pairs.
        length, quick_length: Lengths that are run.
        dims: Of the input that grow with the length.
    """

    name: str
    make: Callable[[], nn.Module]
    args: Callable[[int], tuple[Tensor, ...]]
    length: int
    quick_length: int
    dims: int

    def build(self) -> nn.Module:
        """In evaluation mode, always the same."""
        torch.manual_seed(0)
        return self.make().eval()


MODELS = (
    Model("GPT prefill", GPT, lambda n: (torch.randint(1000, (1, n)),), 1024, 128, 1),
    Model("ViT", ViT, lambda n: (torch.randn(1, 3, n, n),), 256, 64, 2),
    Model("U-Net with attention", lambda: load("unet").UNet(), lambda n: (torch.randn(2, 3, n, n),), 96, 48, 2),
    Model("Evoformer", lambda: load("evoformer").Block(32, 4), lambda n: (torch.randn(1, n, n, 32),), 96, 48, 2),
)
