"""Softmax attention of buckets of rows to their own and the two neighbouring buckets, forward and backward by hand.

    r_i = R(i) k_i / |k_i|      s_i = R(i + w) q_i      P = softmax(mask(D^-0.5 s r^T))      out = P v
    dv = P^T do                 dS = P * (do v^T - rowsum(P * do v^T)), 0 for a row with itself
    dq_i = D^-0.5 R(i + w)^T (dS r)_i       g = D^-0.5 dS^T s       dk_i = R(i)^T (g_i - r_i (r_i . g_i)) / |k_i|

R(i) is that of rotary.py. The reference counts positions along each bucket's 3w keys; here they count along the
sequence, which leaves all differences as they are: a key is turned once and not three times, and the keys of a bucket
are a run of rows. The w in R(i + w): the reference gives queries the last of the 3w positions. No neighbours are
gathered: the keys of a run of buckets are one view in which buckets overlap. Gradients are added to where they belong,
the keys' of a run in three products, one for each of the buckets that a bucket meets: in one product no two buckets
meet the same keys.

Which buckets are a run: planning/sizes/bucket_runs.py. In a run of several, keys outside the sequence are zeros that
are masked, and rows that fill the last bucket are zeros like any others. In a run of one bucket only the keys that
exist are computed; the rows that fill the last bucket are one more column in the softmax, with the score log(number of
them) and no value.

Exact up to rounding. Kept for the backward pass: q, k and values themselves, and P where that is asked for: scores and
softmax are then computed once, and one of seven products is saved. Held at most, in numbers, beside these:

    forward     r M D, |k| M, out N D, and the work             k M D before there is out, where it is padded
    backward    r M D, |k| M, do N D, dq N D, dk M D, dv M D, and the work
    the work    scores 2 G C 3w, G C 3w where P is kept; rows 2 G w D
    at an end   of a run of several buckets, copies of its values (G + 2) w D and of do and q G w D

M of these are whole buckets, and where runs of several have masked keys a bucket more at these ends.

Numbers below float32 are computed with in float32, under autocast too: all products of matrices have an `out=` or are
in place, and those autocast does not touch. Results are then held twice for a moment, and values of a run are copied.
On CUDA torch's backward pass of a softmax launches two kernels and makes a product of the scores of a run, G C 3w more
for a moment, which no count here sees. Second derivatives are refused by torch. Tensors without values (meta) pass
through one run of each shape: the memory is that of all runs, but operators are not to be counted there where there are
several.

Legend: row (N), key (M, those of the rows and of the neighbours), dim (D), w window, G buckets of a run, C rows of a
bucket at a time.
"""

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache, reduce
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_amp._torch import softmax_backward
from lightning_amp.parallel.attention.rotary import from_pairs, rotary, to_pairs
from lightning_amp.parallel.autograd.precomputed_gradients import wants_gradients
from lightning_amp.parallel.device_settings import launches_operators
from lightning_amp.planning.sizes.bucket_runs import Band, Run, RunSizes, run_sizes

SELF_SCORE = -5e4
LEAST_NORM = 1e-12


def banded_softmax(
    q: Float[Tensor, "row dim"],
    k: Float[Tensor, "key dim"],
    values: Float[Tensor, "key dim"],
    *,
    window: int,
    before: int,
    keep: bool = False,
) -> Float[Tensor, "row dim"]:
    """Attention of a run of buckets.

    Args:
        q: Queries; they begin with a whole bucket.
        k: Keys of the rows before, of the queries' rows and of the rows after.
        before: Keys before that of the first query, whole buckets.
        keep: Keep P for a backward pass.
    """
    keep = keep and wants_gradients((q, k, values))
    band = Band(len(q), len(k), window, before, _sizes(q, window))
    return cast(Tensor, _BandedSoftmax.apply(q, k, values, band, keep))  # type: ignore[no-untyped-call]


class _BandedSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, values: Tensor, band: Band, keep: bool) -> Tensor:
        ctx.band = band
        work = _Work(q, k, values, band, keep=keep)
        ctx.save_for_backward(q, k, values, *work.kept.values())
        keys, _ = work.turn_keys(k)
        out = torch.empty_like(q, dtype=values.dtype)
        for run in work.runs:
            queries, own_out = work.turn_queries(q, run), work.take("rows", run)
            near_keys, near_values = work.near_keys(keys, run), work.near(values, run)
            for rows in work.chunks(run):
                weights = work.weights(run, rows, _part(queries, rows), near_keys)
                torch.bmm(_of_keys(weights, run), near_values, out=_part(own_out, rows))
            work.copy_own(own_out, run, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, values, *kept = ctx.saved_tensors
        work = _Work(q, k, values, ctx.band, kept=kept)
        keys, norms = work.turn_keys(k)
        # every row is the query of one bucket, but the key of up to three: dq is written, dk and dv are added to
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(keys), torch.zeros_like(keys)
        for run in work.runs:
            queries, own_grad = work.turn_queries(q, run), work.own(grad, run)
            near_keys, near_values = work.near_keys(keys, run), work.near(values, run)
            own_dq, near_dk, near_dv = work.take("rows", run), work.sums(dk, run), work.sums(dv, run)
            for rows in work.chunks(run):
                own_queries, own_grads = _part(queries, rows), _part(own_grad, rows)
                weights = work.weights(run, rows, own_queries, near_keys)
                _add(near_dv, _of_keys(weights, run), own_grads)
                ds = _of_keys(work.score_gradients(run, rows, weights, own_grads, near_values), run)
                _add(near_dk, ds, own_queries, scale=work.scale)
                _part(own_dq, rows).baddbmm_(ds, near_keys, beta=0, alpha=work.scale)
            work.turn_queries_back(own_dq, run, dq)
        return (
            dq,
            work.turn_keys_back(keys, norms, dk).to(k.dtype),
            work.inside(dv).to(values.dtype),
            None,
            None,
        )


class _Work:
    """Memory that all runs use one after the other, and what is computed in it.

    `queries` holds the turned queries of a run, `rows` what is computed for these rows; `kept` all weights by run. They
    are not in one tensor, because memory of that size is given back to the system, and taking it anew costs a CPU as
    much time as the product that is saved.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        values: Tensor,
        band: Band,
        *,
        keep: bool = False,
        kept: Sequence[Tensor] = (),
    ) -> None:
        self.band, self._dim, self.scale = band, q.shape[1], q.shape[1] ** -0.5
        self._dtype = computed_in(q.dtype, k.dtype, values.dtype)
        # tensors without values need no more memory for the second run of a shape
        alike = {(run.n_buckets, run.own[1], run.near[1], run.outside): run for run in band.runs}
        self.runs = list(alike.values()) if q.is_meta else band.runs
        self._before, self._n_places = band.around[0], band.n_key_buckets + sum(band.around)
        # one more place than there are buckets: queries are turned as the rows of the next bucket
        self._rotary = rotary(self._dim, band.window, self._n_places + 1, dtype=self._dtype, like=q)
        self._known = bool(kept)
        runs = band.runs if keep or kept else ()
        kept = kept or [q.new_empty(self._shape(run), dtype=self._dtype) for run in runs]
        self.kept = dict(zip(runs, kept, strict=True))
        scores = max((self._shape(run, band.sizes.rows) for run in band.runs), key=math.prod, default=(0,))
        rows = band.largest + sum(band.around), band.window, self._dim
        self._memory = {
            "scores": q.new_empty(scores, dtype=self._dtype),
            "rows": q.new_empty(rows, dtype=self._dtype),
        }
        pairs = band.largest, band.window, self._dim // 2
        self._memory["queries"] = q.new_empty(pairs, dtype=self._dtype.to_complex())
        if not self.kept:
            self._memory["weights"] = q.new_empty(scores, dtype=self._dtype)

    def chunks(self, run: Run) -> Iterator[slice | None]:
        """Rows of every bucket of a run that are computed at a time; None for all of them."""
        n_rows, most = run.own[1], self.band.sizes.rows
        if n_rows <= most:
            return iter([None])
        return (slice(first, min(first + most, n_rows)) for first in range(0, n_rows, most))

    def own(self, rows: Tensor, run: Run) -> Tensor:
        """The rows of a run's buckets, [bucket, row, D], zeros after the last one; at least in float32."""
        first, n_rows = run.own
        part = _rows(rows, first, first + run.n_buckets * n_rows)
        return part.view(run.n_buckets, n_rows, self._dim).to(self._dtype)

    def near(self, values: Tensor, run: Run) -> Tensor:
        """The values that a run's buckets meet, [bucket, key, D], zeros outside the sequence; at least in float32."""
        w, (first, n_keys) = self.band.window, run.near
        part = _rows(values, first, first + (run.n_buckets - 1) * w + n_keys).to(self._dtype)
        row, channel = part.stride()
        return part.as_strided((run.n_buckets, n_keys, self._dim), (w * row, row, channel))

    def near_keys(self, keys: Tensor, run: Run) -> Tensor:
        """The turned keys that a run's buckets meet, [bucket, key, D]."""
        w, dim, (first, n_keys) = self.band.window, self._dim, run.near
        return keys.as_strided(
            (run.n_buckets, n_keys, dim), (w * dim, dim, 1), (first + self._before * w) * dim
        )

    def sums(self, grad: Tensor, run: Run) -> tuple[Tensor, ...]:
        """Where the gradients of a run's keys belong, [bucket, key, D] each: one for every bucket that is met."""
        if run.n_buckets == 1:
            return (self.near_keys(grad, run),)
        place, size = run.place - 1 + self._before, self.band.window * self._dim
        shape, stride = (3, run.n_buckets, self.band.window, self._dim), (size, size, self._dim, 1)
        return grad.as_strided(shape, stride, place * size).unbind()

    def inside(self, keys: Tensor) -> Tensor:
        """Of whole buckets of keys the rows of the sequence, [M, D]; a view."""
        return _flat(keys, self._before * self.band.window, self.band.keys, self._dim)

    def take(self, name: str, run: Run) -> Tensor:
        """The memory `rows` or `queries` of a run."""
        memory, n_rows = self._memory[name], run.own[1]
        if n_rows < self.band.window:
            return self._take(name, run.n_buckets, n_rows, memory.shape[2])
        return memory if run.n_buckets == len(memory) else memory[: run.n_buckets]

    def copy_own(self, own: Tensor, run: Run, rows: Tensor) -> None:
        """Write the rows of a run's buckets to where they belong."""
        part = _rows(rows, run.own[0], min(run.own[0] + run.n_buckets * run.own[1], len(rows)))
        part.copy_(_flat(own, 0, len(part), self._dim))

    def turn_keys(self, k: Tensor) -> tuple[Tensor, Tensor]:
        """All keys normalised and turned, and their norms: [bucket, row, pair, 2] and [bucket, row, 1, 1]."""
        first, shape = self._before * self.band.window, (self._n_places, self.band.window, self._dim)
        pairs = to_pairs(_rows(k, -first, shape[0] * shape[1] - first).view(shape).to(self._dtype))
        keys = torch.view_as_real(pairs)
        norms = torch.linalg.vector_norm(keys, dim=(-2, -1), keepdim=True)
        keys.div_(norms.clamp_min(LEAST_NORM))
        for place, slab in self._slabs(pairs):
            self._rotary.turn(slab, (place, len(slab)))
        return keys, norms

    def turn_keys_back(self, keys: Tensor, norms: Tensor, grad: Tensor) -> Tensor:
        """From the gradient of the turned keys to that of the keys, [M, D], in the memory of the keys."""
        slabs = map(self._slabs, (keys, grad, norms))
        for (place, key), (_, g), (_, norm) in zip(*slabs, strict=True):
            flat = self._take("rows", *key.shape)
            # a norm below the least one is not divided by, so it has no gradient
            along = torch.mul(key, g, out=flat).sum((-2, -1), keepdim=True).mul_(norm >= LEAST_NORM)
            g.addcmul_(key, along, value=-1).div_(norm.clamp_min(LEAST_NORM))
            self._rotary.turn(torch.view_as_complex(g), (place, len(g)), back=True)
            from_pairs(g, key)
        return self.inside(keys)

    def turn_queries(self, q: Tensor, run: Run) -> Tensor:
        """The turned queries of a run, [bucket, row, D]."""
        queries = self.take("queries", run)
        to_pairs(self.own(q, run), out=queries)
        self._rotary.turn(queries, (run.place + self._before + 1, run.n_buckets))
        return queries.view(self._dtype)

    def turn_queries_back(self, grad: Tensor, run: Run, dq: Tensor) -> None:
        """From the gradient of a run's turned queries, which is changed, to that of the queries."""
        pairs = grad.view(*grad.shape[:2], -1, 2)
        place = run.place + self._before + 1, run.n_buckets
        self._rotary.turn(torch.view_as_complex(pairs), place, back=True)
        part = _rows(dq, run.own[0], min(run.own[0] + run.n_buckets * run.own[1], len(dq)))
        from_pairs(pairs.as_strided((len(part), *pairs.shape[2:]), pairs.stride()[1:]), part)

    def weights(self, run: Run, rows: slice | None, queries: Tensor, keys: Tensor) -> Tensor:
        """Attention weights [bucket, row, column], kept ones or new."""
        shape = *queries.shape[:2], run.columns
        weights = _part(self.kept[run], rows) if self.kept else self._take("weights", *shape)
        if self._known:
            return weights
        scores = self._take("scores", *shape)
        _of_keys(scores, run).baddbmm_(queries, keys.mT, beta=0, alpha=self.scale)
        self._with_themselves(scores, run, rows).fill_(SELF_SCORE)
        if run.missing:
            # n rows with score 0 add n e^0 to the normaliser, as one row with score log n does
            scores.select(-1, -1).fill_(math.log(run.missing))
        if any(run.outside):
            self._outside(scores, run).fill_(-math.inf)
        return torch.softmax(scores, -1, out=weights)

    def score_gradients(
        self, run: Run, rows: slice | None, weights: Tensor, grad: Tensor, values: Tensor
    ) -> Tensor:
        """Gradient of the scores, [bucket, row, column]."""
        ds = self._take("scores", *weights.shape)
        torch.bmm(grad, values.mT, out=_of_keys(ds, run))
        if run.missing:
            # rows that are only counted have no value
            ds.select(-1, -1).zero_()
        # in place: every number is read before it is written, on CUDA from a copy that torch makes
        softmax_backward(ds, weights, out=ds)
        # the score of a row with itself is a constant
        self._with_themselves(ds, run, rows).zero_()
        return ds

    def _shape(self, run: Run, most_rows: int | None = None) -> tuple[int, int, int]:
        n_rows = run.own[1] if most_rows is None else min(run.own[1], most_rows)
        return run.n_buckets, n_rows, run.columns

    def _slabs(self, rows: Tensor) -> list[tuple[int, Tensor]]:
        """A few buckets at a time: the first one's place, and the buckets."""
        most = len(self._memory["rows"])
        if len(rows) <= most:
            return [(0, rows)]
        # without values the second needs the same memory as all after it
        rows = rows[: 2 * most] if rows.is_meta else rows
        return list(zip(range(0, len(rows), most), torch.split(rows, most), strict=True))

    def _with_themselves(self, scores: Tensor, run: Run, rows: slice | None) -> Tensor:
        """The scores of rows with themselves, [bucket, row]."""
        first = run.place * self.band.window - run.near[0] + (rows.start if rows else 0)
        return scores.diagonal(first, 1, 2)

    def _outside(self, scores: Tensor, run: Run) -> Tensor:
        """The scores of the first bucket with the keys before the sequence, of the last one with those after it."""
        w = self.band.window
        ends = [0] * run.outside[0] + [scores.stride(0) * (run.n_buckets - 1) + 2 * w] * run.outside[1]
        return scores.as_strided((len(ends), w, w), (ends[-1] - ends[0], 3 * w, 1), ends[0])

    def _take(self, name: str, *shape: int) -> Tensor:
        memory = self._memory[name]
        if memory.shape == shape:
            return memory
        n = math.prod(shape)
        return (memory if memory.numel() == n else memory.view(-1)[:n]).view(shape)


def _of_keys(scores: Tensor, run: Run) -> Tensor:
    """The columns of keys, without that of missing rows."""
    return scores[..., : run.near[1]] if run.missing else scores


def _add(sums: tuple[Tensor, ...], left: Tensor, right: Tensor, *, scale: float = 1.0) -> None:
    """Add left^T right to the sums, which have the columns of `left` one after the other."""
    n = left.shape[2] // len(sums)
    for total, part in zip(
        sums, torch.split(left.mT, n, dim=1) if len(sums) > 1 else (left.mT,), strict=True
    ):
        total.baddbmm_(part, right, alpha=scale)


def _rows(x: Tensor, first: int, last: int, *, fill: float = 0.0) -> Tensor:
    """Rows [first, last), with others where there are none; a view where there are."""
    n = len(x)
    part = x if first <= 0 and last >= n else x[max(first, 0) : last]
    if first >= 0 and last <= n:
        return part
    return F.pad(part, (0, 0, max(-first, 0), max(last - n, 0)), value=fill)


def _flat(x: Tensor, first: int, n: int, dim: int) -> Tensor:
    """Rows [first, first + n) of `dim` numbers of memory that has nothing else; in one operator."""
    return x.as_strided((n, dim), (dim, 1), first * dim)


def _part(x: Tensor, rows: slice | None) -> Tensor:
    return x if rows is None else x[:, rows]


@lru_cache
def computed_in(*dtypes: torch.dtype) -> torch.dtype:
    """The type of sums and products: float32, or float64 where one is."""
    # kept, because torch counts the question as an operator
    return reduce(torch.promote_types, dtypes, torch.float32)


def _sizes(q: Tensor, window: int) -> RunSizes:
    return run_sizes(window, launched=launches_operators(q))
