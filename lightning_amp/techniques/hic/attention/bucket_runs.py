"""Group buckets of fused attention that are computed together, and buckets of sdpa per kernel call; no tensors.

    bucket p: rows [p w, (p + 1) w), keys [b + (p - 1) w, b + (p + 2) w)       b keys before the first row's

A run is one or more consecutive buckets, whose products are one batch. A bucket of a longer run attends to 3w keys:
keys outside the sequence are masked, and the zero rows that fill the last bucket are ordinary rows. A run of one bucket
attends to existing keys only, and the filling rows of the last bucket are only counted: no product is wasted, which
matters on a CPU.

A call has all buckets that attend to three buckets of keys. The first and the last bucket of the sequence attend to
two, and are another call, so that no key outside the sequence is multiplied.

Attention, the memory model and the time model use the same runs and calls. Legend: w window.
"""

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

CACHED_SCORES = 2**20
"""Scores computed at a time on a CPU: two such float32 tensors fit in its last-level cache."""
LAUNCHED_SCORES = 2**24
"""Scores at a time on an accelerator: 64 MiB, all of 500 kb bins with a window of 640."""
PADDED_WINDOW = 64
"""Widest window up to which a CPU computes masked scores faster than another run."""


TURNED_AT_ONCE = 2**22
"""Most elements of rotation factors that are stored for all rows of some buckets: 16 MiB."""


def turned_at_once(rows: int, *, dim: int, launched: bool) -> bool:
    """Whether full buckets are rotated by one product with a table of their size, instead of two with small ones.

    On a CPU (not `launched`), small tables are read from the cache.
    """
    return launched and rows * dim <= TURNED_AT_ONCE


class RunSizes(NamedTuple):
    """Sizes of a run."""

    buckets: int
    rows: int  # rows of a bucket computed at a time; fewer than all only if a run is one bucket
    padded: bool  # whether the buckets at the ends of the sequence are in a run with others


class BucketRun(NamedTuple):
    """Buckets that are computed together."""

    place: int  # the first bucket, counted from the first key
    n_buckets: int
    # first row of the first bucket, and rows of every bucket; rows beyond the sequence are zeros
    own: tuple[int, int]
    # first key of the first bucket, and keys of every bucket; keys outside the sequence are zeros
    near: tuple[int, int]
    # whether the first w keys of the first bucket, and the last w of the last, are masked
    outside: tuple[bool, bool] = (False, False)
    missing: int = 0  # rows that fill the last bucket of the sequence; attended to, but not among the keys

    @property
    def columns(self) -> int:
        """Number of scores of a row: one per key, and one for all missing rows together."""
        return self.near[1] + (self.missing > 0)

    @property
    def n_pairs(self) -> int:
        """Number of pairs of a row and a key that are multiplied."""
        return self.n_buckets * self.own[1] * self.near[1]

    @property
    def n_scores(self) -> int:
        """Number of scores of all its rows."""
        return self.n_buckets * self.own[1] * self.columns


class Band(NamedTuple):
    """Rows of some buckets of a sequence, and the keys that they attend to."""

    rows: int  # rows; they start with a full bucket
    keys: int  # keys; only the last bucket of keys may be incomplete
    window: int
    before: int  # keys before that of the first row, full buckets
    sizes: RunSizes

    @property
    def n_key_buckets(self) -> int:
        """Number of buckets that the keys fill."""
        return -(-self.keys // self.window)

    @property
    def runs(self) -> tuple[BucketRun, ...]:
        """Runs, in order; every bucket of rows is in exactly one."""
        return _runs(self)

    @property
    def at_once(self) -> bool:
        """Whether the keys are those of the rows, and one run has all of several buckets."""
        return self.rows == self.keys and len(self.runs) == 1 and self.runs[0].n_buckets > 1

    def copies(self, run: BucketRun) -> tuple[bool, bool]:
        """Whether a run's rows, and their keys, are copied to add zero rows."""
        last = run.near[0] + (run.n_buckets - 1) * self.window + run.near[1]
        return run.own[0] + run.n_buckets * run.own[1] > self.rows, run.near[0] < 0 or last > self.keys

    @property
    def largest(self) -> int:
        """Number of buckets of the largest run."""
        return max((run.n_buckets for run in self.runs), default=1)

    @property
    def around(self) -> tuple[bool, bool]:
        """Whether a bucket of zeros is required before the keys, and after them."""
        return any(run.outside[0] for run in self.runs), any(run.outside[1] for run in self.runs)


def run_sizes(window: int, *, launched: bool) -> RunSizes:
    """Choose the buckets of a run, and the rows of them at a time; `launched`: as few runs as device memory allows."""
    most, per_bucket = LAUNCHED_SCORES if launched else CACHED_SCORES, 3 * window**2
    together = max(1, most // per_bucket)
    # one bucket may be too large: its rows are split as evenly as possible
    rows = -(-window // -(-together * per_bucket // most))
    return RunSizes(together, rows, padded=launched or window <= PADDED_WINDOW)


@lru_cache(maxsize=256)
def _runs(band: Band) -> tuple[BucketRun, ...]:
    n_buckets, first = -(-band.rows // band.window), 0
    if band.sizes.padded:
        return tuple(_run(band, *span) for span in _spans(0, n_buckets, band.sizes.buckets))
    # the first bucket of the sequence has no keys before it; the last one has fewer, perhaps with rows that fill it
    first = min(0 if band.before else 1, n_buckets)
    # the bucket before an incomplete one counts as an end too: it attends to the rows that fill the last bucket
    last = max(first, min(n_buckets, (band.keys - band.before) // band.window - 1))
    ends = [(p, 1) for p in range(first)], [(p, 1) for p in range(last, n_buckets)]
    return tuple(_run(band, *span) for span in (*ends[0], *_spans(first, last, band.sizes.buckets), *ends[1]))


def _spans(first: int, last: int, most: int) -> list[tuple[int, int]]:
    """Split buckets into as few runs as `most` allows, as evenly as possible: first bucket and number of buckets."""
    n_runs = -(-(last - first) // most)
    bounds = [first + (last - first) * i // n_runs for i in range(n_runs + 1)] if n_runs else []
    return [(a, b - a) for a, b in pairwise(bounds)]


def _run(band: Band, bucket: int, n_buckets: int) -> BucketRun:
    w, first = band.window, bucket * band.window
    start, whole = band.before + first - w, band.n_key_buckets * w
    if n_buckets > 1:
        outside = start < 0, start + (n_buckets + 2) * w > whole
        return BucketRun(start // w + 1, n_buckets, (first, w), (start, 3 * w), outside)
    # `place` below: the first bucket's own position is one after the first that it attends to
    begin, end = max(start, 0), min(start + 3 * w, whole)
    # keys up to `end` are attended to; those from `stop` on are zeros that fill the last bucket, and are only counted
    stop = min(end, band.keys)
    own = first, min(w, band.rows - first)
    return BucketRun(start // w + 1, 1, own, (begin, stop - begin), missing=end - stop)


class KernelCall(NamedTuple):
    """Buckets of rows that attend to the same number of buckets of keys."""

    rows: tuple[int, int, int]  # first bucket, stride, number of buckets
    # first bucket of keys of the first row bucket, stride, number of key buckets per row bucket
    keys: tuple[int, int, int]
    own: int  # index of the first row bucket's own keys; with two ends, that of the second one is 1


class KernelCalls(NamedTuple):
    """Kernel calls for the buckets of a run."""

    rows: int
    keys: int
    window: int
    before: int  # buckets of keys before the first row, 0 or 1

    @property
    def ends(self) -> tuple[bool, bool]:
        """Whether no bucket precedes the first one, and none follows the last one."""
        return self.before == 0, self.before + self.rows == self.keys

    @property
    def calls(self) -> tuple[KernelCall, ...]:
        """Calls; every bucket of rows is in exactly one."""
        return _calls(self)

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Rotation positions of the rows, then of the keys: a query is rotated as a row of the next bucket."""
        return (self.before + 1, self.rows), (0, self.keys)

    @property
    def around(self) -> tuple[int, int]:
        """Slots of zeros before the first slot of the keys' gradients, and after the last."""
        return 2 if self.ends[0] else 4, 2 if self.ends[1] else 4

    @property
    def slots(self) -> int:
        """Number of pairs of a bucket of rows and a bucket of keys that it attends to."""
        return sum(call.rows[2] * call.keys[2] for call in self.calls)


def calls_of(band: Band) -> KernelCalls:
    """Return the calls of some buckets of a sequence; keys further away than a bucket are not used."""
    w, before = band.window, min(band.before, band.window)
    n_rows = -(-band.rows // w)
    n_keys = -(-(band.keys - (band.before - before)) // w)
    return KernelCalls(n_rows, min(n_keys, before // w + n_rows + 1), w, before // w)


@lru_cache(maxsize=256)
def _calls(run: KernelCalls) -> tuple[KernelCall, ...]:
    if not run.rows:
        return ()
    (first, last), found = run.ends, []
    if first and last:
        # both ends attend to two buckets: one call with a stride from the first bucket to the last; keys of the last
        # bucket start at rows - 2, which is one less than the stride of its rows
        step = run.rows - 1
        found.append(
            KernelCall((0, step, 2), (0, step - 1, 2), 0) if run.rows > 1 else KernelCall((0, 0, 1), (0, 0, 1), 0)
        )
    elif first:
        found.append(KernelCall((0, 0, 1), (0, 0, 2), 0))
    elif last:
        found.append(KernelCall((run.rows - 1, 0, 1), (run.keys - 2, 0, 2), 1))
    inner = run.rows - first - last
    if inner > 0:
        found.append(KernelCall((int(first), 1, inner), (run.before + first - 1, 1, 3), 1))
    return tuple(found)
