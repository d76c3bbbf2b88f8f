"""Rotate rows by their position, pair of channels by pair of channels, one bucket after the other.

    R(i): z -> z exp(i f sqrt(-1))      z = a + b sqrt(-1),  a of channel c, b of c + D/2,  f = 10000^(-2c/D)

Turned rows are complex numbers, one per pair, because turning is then one product. Their real and imaginary parts are D
channels in another order, the same for all rows, and inner products do not mind. Position i = j w + p is turned by the
angles of p and of j w, so that the tables have a row per place in a bucket and a row per bucket.

The frequencies are rounded to float32 whatever the dtype, because the reference's are. Positions can be large: an angle
is a product of 24 bits and a whole number, which float64 holds exactly up to 2^29 rows. The tables, 2 (w + W) D
numbers, are made once for all attention of the same sizes: making them takes as many operators as attention itself.

Legend: bucket (any number of them), row (of a bucket, w or fewer), dim (D), pair (D / 2), w window, W buckets.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from jaxtyping import Complex, Float
from torch import Tensor, nn

from lightning_amp.footprint.target_device import launches_operators
from lightning_amp.techniques.hic.attention.bucket_runs import turned_at_once
from lightning_amp.techniques.hic.attention.sizes import ROTARY_BASE

KEPT = 16
"""Sizes whose tables, masks and zeros are kept; a model has one for every decoder, and nodes some more."""


def rotary(dim: int, window: int, n_buckets: int, *, dtype: torch.dtype, like: Tensor) -> "Rotary":
    """Tables for a device, new or kept, of `n_buckets` places; what is turned is float32 or float64, `dtype`."""
    found: Rotary = kept(Rotary, like)(dim, window, n_buckets, dtype, like.device, launches_operators(like))
    return found


class Rotary:
    """Turns the rows of buckets; made by `rotary`."""

    def __init__(
        self, dim: int, window: int, n_buckets: int, dtype: torch.dtype, device: torch.device, launched: bool
    ) -> None:
        exponent = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
        frequency = (1.0 / ROTARY_BASE**exponent).double()

        def table(n: int, distance: int) -> tuple[Tensor, Tensor]:
            """Factors that turn, and that turn back."""
            position = torch.arange(0, n * distance, distance, dtype=torch.float64, device=device)
            angle = position[:, None] * frequency
            there = torch.complex(angle.cos().to(dtype), angle.sin().to(dtype))
            # resolved once: a lazy conjugate is resolved again in every product
            return there, there.conj().resolve_conj()

        self._within = table(window, 1)
        self._between = [factors[:, None] for factors in table(n_buckets, window)]
        self._parts: dict[tuple[tuple[tuple[int, int], ...], bool], Tensor] = {}
        self._launched = launched

    def turn(
        self,
        x: Complex[Tensor, "bucket row pair"],
        # runs of places that the buckets have, one after the other: the first one, and how many
        *places: tuple[int, int],
        back: bool = False,  # turn the other way round
        out: Complex[Tensor, "bucket row pair"] | None = None,
    ) -> None:
        """Multiply by R(i), or by R(i)^T, in place or into other memory."""
        within, part, n_rows = self._within[back], self._part(places, back), x.shape[1]
        out = x if out is None else out
        if not self._at_once(len(x)):
            x = torch.mul(x, within if n_rows == len(within) else within[:n_rows], out=out)
        elif n_rows < len(within):
            part = part[:, :n_rows]
        torch.mul(x, part, out=out)

    def _part(self, places: tuple[tuple[int, int], ...], back: bool) -> Tensor:
        """Factors of some buckets, of all their rows or of the first ones; kept, for a part is an operator."""
        part = self._parts.get((places, back))
        if part is None:
            parts = [self._between[back][place : place + n] for place, n in places]
            with torch.inference_mode(mode=False), torch.no_grad():
                part = parts[0] if len(parts) == 1 else torch.cat(parts)
                part = part * self._within[back] if self._at_once(len(part)) else part
            self._parts[places, back] = part
        return part

    def _at_once(self, n_buckets: int) -> bool:
        n_rows, n_pairs = self._within[0].shape
        return turned_at_once(n_buckets * n_rows, dim=2 * n_pairs, launched=self._launched)


def kept(make: Callable[..., Any], like: Tensor) -> Callable[..., Any]:
    """`make`, or one that keeps what it makes: a fake tensor is of no use to a real one, nor to another mode."""
    return make if type(like) not in (Tensor, nn.Parameter) else partial(_kept, make)


@lru_cache(maxsize=KEPT)
def _kept(make: Callable[..., Any], *sizes: Any) -> Any:
    # tables made in inference mode could not be used outside of it
    with torch.inference_mode(mode=False), torch.no_grad():
        return make(*sizes)


def forget_kept() -> None:
    """Make tables, masks and zeros anew where they are needed next, as in a new process."""
    _kept.cache_clear()


def to_pairs(
    x: Float[Tensor, "*rows dim"], *, out: Complex[Tensor, "*rows pair"] | None = None
) -> Complex[Tensor, "*rows pair"]:
    """Channels c and c + D/2 as one complex number each."""
    a, b = x.chunk(2, dim=-1)
    return torch.complex(a, b, out=out)


def from_pairs(x: Float[Tensor, "*rows pair 2"], out: Float[Tensor, "*rows dim"]) -> None:
    """Write real and imaginary parts as channels again."""
    *rows, n_pairs, _ = x.shape
    out.view(*rows, 2, n_pairs).copy_(x.mT)
