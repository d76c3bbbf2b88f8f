"""Rows turned by their position, pair of channels by pair of channels, one bucket after the other.

    R(i): (a, b) -> (a cos i f - b sin i f, b cos i f + a sin i f)      a of channel c, b of c + D/2, f = 10000^(-2c/D)

A turned row times a turned row depends only on the difference of their positions. Position i = j w + p is turned by
the angles of j w and of p put together, so that the tables have a row per bucket and a row per place in a bucket.

The frequencies are rounded to float32 whatever the dtype, because the reference's are. Positions run along a sequence
and can be large: an angle is a product of 24 bits and a whole number, which float64 holds exactly up to 2^29 rows, and
its cosine is rounded once. float64 must exist on the device.

Legend: bucket (any number of them), row (of a bucket, w or fewer), dim (D).
"""

import torch
from jaxtyping import Float
from torch import Tensor

ROTARY_BASE = 10000.0


class Rotary:
    """Turns the rows of buckets.

    Args:
        n_buckets: Buckets that have a place, from 0.
        dtype: Of what is computed.
    """

    def __init__(
        self, dim: int, window: int, n_buckets: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        exponent = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
        frequency = 1.0 / ROTARY_BASE**exponent

        def table(n: int, distance: int) -> tuple[Tensor, Tensor]:
            position = torch.arange(0, n * distance, distance, dtype=torch.float64, device=device)
            angle = position[:, None] * frequency
            return angle.cos().to(dtype), angle.sin().to(dtype)

        self._within, self._between = table(window, 1), table(n_buckets, window)

    def turn(
        self,
        x: Float[Tensor, "bucket row dim"],
        out: Float[Tensor, "bucket row dim"],
        *,
        place: int,
        step: int = 1,
        back: bool = False,
    ) -> None:
        """Write R(i) x, or R(i)^T x, to `out`.

        Args:
            x: Buckets at the places `place`, `place + step`, ...
            out: Where to; other memory than x.
            place: Place of the first bucket.
            step: From one bucket's place to the next one's.
            back: Turn the other way round.
        """
        cos, sin = self._angles(x.shape[1], place, step, len(x))
        (a, b), (out_a, out_b) = x.chunk(2, dim=-1), out.chunk(2, dim=-1)
        sign = -1 if back else 1
        torch.mul(a, cos, out=out_a).addcmul_(b, sin, value=-sign)
        torch.mul(b, cos, out=out_b).addcmul_(a, sin, value=sign)

    def _angles(self, n_rows: int, place: int, step: int, count: int) -> tuple[Tensor, Tensor]:
        c, s = (table[:n_rows] for table in self._within)
        cos_place, sin_place = (table[place::step][:count, None] for table in self._between)
        cos, sin = c * cos_place, s * cos_place
        return cos.addcmul_(s, sin_place, value=-1), sin.addcmul_(c, sin_place)
