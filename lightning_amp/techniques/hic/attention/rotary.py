"""Rotate rows by their position, one pair of channels and one bucket at a time.

    R(i): z -> z exp(i f sqrt(-1))      z = a + b sqrt(-1),  a of channel c, b of c + D/2,  f = 10000^(-2c/D)

Rotated rows are complex numbers, one per pair of channels, so that a rotation is one product. Their real and imaginary
parts are the D channels in another order, which is the same for all rows and does not affect inner products. Position i
= j w + p is rotated by the angles of p and of j w, so the tables have one row per position in a bucket and one per
bucket.

The frequencies are rounded to float32 whatever the dtype, as in the reference. Positions can be large: an angle is the
product of 24 bits and a whole number, which float64 represents exactly up to 2^29 rows. The tables, 2 (w + W) D
numbers, are cached for all attention of the same sizes, because computing them takes as many operators as attention
itself.

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
"""Most sizes whose tables, masks and zeros are cached; a model has one per decoder, and nodes a few more."""


def rotary(dim: int, window: int, n_buckets: int, *, dtype: torch.dtype, like: Tensor) -> "Rotary":
    """Return tables for `n_buckets` buckets on a device, new or cached; `dtype` is float32 or float64."""
    found: Rotary = kept(Rotary, like)(dim, window, n_buckets, dtype, like.device, launches_operators(like))
    return found


class Rotary:
    """Rotates the rows of buckets; made by `rotary`."""

    def __init__(
        self, dim: int, window: int, n_buckets: int, dtype: torch.dtype, device: torch.device, launched: bool
    ) -> None:
        exponent = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
        frequency = (1.0 / ROTARY_BASE**exponent).double()

        def table(n: int, distance: int) -> tuple[Tensor, Tensor]:
            """Return the factors of the rotation, and of its inverse."""
            position = torch.arange(0, n * distance, distance, dtype=torch.float64, device=device)
            angle = position[:, None] * frequency
            there = torch.complex(angle.cos().to(dtype), angle.sin().to(dtype))
            # resolved once: a lazy conjugate would be resolved in every product
            return there, there.conj().resolve_conj()

        self._within = table(window, 1)
        self._between = [factors[:, None] for factors in table(n_buckets, window)]
        self._parts: dict[tuple[tuple[tuple[int, int], ...], bool], Tensor] = {}
        self._launched = launched

    def turn(
        self,
        x: Complex[Tensor, "bucket row pair"],
        # ranges of bucket positions, one after the other: first position, and number of buckets
        *places: tuple[int, int],
        back: bool = False,  # rotate by the inverse
        out: Complex[Tensor, "bucket row pair"] | None = None,
    ) -> None:
        """Multiply by R(i), or by R(i)^T, in place or into `out`."""
        within, part, n_rows = self._within[back], self._part(places, back), x.shape[1]
        out = x if out is None else out
        if not self._at_once(len(x)):
            x = torch.mul(x, within if n_rows == len(within) else within[:n_rows], out=out)
        elif n_rows < len(within):
            part = part[:, :n_rows]
        torch.mul(x, part, out=out)

    def _part(self, places: tuple[tuple[int, int], ...], back: bool) -> Tensor:
        """Return the factors of some buckets, of all rows or the first ones; cached, as slicing costs an operator."""
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
    """Return `make`, cached; of fake tensors in their own mode, where alone they are valid."""
    if type(like) in (Tensor, nn.Parameter):
        return partial(_kept, make)
    cache: dict[Any, Any] | None = getattr(getattr(like, "fake_mode", None), "cache", None)

    def make_once(*sizes: Any) -> Any:
        assert cache is not None, "the mode of a count has one"
        if (make, sizes) not in cache:
            cache[make, sizes] = _made(make, *sizes)
        return cache[make, sizes]

    return make if cache is None else make_once


def _made(make: Callable[..., Any], *sizes: Any) -> Any:
    # tables that are made in inference mode could not be used outside of it
    with torch.inference_mode(mode=False), torch.no_grad():
        return make(*sizes)


_kept = lru_cache(maxsize=KEPT)(_made)


def to_pairs(
    x: Float[Tensor, "*rows dim"], *, out: Complex[Tensor, "*rows pair"] | None = None
) -> Complex[Tensor, "*rows pair"]:
    """Return channels c and c + D/2 as one complex number each."""
    a, b = x.chunk(2, dim=-1)
    return torch.complex(a, b, out=out)


def from_pairs(x: Float[Tensor, "*rows pair 2"], out: Float[Tensor, "*rows dim"]) -> None:
    """Write real and imaginary parts back as channels."""
    *rows, n_pairs, _ = x.shape
    out.view(*rows, 2, n_pairs).copy_(x.mT)
