"""Compute attention of buckets of rows to their own and the two neighbouring buckets, with a hand-written backward.

    r_i = R(i) k_i / |k_i|      s_i = R(i + w) q_i      P = softmax(mask(D^-0.5 s r^T))      out = P v
    dv = P^T do                 dS = P * (do v^T - rowsum(P * do v^T)), 0 for a row with itself
    dq_i = D^-0.5 R(i + w)^T (dS r)_i       g = D^-0.5 dS^T s       dk_i = R(i)^T (g_i - r_i (r_i . g_i)) / |k_i|

R(i) is the rotation of rotary.py; R(i + w) because the reference gives queries the last of its 3w positions. Positions
count along the whole sequence, which does not change their differences: every key is rotated once, and the keys of a
bucket are consecutive rows. Neighbours are not gathered: the keys of a run of buckets (bucket_runs.py) are one view
with overlapping buckets. Gradients of a run's keys are added in three products, one per neighbouring bucket, because
within one product no two buckets attend to the same keys. In a run of one bucket only existing keys are computed; the
zero rows that fill the last bucket are one more column in the softmax, with score log(number of rows) and no value.

Exact up to rounding. Saved for the backward pass: q, k and values, and on request P. Peak in addition to these, in
elements:

    forward     r M D, |k| M, out N D, and the work             k M D before out exists, if it is padded
    backward    r M D, |k| M, do N D, dq N D, dk M D, dv M D, and the work
    the work    scores 2 G C 3w, G C 3w if P is kept; rows 2 G w D
    at an end   of a run of several buckets, copies of its values (G + 2) w D and of do and q G w D

Types below float32 are computed in float32. Under autocast to bfloat16, products use bfloat16: scores and weights exist
only in bfloat16; a softmax computes its sums in float32; rotation and normalisation of keys and sums of their gradients
use float32. Other kinds of autocast have no effect. On CUDA torch's backward pass of a softmax temporarily allocates G
C 3w more, which is not counted here. Second derivatives raise torch's error. Tensors without values (meta) pass through
one run of each shape: its memory is that of all runs.

Legend: row (N), key (M, full buckets of those of the rows and of the neighbours), dim (D), w window, G buckets of a
run, C rows of a bucket at a time.
"""

from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from lightning_amp.derivatives import first_only
from lightning_amp.footprint.target_device import launches_operators
from lightning_amp.techniques.hic.attention.bucket_runs import Band, run_sizes
from lightning_amp.techniques.hic.attention.bucket_work import BucketWork, of_keys, part_of
from lightning_amp.techniques.hic.attention.sizes import met_in, type_of_sums
from lightning_amp.techniques.precomputed_gradients import wants_gradients


def banded_softmax(
    q: Float[Tensor, "row dim"],  # queries; they start with a full bucket
    k: Float[Tensor, "key dim"],  # keys of the rows before, of the queries' rows and of the rows after
    values: Float[Tensor, "key dim"],
    *,
    window: int,
    before: int,  # keys before that of the first query, full buckets
    keep: bool = False,
) -> Float[Tensor, "row dim"]:
    """Compute attention of a run of buckets."""
    keep = keep and wants_gradients((q, k, values))
    sizes = run_sizes(window, launched=launches_operators(q))
    band = Band(len(q), len(k), window, before, sizes)
    # if keys are the queries, their gradients are summed as they are computed
    keys = None if k is q else k
    dtype = met_in(q, type_of_sums(q.dtype, k.dtype, values.dtype))
    return cast(Tensor, _BandedSoftmax.apply(q, keys, values, band, keep, dtype))  # type: ignore[no-untyped-call]


class _BandedSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor | None, values: Tensor, band: Band, keep: bool, dtype: torch.dtype
    ) -> Tensor:
        ctx.band, ctx.shared_qk, ctx.dtype = band, k is None, dtype
        k = q if k is None else k
        work = BucketWork(q, k, values, band, dtype, shared_qk=ctx.shared_qk, keep=keep)
        ctx.save_for_backward(q, k, values, *work.kept.values())
        keys, _ = work.turn_keys(k)
        out = work.room_for_result(q, values.dtype)
        # one run has all rows: it writes into the result without a copy
        at_once = out.dim() == 3
        for run in work.runs():
            queries, own_out = work.turn_queries(q, run), out if at_once else work.take_rows(run)
            near_keys, near_values = work.near_keys(keys, run), work.near(values, run)
            for rows in work.chunks(run):
                weights = work.weights(run, rows, part_of(queries, rows), near_keys)
                torch.bmm(of_keys(weights, run), near_values, out=part_of(own_out, rows))
            if not at_once:
                work.copy_own(own_out, run, out)
        return out.view(-1, out.shape[-1])[: len(q)] if at_once else out

    @staticmethod
    @first_only("fused attention; leave 'fused' out")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, values, *kept = ctx.saved_tensors
        work = BucketWork(q, k, values, ctx.band, ctx.dtype, shared_qk=ctx.shared_qk, back=True, kept=kept)
        keys, divisors = work.turn_keys(k)
        # every row is the query of one bucket, but the key of up to three: dq is written, dk and dv are accumulated
        dq = torch.empty_like(q) if not work.at_once else None
        # zeros, unless `add` writes all elements that are read
        make = torch.empty_like if work.at_once else torch.zeros_like
        dk, dv = make(keys), make(keys)
        for run in work.runs():
            queries, own_grad = work.turn_queries(q, run), work.own(grad, run).to(work.dtype_of(run))
            near_keys, near_values = work.near_keys(keys, run), work.near(values, run)
            own_dq, near_dk, near_dv = work.take_rows(run), work.sums(dk, run), work.sums(dv, run)
            for rows in work.chunks(run):
                own_queries, own_grads = part_of(queries, rows), part_of(own_grad, rows)
                weights = work.weights(run, rows, own_queries, near_keys)
                work.add(near_dv, of_keys(weights, run), own_grads)
                # the scores are no longer needed: their gradient reuses their memory
                ds = of_keys(work.score_gradients(run, rows, weights, own_grads, near_values), run)
                work.add(near_dk, ds, own_queries, scale=work.scale)
                part_of(own_dq, rows).baddbmm_(ds, near_keys, beta=0, alpha=work.scale)
            if dq is None:
                found = work.turn_back_at_once(own_dq, keys, divisors, dk, len(q)).to(q.dtype)
                return found, None, work.inside(dv).to(values.dtype), None, None, None
            work.turn_queries_back(own_dq, run, dq)
        grad_k = work.turn_keys_back(keys, divisors, dk, add_to=dq if ctx.shared_qk else None)
        grad_k = None if grad_k is None else grad_k.to(k.dtype)
        return dq, grad_k, work.inside(dv).to(values.dtype), None, None, None
