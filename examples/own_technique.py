"""A signal and a technique of your own: the Hi-C encoder's first layer reads the non-zero counts only.

    python examples/own_technique.py

Most counts of single cells are zero, and log1p leaves them zero, so y = x W^T + b is a product of a sparse and a dense
matrix, exactly. The layer keeps the non-zeros of x for the backward pass instead of all of x, [B, F].
"""

import copy
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from lightning.pytorch import Trainer
from torch import nn

import lightning_amp
from lightning_amp.costs.model_shape import ModelShape
from lightning_amp.data.prepare.synthetic import synthesize

FEWEST_ZEROS = 0.95


def look_for_zeros(profile: lightning_amp.Profile) -> tuple[bool, str]:
    """A signal: whether it is raised, and the numbers behind it. No matrix is read, and nothing is run."""
    hic = profile.modality("hic")
    if hic is None or hic.zeros is None:
        return False, "no Hi-C counts"
    return hic.zeros >= FEWEST_ZEROS, f"{hic.zeros:.1%} of the Hi-C counts are zero (from {FEWEST_ZEROS:.0%})"


@dataclass(frozen=True)
class SparseInput:
    """What a rule of the plan asks for; a technique with settings has them as fields."""


class SparseLinear(nn.Linear):
    """A Linear layer for rows that are mostly zeros."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """y = x W^T + b, for x [cell, feature]."""
        return torch.sparse.mm(x.to_sparse(), self.weight.T) + self.bias


def install(layer: nn.Module, spec: SparseInput, mesh: object) -> nn.Module:
    """The replacement of a layer. It shares the parameters, so optimisers and checkpoints see no difference."""
    if type(layer) is not nn.Linear or layer.bias is None:
        raise lightning_amp.InstallError(
            f"S6 does not support {type(layer).__name__!r}; it replaces torch.nn.Linear with a bias only:"
            " leave S6 out, or S2, which splits the same layers"
        )
    sparse = copy.copy(layer)
    sparse.__class__ = SparseLinear
    return sparse


def shape_after(shape: ModelShape, model_ranks: int) -> ModelShape:
    """For the memory model: of the logarithms [B, F] at most 5 % are kept, each with 16 bytes of row and column."""
    entries = shape.batch_size * sum(shape.decoder.features)
    saved = round(entries * (shape.element_bytes - (1 - FEWEST_ZEROS) * (shape.element_bytes + 16)))
    return replace(shape, base_activation_bytes=max(0, shape.base_activation_bytes - saved))


lightning_amp.register_signal("SPARSE_INPUT", look_for_zeros)
lightning_amp.register_technique(
    "S6",
    title="sparse input",
    shrinks="[B, F] to its non-zeros",
    spec=SparseInput,
    targets=lambda shape: [(layer, SparseInput()) for layer in shape.wide_layers],
    install=install,
    signal="SPARSE_INPUT",
    shape_after=shape_after,
)


def train(folder: Path, *, devices: int = 2) -> None:
    """Train for a moment on synthetic cells with few contacts; the plan is shown before the first step."""
    data = folder / "data"
    if not data.exists():  # every rank runs this script; the first makes the data before it starts the others
        folder.mkdir(parents=True, exist_ok=True)
        synthesize(data, cells=96, bins=200, strata=12, depth=100)
    quiet = {"logger": False, "enable_checkpointing": False}
    trainer = Trainer(strategy="amp", accelerator="cpu", devices=devices, max_epochs=2, **quiet)
    trainer.fit(lightning_amp.GLUE(latent_dim=32), lightning_amp.SingleCellDataModule(data, batch_size=16))


if __name__ == "__main__":
    train(Path("runs/own_technique"))
