"""Compute runs of buckets for banded_softmax.py in preallocated memory; legend: that of banded_softmax.py."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_amp._torch import past_threshold, softmax_backward
from lightning_amp.footprint.equal_parts import leaves_out_equal
from lightning_amp.footprint.operator_rates import standing_for
from lightning_amp.footprint.target_device import launches_operators
from lightning_amp.techniques.hic.attention.bucket_runs import Band, BucketRun
from lightning_amp.techniques.hic.attention.rotary import from_pairs, rotary, to_pairs
from lightning_amp.techniques.hic.attention.sizes import LEAST_NORM, SELF_SCORE, type_of_sums


class BucketWork:
    """Memory that all runs reuse, and the computations in it.

    `queries` holds the rotated queries of a run, `rows` results for these rows, `kept` all weights by run. They are not
    one tensor: the allocator returns memory of that size to the system, and getting it again costs a CPU as much time
    as the product that is saved.

    Products use the dtype `met_in`, except in a run that counts missing rows: the score log(number of rows) would be
    wrong by one percent in bfloat16.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        values: Tensor,
        band: Band,
        met_in: torch.dtype,  # dtype of products: that of the inputs, at least float32, or bfloat16
        *,
        shared_qk: bool,  # whether the keys are the queries
        back: bool = False,  # for a backward pass
        keep: bool = False,  # keep all weights
        kept: Sequence[Tensor] = (),  # weights that were kept, by run
    ) -> None:
        self.band, self._dim, self.scale = band, q.shape[1], q.shape[1] ** -0.5
        self._dtype, self._met_in = type_of_sums(q.dtype, k.dtype, values.dtype), met_in
        self._cast: dict[str, Tensor] = {}
        self._runs = dict.fromkeys(band.runs, 1)
        if leaves_out_equal(q):
            # without values, the second run of a shape needs no more memory
            same = {_shape_of(run): run for run in band.runs}
            self._runs = Counter(same[_shape_of(run)] for run in band.runs)
        self._before, self._n_places = band.around[0], band.n_key_buckets + sum(band.around)
        # one more position than there are buckets: a query is rotated as a row of the next bucket
        self._rotary = rotary(self._dim, band.window, self._n_places + 1, dtype=self._dtype, like=q)
        # keys are the queries, and one run has all buckets: rows are then rotated from the keys' pairs, and gradients
        # are rotated back together, which saves operators
        self.at_once = shared_qk and band.at_once
        self._known = bool(kept)
        runs = band.runs if keep or kept else ()
        kept = kept or [q.new_empty(self._shape(run), dtype=self.dtype_of(run)) for run in runs]
        self.kept = dict(zip(runs, kept, strict=True))
        scores_of = {run: self._shape(run, band.sizes.rows) for run in band.runs}
        most = max(scores_of, key=lambda run: math.prod(scores_of[run]) * self.dtype_of(run).itemsize, default=None)
        scores = (0,) if most is None else scores_of[most]
        of_scores = self._dtype if most is None else self.dtype_of(most)
        self._most, pairs = band.largest + sum(band.around), (band.largest, band.window, self._dim // 2)
        self._memory = {
            "scores": q.new_empty(scores, dtype=of_scores),
            "queries": q.new_empty(pairs, dtype=self._dtype.to_complex()),
        }
        if back or len(band.runs) != 1 or {met_in, values.dtype} != {self._dtype}:
            # otherwise the only run writes into the result
            self._memory["rows"] = q.new_empty((self._most, band.window, self._dim), dtype=self._dtype)
        if not self.kept:
            self._memory["weights"] = q.new_empty(scores, dtype=of_scores)

    def dtype_of(self, run: BucketRun) -> torch.dtype:
        """Return the dtype of a run's products."""
        return self._dtype if run.missing else self._met_in

    def runs(self) -> Iterator[BucketRun]:
        """Yield the runs of buckets; of equal ones that are not computed, one is counted for all."""
        for run, times in self._runs.items():
            with standing_for(times):
                yield run

    def chunks(self, run: BucketRun) -> Iterator[slice | None]:
        """Yield the rows of every bucket of a run that are computed at a time; None for all of them."""
        n_rows, most = run.own[1], self.band.sizes.rows
        if n_rows <= most:
            return iter([None])
        return (slice(first, min(first + most, n_rows)) for first in range(0, n_rows, most))

    def own(self, rows: Tensor, run: BucketRun) -> Tensor:
        """Return the rows of a run's buckets, [bucket, row, D], with zeros after the last one."""
        first, n_rows = run.own
        part = _rows(rows, first, first + run.n_buckets * n_rows)
        return part.view(run.n_buckets, n_rows, self._dim)

    def near(self, values: Tensor, run: BucketRun) -> Tensor:
        """Return the values for a run's buckets, [bucket, key, D], with zeros outside the sequence."""
        w, (first, n_keys) = self.band.window, run.near
        part = _rows(self._met("values", values, run), first, first + (run.n_buckets - 1) * w + n_keys)
        # the view overlaps: the keys of a bucket start w rows after those of the previous bucket
        row, channel = part.stride()
        return part.as_strided((run.n_buckets, n_keys, self._dim), (w * row, row, channel))

    def near_keys(self, keys: Tensor, run: BucketRun) -> Tensor:
        """Return the rotated keys for a run's buckets, [bucket, key, D]."""
        return self._near_rows(self._met("keys", keys, run), run)

    def _near_rows(self, keys: Tensor, run: BucketRun) -> Tensor:
        w, dim, (first, n_keys) = self.band.window, self._dim, run.near
        return keys.as_strided((run.n_buckets, n_keys, dim), (w * dim, dim, 1), (first + self._before * w) * dim)

    def add(self, sums: tuple[Tensor, ...], left: Tensor, right: Tensor, *, scale: float = 1.0) -> None:
        """Add left^T right to the sums; each sum has a block of consecutive columns of `left`."""
        left = left.mT
        parts = torch.split(left, left.shape[1] // len(sums), dim=1) if len(sums) > 1 else (left,)
        # with a single run, the product of the buckets' own keys covers all keys, so it comes first and overwrites
        order = (1, 0, 2) if self.at_once else range(len(sums))
        for i in order:
            total, part, first = sums[i], parts[i], self.at_once and i == 1
            if part.dtype == total.dtype:
                total.baddbmm_(part, right, beta=0 if first else 1, alpha=scale)
            elif first:
                torch.mul(torch.bmm(part, right), scale, out=total)
            else:
                total.add_(torch.bmm(part, right), alpha=scale)

    def sums(self, grad: Tensor, run: BucketRun) -> tuple[Tensor, ...]:
        """Return views of the gradients of a run's keys, [bucket, key, D]: for the previous, own and next bucket."""
        if run.n_buckets == 1:
            return (self._near_rows(grad, run),)
        # within each of the three views the buckets do not overlap, so that a batched product may add to it: view i has
        # the keys of bucket p + i - 1 for row bucket p. In one view of 3w keys per bucket, every key would be in three
        # batches
        place, size = run.place - 1 + self._before, self.band.window * self._dim
        shape, stride = (3, run.n_buckets, self.band.window, self._dim), (size, size, self._dim, 1)
        return grad.as_strided(shape, stride, place * size).unbind()

    def inside(self, keys: Tensor) -> Tensor:
        """Return the rows of the sequence, [M, D], as a view of full buckets of keys."""
        return _flat(keys, self._before * self.band.window, self.band.keys, self._dim)

    def take_rows(self, run: BucketRun) -> Tensor:
        """Return memory for a run's weights @ values, or for score gradients @ keys, [bucket, row, D]."""
        dtype = self.dtype_of(run)
        if dtype == self._dtype:
            return self.take("rows", run)
        return self._take("rows", run.n_buckets, run.own[1], self._dim, dtype=dtype)

    def room_for_result(self, q: Tensor, dtype: torch.dtype) -> Tensor:
        """Allocate rows [N, D], or [bucket, row, D] if one run computes all of them."""
        if "rows" in self._memory:
            return torch.empty_like(q, dtype=dtype)
        run = self.band.runs[0]
        return q.new_empty((run.n_buckets, run.own[1], self._dim), dtype=dtype)

    def take(self, name: str, run: BucketRun) -> Tensor:
        """Return the memory `rows` or `queries` of a run."""
        memory, n_rows = self._memory[name], run.own[1]
        if n_rows < self.band.window:
            return self._take(name, run.n_buckets, n_rows, memory.shape[2])
        return memory if run.n_buckets == len(memory) else memory[: run.n_buckets]

    def copy_own(self, own: Tensor, run: BucketRun, rows: Tensor) -> None:
        """Write the rows of a run's buckets to their positions."""
        part = _rows(rows, run.own[0], min(run.own[0] + run.n_buckets * run.own[1], len(rows)))
        part.copy_(_flat(own, 0, len(part), self._dim))

    def turn_keys(self, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return all keys, normalised and rotated, and their divisors: [bucket, row, pair, 2] and [..., 1, 1]."""
        first, shape = self._before * self.band.window, (self._n_places, self.band.window, self._dim)
        pairs = to_pairs(_rows(k, -first, shape[0] * shape[1] - first).view(shape).to(self._dtype))
        if self.at_once:
            # before the keys are normalised
            self._rotary.turn(self._inner(pairs), self._next_places, out=self._memory["queries"])
        keys = torch.view_as_real(pairs)
        divisors = torch.linalg.vector_norm(keys, dim=(-2, -1), keepdim=True).clamp_min_(LEAST_NORM)
        keys.div_(divisors)
        for place, (slab,) in self._slabs(pairs):
            self._rotary.turn(slab, (place, len(slab)))
        return keys, divisors

    def turn_keys_back(self, keys: Tensor, divisors: Tensor, grad: Tensor, *, add_to: Tensor | None) -> Tensor | None:
        """Compute the gradient of the keys, [M, D], from that of the rotated keys, in the keys' memory.

        If the queries are the keys, it is added to their gradient `add_to` instead.
        """
        for place, (key, g, divisor) in self._slabs(keys, grad, divisors):
            flat = self._take("rows", *key.shape)
            # keys below the least norm are not normalised, so their norm has no gradient. The gradient along a
            # normalised key vanishes in the division by the norm; rotation preserves inner products, so it may be
            # subtracted before the gradient is rotated back
            along = torch.mul(key, g, out=flat).sum((-2, -1), keepdim=True)
            g.addcmul_(key, past_threshold(along, divisor, LEAST_NORM), value=-1)
            if add_to is None:
                g.div_(divisor)
            self._rotary.turn(torch.view_as_complex(g), (place, len(g)), back=True)
            if add_to is None:
                from_pairs(g, key)
            else:
                self._add_rows(g, divisor, place, add_to)
        return self.inside(keys) if add_to is None else None

    def _add_rows(self, pairs: Tensor, divisor: Tensor, place: int, rows: Tensor) -> None:
        """Add buckets of keys in pairs, from `place` on, divided, to the rows [M, D] of channels (see `to_pairs`)."""
        first = (place - self._before) * self.band.window
        n = min(pairs.shape[0] * self.band.window + first, len(rows)) - max(first, 0)
        own, by = (x.view(-1, *x.shape[2:])[max(-first, 0) :][:n] for x in (pairs, divisor))
        part = rows[max(first, 0) :][:n] if n < len(rows) else rows
        part.view(n, 2, -1).addcdiv_(own.mT, by)

    def turn_back_at_once(self, grad: Tensor, keys: Tensor, divisors: Tensor, dk: Tensor, n: int) -> Tensor:
        """Compute the gradient of queries and keys, [n, D], from those of the rotated ones, which are overwritten."""
        key, g, divisor = (self._inner(x) for x in (keys, dk, divisors))
        # the queries are no longer needed
        room = self._memory["queries"].view(self._dtype).view(key.shape)
        along = torch.mul(key, g, out=room).sum((-2, -1), keepdim=True)
        g.addcmul_(key, past_threshold(along, divisor, LEAST_NORM), value=-1)
        own = grad.to(self._dtype).view(key.shape)
        for pairs, places in ((own, self._next_places), (g, (self._before, len(g)))):
            self._rotary.turn(torch.view_as_complex(pairs), places, back=True)
        found = grad.new_empty((n, 2, self._dim // 2), dtype=self._dtype)
        shape = (n, 2, self._dim // 2)
        own, g = (x.as_strided(shape, (self._dim, 1, 2), x.storage_offset()) for x in (own, g))
        torch.addcdiv(own, g, divisor.as_strided((n, 1, 1), (1, 1, 1), divisor.storage_offset()), out=found)
        return found.view(n, self._dim)

    def _inner(self, buckets: Tensor) -> Tensor:
        """Return the buckets of keys without the buckets of zeros around them."""
        return buckets[self._before : self._before + self.band.n_key_buckets]

    @property
    def _next_places(self) -> tuple[int, int]:
        return self._before + 1, self.band.n_key_buckets

    def turn_queries(self, q: Tensor, run: BucketRun) -> Tensor:
        """Return the rotated queries of a run, [bucket, row, D]."""
        queries = self.take("queries", run)
        if not self.at_once:
            to_pairs(self.own(q, run).to(self._dtype), out=queries)
            self._rotary.turn(queries, (run.place + self._before + 1, run.n_buckets))
        return queries.view(self._dtype).to(self.dtype_of(run))

    def turn_queries_back(self, grad: Tensor, run: BucketRun, dq: Tensor) -> None:
        """Write the gradient of the queries from that of a run's rotated queries, which is overwritten."""
        pairs = grad.to(self._dtype).view(*grad.shape[:2], -1, 2)
        place = run.place + self._before + 1, run.n_buckets
        self._rotary.turn(torch.view_as_complex(pairs), place, back=True)
        part = _rows(dq, run.own[0], min(run.own[0] + run.n_buckets * run.own[1], len(dq)))
        from_pairs(pairs.as_strided((len(part), *pairs.shape[2:]), pairs.stride()[1:]), part)

    def weights(self, run: BucketRun, rows: slice | None, queries: Tensor, keys: Tensor) -> Tensor:
        """Return attention weights [bucket, row, column], kept or new."""
        shape = *queries.shape[:2], run.columns
        dtype = self.dtype_of(run)
        weights = part_of(self.kept[run], rows) if self.kept else self._take("weights", *shape, dtype=dtype)
        if self._known:
            return weights
        scores = self._take("scores", *shape, dtype=dtype)
        # beta 0: old values in this memory are not read, so NaN does not propagate
        of_keys(scores, run).baddbmm_(queries, keys.mT, beta=0, alpha=self.scale)
        self._with_themselves(scores, run, rows).fill_(SELF_SCORE)
        if run.missing:
            # n rows with score 0 add n e^0 to the normaliser, like one row with score log n; their value is 0, so the
            # product with the values leaves this column out
            scores.select(-1, -1).fill_(math.log(run.missing))
        if any(run.outside):
            self._outside(scores, run).fill_(-math.inf)
        return torch.softmax(scores, -1, out=weights)

    def score_gradients(
        self, run: BucketRun, rows: slice | None, weights: Tensor, grad: Tensor, values: Tensor
    ) -> Tensor:
        """Return the gradient of the scores, [bucket, row, column]."""
        ds = self._take("scores", *weights.shape, dtype=self.dtype_of(run))
        torch.bmm(grad, values.mT, out=of_keys(ds, run))
        if run.missing:
            # rows that are only counted have no value
            ds.select(-1, -1).zero_()
        if launches_operators(ds) and ds.dtype.itemsize >= 4:
            # CUDA's kernel would first allocate the product of both, as large as the scores; in bfloat16 that is half
            # as large, and an in-place product would be rounded
            total = ds.mul_(weights).sum(-1, keepdim=True)
            ds.addcmul_(weights, total, value=-1)
        else:
            # in place: every element is read before it is written
            softmax_backward(ds, weights, out=ds)
        # the score of a row with itself is a constant
        self._with_themselves(ds, run, rows).zero_()
        return ds

    def _shape(self, run: BucketRun, most_rows: int | None = None) -> tuple[int, int, int]:
        n_rows = run.own[1] if most_rows is None else min(run.own[1], most_rows)
        return run.n_buckets, n_rows, run.columns

    def _met(self, name: str, x: Tensor, run: BucketRun) -> Tensor:
        """Return rows in the dtype of a run's products; all rows are cast once, because several buckets use them."""
        dtype = self.dtype_of(run)
        if x.dtype == dtype:
            return x
        if dtype != self._met_in:
            return x.to(dtype)
        if name not in self._cast:
            self._cast[name] = x.to(dtype)
        return self._cast[name]

    def _slabs(self, *tensors: Tensor) -> Iterator[tuple[int, Sequence[Tensor]]]:
        """Split tensors into slabs of a few buckets: the first one's position, and the buckets of each."""
        most, n = self._most, len(tensors[0])
        if n <= most:
            yield 0, tensors
            return
        times = 1
        if leaves_out_equal(tensors[0]) and n > 2 * most:
            # without values, the second slab needs the same memory as all later ones
            times, tensors = -(-n // most) - 1, tuple(x[: 2 * most] for x in tensors)
        for k, slabs in enumerate(zip(*(torch.split(x, most) for x in tensors), strict=True)):
            with standing_for(times if k else 1):
                yield k * most, slabs

    def _with_themselves(self, scores: Tensor, run: BucketRun, rows: slice | None) -> Tensor:
        """Return the scores of rows with themselves, [bucket, row]."""
        first = run.place * self.band.window - run.near[0] + (rows.start if rows else 0)
        return scores.diagonal(first, 1, 2)

    def _outside(self, scores: Tensor, run: BucketRun) -> Tensor:
        """Return scores of the first bucket with keys before the sequence, and of the last one with keys after it."""
        w = self.band.window
        ends = [0] * run.outside[0] + [scores.stride(0) * (run.n_buckets - 1) + 2 * w] * run.outside[1]
        return scores.as_strided((len(ends), w, w), (ends[-1] - ends[0], 3 * w, 1), ends[0])

    def _take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        memory = self._memory[name]
        if dtype is not None and dtype != memory.dtype:
            memory = memory.view(-1).view(dtype)
        if memory.shape == shape:
            return memory
        # a shorter run uses the start of the memory, so that its rows are contiguous
        n = math.prod(shape)
        return (memory if memory.numel() == n else memory.view(-1)[:n]).view(shape)


def of_keys(scores: Tensor, run: BucketRun) -> Tensor:
    """Return the columns of keys, without that of missing rows."""
    return scores[..., : run.near[1]] if run.missing else scores


def _shape_of(run: BucketRun) -> tuple[object, ...]:
    return run.n_buckets, run.own[1], run.near[1], run.outside


def part_of(x: Tensor, rows: slice | None) -> Tensor:
    """Return some rows of every bucket; None returns all."""
    return x if rows is None else x[:, rows]


def _rows(x: Tensor, first: int, last: int) -> Tensor:
    """Return rows [first, last), with zeros outside of x; a view if all rows exist."""
    n = len(x)
    part = x if first <= 0 and last >= n else x[max(first, 0) : last]
    if first >= 0 and last <= n:
        return part
    return F.pad(part, (0, 0, max(-first, 0), max(last - n, 0)))


def _flat(x: Tensor, first: int, n: int, dim: int) -> Tensor:
    """Return rows [first, first + n) of `dim` elements as one view, in one operator; x must have no gaps."""
    return x.as_strided((n, dim), (dim, 1), first * dim)
