"""Draw random numbers that are functions of a cell's key, not of the order in which they are drawn.

A batch split over any number of devices then draws the same numbers. Each number is a hash of (draw, stream,
column): rounds of a 32-bit mixing function, which is a bijection, so two cells with different keys never share
a row. Hashes are computed in int64 with factors below 2^31, so no product overflows on any device.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from lightning_amp.errors import ModelError

MASK = 0xFFFFFFFF
FIRST_FACTOR, SECOND_FACTOR = 0x7FEB352D, 0x45D9F3B
STREAM_STEP = 0x1B873593
BITS = 23
"""Bits of a uniform number: the largest one is still below 1 in float32."""


def keyed_uniform(
    draw: Int[Tensor, " cell"], width: int, *, stream: int, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "cell width"]:
    """Return uniform numbers in the open interval (0, 1).

    Args:
        draw: key of each cell, in [0, 2^31).
        stream: separates uses of the same key.
    """
    return _uniform(draw, width, 3 * stream).to(dtype)


def keyed_normal(
    draw: Int[Tensor, " cell"], width: int, *, stream: int, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "cell width"]:
    """Return standard normal numbers by the Box-Muller transform; arguments as in `keyed_uniform`."""
    # each stream has three hashes: one for uniform numbers, two for the inputs of Box-Muller
    radius = (-2 * _uniform(draw, width, 3 * stream + 1).log()).sqrt()
    return (radius * (2 * math.pi * _uniform(draw, width, 3 * stream + 2)).cos()).to(dtype)


class KeyedDropout(nn.Module):
    """Dropout whose mask is a function of the cells' keys.

    Args:
        p: probability of a zero.
        stream: separates this layer from other users of the same keys.

    Raises:
        ModelError: p is not in [0, 1).
    """

    def __init__(self, p: float, *, stream: int):
        super().__init__()
        if not 0 <= p < 1:
            raise ModelError(f"dropout is {p!r}; choose a probability in [0, 1), 0 for none")
        self.p = p
        self.stream = stream

    def extra_repr(self) -> str:
        """Settings shown by `repr`."""
        return f"p={self.p}, stream={self.stream}"

    def forward(
        self, x: Float[Tensor, "cell hidden"], draw: Int[Tensor, " cell"] | None
    ) -> Float[Tensor, "cell hidden"]:
        """Apply dropout; without keys, with the default generator."""
        if draw is None or not self.training or self.p == 0:
            return F.dropout(x, self.p, self.training)
        kept = keyed_uniform(draw, x.shape[1], stream=self.stream) >= self.p
        return x * kept / (1 - self.p)


def _uniform(draw: Tensor, width: int, stream: int) -> Tensor:
    # added after the first mix: if it were added to the key, a stream of one cell would equal a stream of another cell
    row = (_mix(draw) + STREAM_STEP * stream) & MASK
    column = _mix(torch.arange(1, width + 1, device=draw.device))
    bits = _mix(_mix(row)[:, None] ^ column)
    # the middle of the interval, never 0: Box-Muller takes the logarithm
    uniform: Tensor = ((bits >> 32 - BITS).to(torch.float64) + 0.5) / 2**BITS
    return uniform


def _mix(h: Tensor) -> Tensor:
    # xor-shifts and odd factors modulo 2^32 are invertible, so different keys stay different
    h = ((h ^ (h >> 16)) * FIRST_FACTOR) & MASK
    h = ((h ^ (h >> 15)) * SECOND_FACTOR) & MASK
    return h ^ (h >> 16)
