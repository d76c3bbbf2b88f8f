"""Which rows meet which keys in bucketed attention, and which buckets are computed together.

    bucket p: rows [p w, (p + 1) w), keys [b + (p - 1) w, b + (p + 2) w) as far as there are any       b keys before

Most buckets have 3w keys; a group has several of them, at least three buckets apart: their runs of keys do not overlap,
so that one product of matrices per group can add to all of them. The buckets at the ends of the sequence have fewer
keys and are groups of one.

Legend: w window.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

APART = 3


class Group(NamedTuple):
    """Buckets that are computed together.

    Attributes:
        place: The first bucket, counted from the first key.
        step: Buckets from one to the next.
        n_buckets: How many they are.
        own: First row of the first bucket, and rows of every bucket.
        near: First key of the first bucket, and keys of every bucket.
        missing: Rows that fill the last bucket of the sequence and are met too.
    """

    place: int
    step: int
    n_buckets: int
    own: tuple[int, int]
    near: tuple[int, int]
    missing: int

    @property
    def n_scores(self) -> int:
        """Scores of its rows, those of all missing rows counted once."""
        return self.n_buckets * self.own[1] * (self.near[1] + (self.missing > 0))


@dataclass(frozen=True, kw_only=True, slots=True)
class Band:
    """Rows of some buckets of a sequence, and the keys they meet.

    Attributes:
        rows: Rows; they begin with a whole bucket.
        keys: Keys; only the last bucket of them may be cut short.
        before: Keys before that of the first row, whole buckets.
        together: Most buckets that a group may have.
        sampled: Give one group or slab of each size only: tensors without values need no more memory for the others.
    """

    rows: int
    keys: int
    window: int
    before: int
    together: int
    sampled: bool = False

    @property
    def n_key_buckets(self) -> int:
        """Buckets that the keys fill."""
        return -(-self.keys // self.window)

    @property
    def largest(self) -> int:
        """Buckets of the largest group."""
        first, last = self._full
        return max(1, -(-(last - first) // self._step))

    @property
    def _n_buckets(self) -> int:
        return -(-self.rows // self.window)

    @property
    def _full(self) -> tuple[int, int]:
        """The buckets [first, last) that meet 3w keys."""
        # the first bucket of the sequence has no keys before it; the last meets fewer, and maybe the rows that fill it
        first = 0 if self.before else 1
        return first, max(first, min(self._n_buckets, (self.keys - self.before) // self.window - 1))

    @property
    def _step(self) -> int:
        first, last = self._full
        # as few groups as `together` allows, their buckets evenly apart: runs of equal distance are one strided view
        return max(APART, -(-(last - first) // self.together))

    def groups(self) -> list[Group]:
        """Every bucket of rows in exactly one group, unless sampled."""
        found = self.all_groups()
        if not self.sampled:
            return found
        return list({(g.n_buckets, g.own[1], g.near[1]): g for g in found}.values())

    def all_groups(self) -> list[Group]:
        """Every bucket of rows in exactly one group."""
        (first, last), step = self._full, self._step
        # group i: the buckets first + i, first + i + step, ...; with a step of 3 or more no two of them meet a key, so
        # that a batched product may add to the keys' gradients in place
        full = [self._group(i, -(-(last - i) // step)) for i in range(first, min(first + step, last))]
        ends = [self._group(i, 1) for i in range(self._n_buckets) if not first <= i < last]
        return full + ends

    def _group(self, bucket: int, n_buckets: int) -> Group:
        w, first = self.window, bucket * self.window
        own = self.before + first
        start, end = max(own - w, 0), min(own + 2 * w, self.n_key_buckets * w)
        # keys up to `end` are met; those from `stop` on are the zeros that fill the last bucket, and are only counted
        stop = min(end, self.keys)
        return Group(
            place=own // w,
            step=self._step,
            n_buckets=n_buckets,
            own=(first, min(w, self.rows - first)),
            near=(start, stop - start),
            missing=end - stop,
        )

    def own(self, rows: Tensor, group: Group) -> Tensor:
        """The rows of a group's buckets, [bucket, row, D]; a view."""
        return _runs(rows, *group.own, group.step * self.window, group.n_buckets)

    def near(self, keys: Tensor, group: Group) -> Tensor:
        """The keys that a group's buckets meet, [bucket, key, D]; a view."""
        return _runs(keys, *group.near, group.step * self.window, group.n_buckets)

    def slabs(self, keys: Tensor) -> list[tuple[int, Tensor]]:
        """All keys once, unless sampled, a few buckets at a time: the first bucket's place, and a view of the keys."""
        w, whole, most = self.window, self.keys // self.window, self.largest
        places = range(0, whole, most)[: 1 if self.sampled else None]
        found = [(place, _runs(keys, place * w, w, w, min(most, whole - place))) for place in places]
        return found + ([(whole, keys[None, whole * w :])] if self.keys % w else [])


def _runs(rows: Tensor, first: int, length: int, step: int, count: int) -> Tensor:
    # a view, not a gather: what is written to it lands in the rows
    return rows[first:].unfold(0, length, step)[:count].transpose(1, 2)
