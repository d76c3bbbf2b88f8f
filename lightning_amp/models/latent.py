"""Latents of cells or vertices, their noise, and the library a cell is decoded with."""

from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lightning_amp.models.keyed_noise import keyed_normal
from lightning_amp.shapes import Library

if TYPE_CHECKING:
    from lightning_amp.data.batch import CellBatch

LEAST_LIBRARY = 1e-8
"""Stands in for the library of a cell without counts, whose likelihood is then 1 in the limit."""


class Latent(NamedTuple):
    """Normal distribution and a sample of it, each [row, dim]."""

    loc: Tensor
    std: Tensor
    sample: Tensor


def sample(
    loc: Float[Tensor, "row dim"],
    std: Float[Tensor, "row dim"],
    *,
    draw: Int[Tensor, " row"] | None,
    stream: int = 0,
) -> Latent:
    """Draw from Normal(loc, std), by the rows' keys or, without them, by the default generator."""
    return Latent(loc, std, loc + std * noise_for(loc, draw=draw, stream=stream))


def noise_for(
    like: Float[Tensor, "row dim"], *, draw: Int[Tensor, " row"] | None, stream: int
) -> Float[Tensor, "row dim"]:
    """Standard normal noise, by the rows' keys or, without them, by the default generator."""
    if draw is None:
        return torch.randn_like(like)
    return keyed_normal(draw, like.shape[1], stream=stream, dtype=like.dtype)


def library_of(cells: "CellBatch") -> Library:
    """Library of each cell, positive."""
    return cells["library"].clamp_min(LEAST_LIBRARY)
