"""Group buckets of fused attention that are computed together, and of sdpa into calls of torch's kernels; no tensors.

    bucket p: rows [p w, (p + 1) w), keys [b + (p - 1) w, b + (p + 2) w)       b keys before the first row's

A run is a few buckets, one after the other, whose products are one batch. Every bucket of a run of several meets 3w
keys: those of buckets outside the sequence are masked, and rows that fill the last bucket are zeros like any others. A
run of one bucket meets the keys that exist, and what fills the last bucket is only counted: nothing is multiplied in
vain, which a CPU would feel.

A call has all buckets that meet three buckets of keys; the first bucket of the sequence and the last one meet two, and
are another call: no key outside the sequence is multiplied.

Attention, the memory model and the time model read the same runs and calls. Legend: w window.
"""

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

CACHED_SCORES = 2**20
"""Scores at a time on a CPU: two such tensors of float32 stay in its last cache."""
LAUNCHED_SCORES = 2**24
"""Scores at a time on a device that has its kernels launched: 64 MiB, all of 500 kb bins with a window of 640."""
PADDED_WINDOW = 64
"""Widest window up to which a CPU computes masked scores sooner than it starts another run."""


TURNED_AT_ONCE = 2**22
"""Numbers up to which the factors that turn the rows of some buckets are kept for all of them: 16 MiB."""


def turned_at_once(rows: int, *, dim: int, launched: bool) -> bool:
    """Whether rows of whole buckets are turned by one product with a table of their size, or two with small ones.

    A CPU, to which no kernels are launched, reads small tables from its cache.
    """
    return launched and rows * dim <= TURNED_AT_ONCE


class RunSizes(NamedTuple):
    """How much is computed at a time."""

    buckets: int
    rows: int  # of a bucket; fewer than all only where a run is one bucket
    padded: bool  # whether the buckets at the ends of the sequence are in a run with others


class BucketRun(NamedTuple):
    """Buckets that are computed together."""

    place: int  # the first bucket, counted from the first key
    n_buckets: int
    # first row of the first bucket, and rows of every bucket; those after the last one are zeros
    own: tuple[int, int]
    # first key of the first bucket, and keys of every bucket; those outside the sequence are zeros
    near: tuple[int, int]
    # whether the first w keys of the first bucket, and the last w of the last, are masked
    outside: tuple[bool, bool] = (False, False)
    missing: int = 0  # rows that fill the last bucket of the sequence, are met too and are not among the keys

    @property
    def columns(self) -> int:
        """Scores of a row: its keys, and one for all missing rows together."""
        return self.near[1] + (self.missing > 0)

    @property
    def n_pairs(self) -> int:
        """Pairs of a row and a key that are multiplied."""
        return self.n_buckets * self.own[1] * self.near[1]

    @property
    def n_scores(self) -> int:
        """Scores of all its rows."""
        return self.n_buckets * self.own[1] * self.columns


class Band(NamedTuple):
    """Rows of some buckets of a sequence, and the keys they meet."""

    rows: int  # rows; they begin with a whole bucket
    keys: int  # keys; only the last bucket of them may be cut short
    window: int
    before: int  # keys before that of the first row, whole buckets
    sizes: RunSizes

    @property
    def n_key_buckets(self) -> int:
        """Buckets that the keys fill."""
        return -(-self.keys // self.window)

    @property
    def runs(self) -> tuple[BucketRun, ...]:
        """Every bucket of rows in exactly one run, in their order."""
        return _runs(self)

    @property
    def at_once(self) -> bool:
        """Whether the keys are those of the rows, and one run has all buckets, which are several."""
        return self.rows == self.keys and len(self.runs) == 1 and self.runs[0].n_buckets > 1

    def copies(self, run: BucketRun) -> tuple[bool, bool]:
        """Whether a run's rows, and the keys they meet, are copied for zeros to be among them."""
        last = run.near[0] + (run.n_buckets - 1) * self.window + run.near[1]
        return run.own[0] + run.n_buckets * run.own[1] > self.rows, run.near[0] < 0 or last > self.keys

    @property
    def largest(self) -> int:
        """Buckets of the largest run."""
        return max((run.n_buckets for run in self.runs), default=1)

    @property
    def around(self) -> tuple[bool, bool]:
        """Whether a bucket of zeros is needed before the keys, and one after them."""
        return any(run.outside[0] for run in self.runs), any(run.outside[1] for run in self.runs)


def run_sizes(window: int, *, launched: bool) -> RunSizes:
    """Buckets of a run, and rows of them at a time; `launched`: as few runs as the memory of a device allows."""
    most, per_bucket = LAUNCHED_SCORES if launched else CACHED_SCORES, 3 * window**2
    together = max(1, most // per_bucket)
    # one bucket may be too large: its rows are taken in parts, as equal as can be
    rows = -(-window // -(-together * per_bucket // most))
    return RunSizes(together, rows, padded=launched or window <= PADDED_WINDOW)


@lru_cache(maxsize=256)
def _runs(band: Band) -> tuple[BucketRun, ...]:
    n_buckets, first = -(-band.rows // band.window), 0
    if band.sizes.padded:
        return tuple(_run(band, *span) for span in _spans(0, n_buckets, band.sizes.buckets))
    # the first bucket of the sequence has no keys before it; the last meets fewer, and maybe the rows that fill it
    first = min(0 if band.before else 1, n_buckets)
    # the bucket before a cut one counts as an end too: it meets the rows that fill the last bucket
    last = max(first, min(n_buckets, (band.keys - band.before) // band.window - 1))
    ends = [(p, 1) for p in range(first)], [(p, 1) for p in range(last, n_buckets)]
    return tuple(_run(band, *span) for span in (*ends[0], *_spans(first, last, band.sizes.buckets), *ends[1]))


def _spans(first: int, last: int, most: int) -> list[tuple[int, int]]:
    """First bucket and number of buckets of as few runs as `most` allows, as even as can be."""
    n_runs = -(-(last - first) // most)
    bounds = [first + (last - first) * i // n_runs for i in range(n_runs + 1)] if n_runs else []
    return [(a, b - a) for a, b in pairwise(bounds)]


def _run(band: Band, bucket: int, n_buckets: int) -> BucketRun:
    w, first = band.window, bucket * band.window
    start, whole = band.before + first - w, band.n_key_buckets * w
    if n_buckets > 1:
        outside = start < 0, start + (n_buckets + 2) * w > whole
        return BucketRun(start // w + 1, n_buckets, (first, w), (start, 3 * w), outside)
    # `place` below: the first bucket itself is one after the first that it meets
    begin, end = max(start, 0), min(start + 3 * w, whole)
    # keys up to `end` are met; those from `stop` on are the zeros that fill the last bucket, and are only counted
    stop = min(end, band.keys)
    own = first, min(w, band.rows - first)
    return BucketRun(start // w + 1, 1, own, (begin, stop - begin), missing=end - stop)


class KernelCall(NamedTuple):
    """Buckets of rows that meet the same number of buckets of keys."""

    rows: tuple[int, int, int]  # first bucket, distance from one to the next, how many
    # first bucket that the first one meets, distance from one to the next, how many each one meets
    keys: tuple[int, int, int]
    own: int  # place of the first one's own bucket among those it meets; the second one's, of two ends, is 1


class KernelCalls(NamedTuple):
    """How the buckets of a run are computed."""

    rows: int
    keys: int
    window: int
    before: int  # buckets of keys before the first row, 0 or 1

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


def calls_of(band: Band) -> KernelCalls:
    """The calls of some buckets of a sequence; keys further away than a bucket are not met."""
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
        # both ends meet two buckets: one call with a stride from the first bucket to the last
        # keys of the last bucket begin at the one before it, rows - 2, which is one less than the stride of its rows
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
