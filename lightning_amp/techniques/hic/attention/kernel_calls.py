"""Group buckets of attention into calls of torch's fused kernels (`sdpa`); no tensors.

    bucket p meets the key buckets p - 1, p and p + 1, counted with the buckets of keys before the first row

All buckets that meet three are one call. The first bucket of the sequence and the last one meet two, and are another
call: no key outside the sequence is multiplied. Rows that fill the last bucket are zeros like any others.

The attention (techniques/hic/attention/sdpa.py), the memory model and the time model read the same calls.
"""

from functools import lru_cache
from typing import NamedTuple

from lightning_amp.techniques.hic.attention.bucket_runs import Band


class KernelCall(NamedTuple):
    """Buckets of rows that meet the same number of buckets of keys.

    Attributes:
        rows: First bucket, distance from one to the next, how many.
        keys: First bucket that the first one meets, distance from one to the next, how many each one meets.
        own: Place of the first one's own bucket among those it meets; the second one's, of two ends, is 1.
    """

    rows: tuple[int, int, int]
    keys: tuple[int, int, int]
    own: int


class Calls(NamedTuple):
    """How the buckets of a run are computed.

    Attributes:
        before: Buckets of keys before the first row, 0 or 1.
    """

    rows: int
    keys: int
    window: int
    before: int

    @property
    def ends(self) -> tuple[bool, bool]:
        """Whether the first bucket has none before it, and the last one none after it."""
        return self.before == 0, self.before + self.rows == self.keys

    @property
    def calls(self) -> tuple[KernelCall, ...]:
        """Every bucket of rows in exactly one of them."""
        return _calls(self)

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """By which the rows and then the keys are turned: queries as the rows of the next bucket."""
        return (self.before + 1, self.rows), (0, self.keys)

    @property
    def around(self) -> tuple[int, int]:
        """Zeros before the first slot of the keys' gradients and after the last."""
        return 2 if self.ends[0] else 4, 2 if self.ends[1] else 4

    @property
    def slots(self) -> int:
        """Pairs of a bucket of rows and a bucket of keys that it meets."""
        return sum(call.rows[2] * call.keys[2] for call in self.calls)


def calls_of(band: Band) -> Calls:
    """The calls of some buckets of a sequence; keys further away than a bucket are not met."""
    w, before = band.window, min(band.before, band.window)
    n_rows = -(-band.rows // w)
    n_keys = -(-(band.keys - (band.before - before)) // w)
    return Calls(n_rows, min(n_keys, before // w + n_rows + 1), w, before // w)


@lru_cache(maxsize=256)
def _calls(run: Calls) -> tuple[KernelCall, ...]:
    if not run.rows:
        return ()
    (first, last), found = run.ends, []
    if first and last:
        step = run.rows - 1
        found.append(
            KernelCall((0, step, 2), (0, step - 1, 2), 0)
            if run.rows > 1
            else KernelCall((0, 0, 1), (0, 0, 1), 0)
        )
    elif first:
        found.append(KernelCall((0, 0, 1), (0, 0, 2), 0))
    elif last:
        found.append(KernelCall((run.rows - 1, 0, 1), (run.keys - 2, 0, 2), 1))
    inner = run.rows - first - last
    if inner > 0:
        found.append(KernelCall((int(first), 1, inner), (run.before + first - 1, 1, 3), 1))
    return tuple(found)
