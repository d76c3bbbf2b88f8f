"""Softmax attention of buckets of rows to their own and the two neighbouring buckets, forward and backward by hand.

    r_i = R(i) k_i / |k_i|      s_i = R(i + w) q_i D^-0.5      P = softmax(mask(s r^T))      out = P v
    dv = P^T do                 dS = P * (do v^T - rowsum(P * do v^T)), 0 for a row with itself
    dq_i = R(i + w)^T (dS r)_i D^-0.5       g = dS^T s       dk_i = R(i)^T (g_i - r_i (r_i . g_i)) / |k_i|

R(i) is that of rotary.py. The reference counts positions along each bucket's 3w keys; here they count along the
sequence, which leaves all differences as they are: a key is turned once and not three times, and the keys of a bucket
are a run of rows. The w in R(i + w): the reference gives queries the last of the 3w positions. No neighbours are
gathered, and gradients of keys and values are added to runs of rows.

Rows that fill the last bucket are zeros with score 0 to everyone. They are one more column in the softmax, with the
score log(number of them) and no value. Keys outside the sequence are not computed at all.

Exact up to rounding. Kept for the backward pass: q, k and values themselves, and P where that is asked for, 3w N less
the keys outside the sequence: scores and softmax are then computed once, and one of seven products is saved. Held at
most, in numbers, beside these:

    forward     r M D, |k| M, out N D, and the work
    backward    r M D, |k| M, do N D, dq N D, dk M D, dv M D, and the work
    the work    scores 2 G C (3w + 1), G C (3w + 1) where P is kept; rows 3 G w D, tables (w + M / w) D

Numbers below float32 are computed with in float32, under autocast too: all products of matrices have an `out=` or are
in place, and those autocast does not touch. Results are then held twice for a moment, and values of a group are copied.
Second derivatives are refused by torch. Tensors without values (meta) pass through one group of each shape: the memory
is that of all groups, but operators are not to be counted there.

Legend: row (N), key (M, those of the rows and of the neighbours), dim (D), w window, G buckets of a group, C rows of a
bucket at a time.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_amp.parallel.attention.bucket_groups import Band, Group
from lightning_amp.parallel.attention.rotary import Rotary
from lightning_amp.parallel.autograd.precomputed_gradients import wants_gradients

SELF_SCORE = -5e4
LEAST_NORM = 1e-12
CACHED_SCORES = 2**20
"""Scores at a time on a CPU: two such tensors of float32 stay in its last cache."""
LAUNCHED_SCORES = 2**23
"""Scores at a time on another device: enough to be worth a kernel's launch."""


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
    return cast(Tensor, _BandedSoftmax.apply(q, k, values, window, before, keep))  # type: ignore[no-untyped-call]


class _BandedSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, values: Tensor, window: int, before: int, keep: bool
    ) -> Tensor:
        ctx.window, ctx.before = window, before
        work = _Work(q, k, values, window=window, before=before, keep=keep)
        ctx.save_for_backward(q, k, values, *work.kept.values())
        keys, _ = work.turn_keys(k)
        out = torch.empty_like(q, dtype=values.dtype)
        for group in work.band.groups():
            queries, own_out = work.turn_queries(q, group), work.band.own(out, group)
            near_keys, near_values = work.near(keys, group), work.near(values, group)
            for rows in work.chunks(group):
                weights = work.weights(group, rows, queries[:, rows], near_keys)
                own_out[:, rows] = torch.bmm(weights, near_values, out=work.own_rows(group)[:, rows])
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, values, *kept = ctx.saved_tensors
        work = _Work(q, k, values, window=ctx.window, before=ctx.before, kept=kept)
        keys, norms = work.turn_keys(k)
        # every row is the query of one bucket, but the key of up to three: dq is written, dk and dv are added to
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(keys), torch.zeros_like(keys)
        for group in work.band.groups():
            queries, own_grad = work.turn_queries(q, group), work.own(grad, group)
            near_keys, near_values = work.near(keys, group), work.near(values, group)
            near_dk, near_dv = work.band.near(dk, group), work.band.near(dv, group)
            for rows in work.chunks(group):
                weights = work.weights(group, rows, queries[:, rows], near_keys)
                near_dv.baddbmm_(weights.mT, own_grad[:, rows])
                ds = work.score_gradients(group, rows, weights, own_grad[:, rows], near_values)
                near_dk.baddbmm_(ds.mT, queries[:, rows])
                torch.bmm(ds, near_keys, out=work.own_rows(group)[:, rows])
            # after the last chunk: it writes where the turned queries are, which every chunk reads
            work.turn_queries_back(group, dq)
        work.turn_keys_back(keys, norms, dk)
        return dq, dk.to(k.dtype), dv.to(values.dtype), None, None, None


class _Work:
    """Memory that all groups use one after the other, and what is computed in it.

    `queries` holds the turned queries of a group, `rows` what is computed for these rows; `kept` all weights by
    group, each chunk's one after the other. They are not in one tensor, because memory of that size is given back to
    the system, and taking it anew costs a CPU as much time as the product that is saved.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        values: Tensor,
        *,
        window: int,
        before: int,
        keep: bool = False,
        kept: Sequence[Tensor] = (),
    ) -> None:
        together, self._chunk = _sizes(q, window)
        self.band = Band(
            rows=len(q),
            keys=len(k),
            window=window,
            before=before,
            together=together,
            sampled=q.is_meta,
        )
        dtype = torch.promote_types(torch.promote_types(q.dtype, k.dtype), values.dtype)
        self._dtype, self._dim = torch.promote_types(dtype, torch.float32), q.shape[1]
        # one more place than there are buckets: queries are turned as the rows of the next bucket
        n_places = self.band.n_key_buckets + 1
        self._rotary = Rotary(self._dim, window, n_places, dtype=self._dtype, device=q.device)
        n_scores = self.band.largest * self._chunk * (3 * window + 1)
        n_rows = self.band.largest * window * self._dim
        sizes = {"scores": n_scores, "queries": n_rows, "rows": n_rows}
        groups = list(self.band.all_groups()) if keep or kept else []
        self._known = bool(kept)
        kept = kept or [q.new_empty(group.n_scores, dtype=self._dtype) for group in groups]
        self.kept = dict(zip(groups, kept, strict=True))
        if not self.kept:
            sizes["weights"] = n_scores
        self._memory = {name: q.new_empty(n, dtype=self._dtype) for name, n in sizes.items()}

    def chunks(self, group: Group) -> Iterator[slice]:
        """Rows of every bucket of a group that are computed at a time."""
        n_rows = group.own[1]
        for first in range(0, n_rows, self._chunk):
            yield slice(first, min(first + self._chunk, n_rows))

    def own(self, rows: Tensor, group: Group) -> Tensor:
        """The rows of a group's buckets, at least in float32."""
        return self.band.own(rows, group).to(self._dtype)

    def near(self, keys: Tensor, group: Group) -> Tensor:
        """The keys or values that a group's buckets meet, at least in float32."""
        return self.band.near(keys, group).to(self._dtype)

    def own_rows(self, group: Group) -> Tensor:
        """The memory `rows`, [bucket, row, D]."""
        return self._take("rows", group.n_buckets, group.own[1], self._dim)

    def turn_keys(self, k: Tensor) -> tuple[Tensor, Tensor]:
        """All keys normalised and turned, [M, D], and their norms [M, 1]."""
        keys = k.new_empty(k.shape, dtype=self._dtype)
        norms = torch.linalg.vector_norm(k, dim=1, keepdim=True, dtype=self._dtype)
        for (place, raw), (_, turned) in zip(self.band.slabs(k), self.band.slabs(keys), strict=True):
            self._rotary.turn(raw, turned, place=place)
        return keys.div_(norms.clamp_min(LEAST_NORM)), norms

    def turn_keys_back(self, keys: Tensor, norms: Tensor, grad: Tensor) -> None:
        """From the gradient of the turned keys to that of the keys, in place."""
        slabs = map(self.band.slabs, (keys, norms, grad))
        for (place, key), (_, norm), (_, g) in zip(*slabs, strict=True):
            flat = self._take("queries", *key.shape)
            # a norm below the least one is not divided by, so it has no gradient
            along = torch.mul(key, g, out=flat).sum(-1, keepdim=True).mul_(norm >= LEAST_NORM)
            torch.addcmul(g, key, along, value=-1, out=flat).div_(norm.clamp_min(LEAST_NORM))
            self._rotary.turn(flat, g, place=place, back=True)

    def turn_queries(self, q: Tensor, group: Group) -> Tensor:
        """The queries of a group, scaled and turned, [bucket, row, D]."""
        queries = self._take("queries", group.n_buckets, group.own[1], self._dim)
        self._rotary.turn(self.band.own(q, group), queries, place=group.place + 1, step=group.step)
        return queries.mul_(self._dim**-0.5)

    def turn_queries_back(self, group: Group, dq: Tensor) -> None:
        """From the gradient of the turned queries, which `rows` holds, to that of the queries."""
        flat = self._take("queries", group.n_buckets, group.own[1], self._dim)
        self._rotary.turn(self.own_rows(group), flat, place=group.place + 1, step=group.step, back=True)
        self.band.own(dq, group).copy_(flat.mul_(self._dim**-0.5))

    def weights(self, group: Group, rows: slice, queries: Tensor, keys: Tensor) -> Tensor:
        """Attention weights [bucket, row, key], kept ones or new; they sum to less than 1 where rows are missing."""
        n_keys = keys.shape[1]
        shape = (*queries.shape[:2], n_keys + (group.missing > 0))
        weights = self._kept(group, rows, *shape) if self.kept else self._take("weights", *shape)
        if not self._known:
            self._softmax(group, rows, queries, keys, weights)
        return weights[..., :n_keys]

    def _softmax(self, group: Group, rows: slice, queries: Tensor, keys: Tensor, out: Tensor) -> None:
        scores, n_keys = self._take("scores", *out.shape), keys.shape[1]
        torch.bmm(queries, keys.mT, out=scores[..., :n_keys])
        self._with_themselves(scores, group, rows).fill_(SELF_SCORE)
        if group.missing:
            # n rows with score 0 add n e^0 to the normaliser, as one row with score log n does
            scores[..., n_keys] = math.log(group.missing)
        torch.softmax(scores, -1, out=out)

    def score_gradients(
        self, group: Group, rows: slice, weights: Tensor, grad: Tensor, values: Tensor
    ) -> Tensor:
        """Gradient of the scores, [bucket, row, key]."""
        ds = torch.bmm(grad, values.mT, out=self._take("scores", *weights.shape)).mul_(weights)
        # ds holds P * dP by now: these are the row sums of the softmax's backward; missing rows have no value, add 0
        ds.addcmul_(weights, ds.sum(-1, keepdim=True), value=-1)
        # the score of a row with itself is a constant
        self._with_themselves(ds, group, rows).zero_()
        return ds

    def _with_themselves(self, scores: Tensor, group: Group, rows: slice) -> Tensor:
        """The scores of rows with themselves, [bucket, row]."""
        first = group.place * self.band.window - group.near[0] + rows.start
        return scores.diagonal(first, 1, 2)[:, : scores.shape[1]]

    def _kept(self, group: Group, rows: slice, *shape: int) -> Tensor:
        n_buckets, _, n_keys = shape
        first = rows.start * n_buckets * n_keys
        return self.kept[group][first : first + math.prod(shape)].view(shape)

    def _take(self, name: str, *shape: int) -> Tensor:
        return self._memory[name][: math.prod(shape)].view(shape)


def _sizes(q: Tensor, window: int) -> tuple[int, int]:
    """Buckets in a group, and rows of each of them at a time."""
    # tensors without values stand for those on a CPU
    most = CACHED_SCORES if q.device.type in ("cpu", "meta") else LAUNCHED_SCORES
    per_bucket = 3 * window**2
    together = max(1, most // per_bucket)
    return together, -(-window // -(-together * per_bucket // most))
