"""Compute attention of buckets of rows in torch's fused kernels: as banded_softmax.py, in few operators.

    s_i = R(i + w) q_i      r_i = R(i) k_i / |k_i|      out = softmax(D^-0.5 s r^T + own) v
    own_ij = OWN if j is i itself, else 0

Buckets that attend to all three buckets of their neighbourhood are one call: each is a batch element of one head, and
the keys and values of consecutive batch elements are overlapping views. The first and the last bucket of the sequence
attend to two buckets, and are a second call, so that no key outside the sequence is multiplied or masked. The zero rows
that fill the last bucket are attended to like other rows, as in the reference. Both calls read `own` from one tensor w
(5 w), which is shared by all attention of this window in a process.

torch's kernels are called by name instead of through `scaled_dot_product_attention`, which falls back to computing all
scores at once. A device, dtype or number of channels without a fused kernel raises an error.

Exact up to rounding, with one difference: the reference replaces the score of a row with itself by -5e4; here that
score gets no weight. Both agree if any other key of the row has a score above -4.9e4, so for |q| < 4.9e4 sqrt(D). A row
without another key (one anchor, w = 1) attends to itself alone in both.

Saved for the backward pass: s and r, a norm per key, out per call, one logarithm per row, and the values, padded if the
last bucket is incomplete. Peak in addition to these, in elements, with M keys:

    forward     a second copy of out of both calls, N D
    backward    gradients of rows, keys and values by bucket, N D + 6 M D; those of keys and values concatenated, 6 M D;
                sums, and the result, 2 N D + 3 M D

The mask and the rotation's tables are cached, and not predicted. Types are those of banded_softmax.py. Not run on a
GPU. Second derivatives raise torch's error. Legend: row (N), key (M, those of the rows and of the neighbours), dim (D),
w window, bucket, slot (of a bucket's keys).
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from lightning_amp._torch import attend_on_cpu, attend_on_cpu_back, attend_on_cuda, attend_on_cuda_back, past_threshold
from lightning_amp.derivatives import first_only
from lightning_amp.errors import InstallError
from lightning_amp.techniques.hic.attention.bucket_runs import KernelCall, KernelCalls
from lightning_amp.techniques.hic.attention.rotary import from_pairs, kept, rotary, to_pairs
from lightning_amp.techniques.hic.attention.sizes import LEAST_NORM, met_in, type_of_sums

OWN = -1e30
"""Added to the score of a row with itself: no weight, but finite, because a difference of infinities is NaN."""
ALIGNED_COLUMNS = 16
"""Alignment of columns of `own` on CUDA: 64 bytes of float32."""
ALIGNED_BYTES = 16
"""Alignment of a row on CUDA, in bytes that its kernel reads at a time."""


def sdpa_attention(
    q: Float[Tensor, "row dim"],  # queries; they start with a full bucket
    k: Float[Tensor, "key dim"],  # keys of the rows before, of the queries' rows and of the rows after
    values: Float[Tensor, "key dim"],
    *,
    window: int,
    before: int,  # keys before that of the first query, full buckets
) -> Float[Tensor, "row dim"]:
    """Compute attention of a run of buckets."""
    dtype = type_of_sums(q.dtype, k.dtype, values.dtype)
    met = met_in(q, dtype)
    _check(q, met)
    # keys further away are not used; slicing all keys too would add a view, whose backward pass copies them
    first, last = max(before - window, 0), before + -(-len(q) // window) * window + window
    if first > 0 or last < len(k):
        k, values = k[first:last], values[first:last]
    # if keys are the queries, one operator converts both to pairs, and one sums their gradients
    keys = None if k is q else k
    return cast(Tensor, _Sdpa.apply(q, keys, values, window, (before - first) // window, dtype, met))  # type: ignore[no-untyped-call]


class _Sdpa(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor | None,
        values: Tensor,
        window: int,
        before: int,
        dtype: torch.dtype,
        met: torch.dtype,
    ) -> Tensor:
        run = KernelCalls(-(-len(q) // window), -(-len(values) // window), window, before)
        ctx.run, ctx.inputs = run, [None if x is None else (x.shape, x.dtype) for x in (q, k, values)]
        if not run.rows:
            return torch.empty_like(q, dtype=values.dtype)
        turned, divisor = _turned(q, k, run, dtype)
        turned, filled = turned.to(met), _filled(values, run.keys * window, met)
        own = mask(window, met, q)
        views = [_views(call, run, turned, filled, own) for call in run.calls]
        found = [_attend(*view) for view in views]
        saved = (x for view, one in zip(views, found, strict=True) for x in (*view, *one))
        ctx.save_for_backward(turned, divisor, *saved)
        # a view of the first rows leaves out those that fill the last bucket
        out = _in_order(run, [one[0] for one in found])
        return (out[0] if len(out) == 1 else torch.cat(out)).view(-1, q.shape[1])[: len(q)].to(values.dtype)

    @staticmethod
    @first_only("attention in torch's kernels; leave 'sdpa' out")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        run = ctx.run
        if not run.rows:
            none = (known and grad.new_zeros(known[0], dtype=known[1]) for known in ctx.inputs)
            return (*none, None, None, None, None)
        turned, divisor, *saved = ctx.saved_tensors
        grad = _filled(grad, run.rows * run.window, turned.dtype)
        # every call has saved equally many tensors
        n, found = len(saved) // len(run.calls), []
        for i, call in enumerate(run.calls):
            q, k, values, own, *one = saved[i * n : (i + 1) * n]
            found.append(_attend_back(_rows_of(call, run, grad), q, k, values, own, one))
        turned = turned.to(divisor.dtype)
        grads = _together(run, found, turned)
        # freed before the inverse rotation is computed
        del found
        results = [
            *_turned_back(grads[: run.rows + run.keys], turned, divisor, run, shared_qk=ctx.inputs[1] is None),
            grads[run.rows + run.keys :].view(-1, turned.shape[-1]),
        ]
        pairs = zip(results, ctx.inputs, strict=True)
        ready = (None if x is None else x[: known[0][0]].to(known[1]) for x, known in pairs)
        return (*ready, None, None, None, None)


def _turned(
    q: Tensor, k: Tensor | None, run: KernelCalls, dtype: torch.dtype
) -> tuple[Float[Tensor, "bucket row dim"], Float[Tensor, "bucket row one"]]:
    """Return rotated rows, then rotated and normalised keys, and their divisors. If k is None, keys are the rows."""
    w, dim, cut = run.window, q.shape[1], run.rows * run.window
    shape = run.rows + run.keys, w, dim // 2
    whole = len(q) % w == 0 and (k is None or len(k) % w == 0)
    # rows that fill the last bucket are attended to, so they must be zeros
    pairs = (q.new_empty if whole else q.new_zeros)(shape, dtype=dtype.to_complex())
    if k is None:
        # rows and keys are the same tensor: one operator writes both
        both = pairs.view(2, cut, dim // 2)
        to_pairs(q.to(dtype).expand(2, *q.shape), out=both if whole else both[:, : len(q)])
    else:
        for rows, first in ((q, 0), (k, cut)):
            to_pairs(rows.to(dtype), out=pairs.view(-1, dim // 2)[first : first + len(rows)])
    turned = torch.view_as_real(pairs).view(*shape[:2], dim)
    keys = turned[run.rows :]
    divisor = torch.linalg.vector_norm(keys, dim=-1, keepdim=True).clamp_min_(LEAST_NORM)
    keys.div_(divisor)
    _rotary(run, turned).turn(pairs, *run.places)
    return turned, divisor


def _turned_back(
    grads: Tensor, turned: Tensor, divisor: Tensor, run: KernelCalls, *, shared_qk: bool
) -> tuple[Tensor, Tensor | None]:
    """Return gradients of rows and keys (None if shared) from those of the rotated ones, which are overwritten."""
    w, dim = turned.shape[1:]
    key, g = turned[run.rows :], grads[run.rows :]
    # keys below the least norm are not normalised, so their norm has no gradient
    along = past_threshold(torch.mul(key, g).sum(-1, keepdim=True), divisor, LEAST_NORM)
    g.addcmul_(key, along, value=-1)
    if not shared_qk:
        g.div_(divisor)
    pairs = grads.view(-1, w, dim // 2, 2)
    _rotary(run, turned).turn(torch.view_as_complex(pairs), *run.places, back=True)
    if shared_qk:
        rows, keys = pairs.view(2, -1, dim // 2, 2).mT.unbind()
        dq = turned.new_empty(len(rows), dim)
        torch.addcdiv(rows, keys, divisor.view(-1, 1, 1), out=dq.view(rows.shape))
        return dq, None
    found = torch.empty_like(turned)
    from_pairs(pairs, found)
    dq, dk = torch.split(found.view(-1, dim), [run.rows * w, run.keys * w])
    return dq, dk


def _rotary(run: KernelCalls, turned: Tensor) -> Any:
    # the position of a row is one more than that of its key
    n_places = max(run.keys, run.before + run.rows + 1)
    return rotary(turned.shape[-1], run.window, n_places, dtype=turned.dtype, like=turned)


def _together(run: KernelCalls, found: list[tuple[Tensor, ...]], like: Tensor) -> Float[Tensor, "bucket row dim"]:
    """Concatenate the gradients of rows, keys and values; the three slots of each key are summed."""
    w, dim = like.shape[1:]
    grads = like.new_empty(run.rows + 2 * run.keys, w, dim)
    dq, *others = ([one[i] for one in found] for i in range(3))
    torch.cat(_in_order(run, dq), out=grads[: run.rows].unsqueeze(1))
    # every key needs three slots: zeros replace those of buckets of rows beyond the sequence or on another rank, which
    # sums its own gradients of these keys
    zeros, bucket = kept(_zeros, dq[0])(w, dim, dq[0].dtype, dq[0].device), (-1, w, dim)
    around = [zeros[:n] for n in run.around]
    halves = [[around[0], *(x.reshape(bucket) for x in _in_order(run, ones)), around[1]] for ones in others]
    slots = torch.cat([part for half in halves for part in half])
    size = w * dim
    strides = slots.numel() // 2, 3 * size, 2 * size, dim, 1
    # bucket b of keys is used by the rows b - 1, b and b + 1, in slots two apart; the next bucket is three further
    each = slots.as_strided((2, run.keys, 3, w, dim), strides)
    torch.sum(each, 2, dtype=like.dtype, out=grads[run.rows :].view(2, run.keys, w, dim))
    return grads


def _in_order(run: KernelCalls, results: Sequence[Tensor]) -> list[Tensor]:
    """Sort the results of calls by bucket."""
    parts: list[tuple[int, Tensor]] = []
    for call, result in zip(run.calls, results, strict=True):
        first, step, n = call.rows
        # of three buckets or more, the two ends have other buckets between them
        parts += [(first + i * step, result[i : i + 1]) for i in range(n)] if step > 1 else [(first, result)]
    return [part for _, part in sorted(parts, key=lambda part: part[0])]


def _filled(x: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """Return n contiguous rows, padded with zeros."""
    x = x.to(dtype)
    return F.pad(x, (0, 0, 0, n - len(x))) if len(x) < n else x.contiguous()


def _rows_of(call: KernelCall, run: KernelCalls, x: Tensor) -> Tensor:
    """Return the rows of a call's buckets, [bucket, 1, row, D]."""
    (first, step, n), dim = call.rows, x.shape[-1]
    size = run.window * dim
    return x.as_strided((n, 1, run.window, dim), (step * size, size, dim, 1), x.storage_offset() + first * size)


def _views(call: KernelCall, run: KernelCalls, turned: Tensor, values: Tensor, own: Tensor) -> tuple[Tensor, ...]:
    """Return rows, keys, values and the mask of a call: [bucket, 1, row or key, D or key]."""
    (first, step, met), n, w, dim = call.keys, call.rows[2], run.window, turned.shape[-1]
    size = w * dim

    def keys(x: Tensor, begin: int) -> Tensor:
        start = x.storage_offset() + (begin + first) * size
        return x.as_strided((n, 1, met * w, dim), (step * size, met * size, dim, 1), start)

    columns = _aligned(2 * w)
    # all buckets share one mask; for two ends, the last one's own keys are one bucket further, in other columns
    masked = own.as_strided((n, 1, w, met * w), (0 if call.own else columns, 0, own.shape[1], 1), call.own * columns)
    return _rows_of(call, run, turned), keys(turned, run.rows), keys(values, 0), masked


def _attend(q: Tensor, k: Tensor, values: Tensor, own: Tensor) -> tuple[Tensor, ...]:
    """Return the result, and the tensors that its backward pass requires in addition to the inputs."""
    scale = q.shape[-1] ** -0.5
    if _is_cuda(q):
        return tuple(attend_on_cuda(q, k, values, own, True, scale=scale))
    return tuple(attend_on_cpu(q, k, values, attn_mask=own, scale=scale))


def _attend_back(
    grad: Tensor, q: Tensor, k: Tensor, values: Tensor, own: Tensor, saved: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Return the gradients of rows, keys and values."""
    scale = q.shape[-1] ** -0.5
    if _is_cuda(q):
        wanted = [True, True, True, False]
        return tuple(attend_on_cuda_back(grad, q, k, values, own, *saved, 0.0, wanted, scale=scale)[:3])
    return tuple(attend_on_cpu_back(grad, q, k, values, *saved, 0.0, False, attn_mask=own, scale=scale))


def _is_cuda(x: Tensor) -> bool:
    return x.is_cuda


def _check(q: Tensor, dtype: torch.dtype) -> None:
    kind, dim = q.device.type, q.shape[1]
    if kind in ("cpu", "meta"):
        return
    if kind == "cuda" and dtype.itemsize <= 4 and dim * dtype.itemsize % ALIGNED_BYTES == 0:
        return
    raise InstallError(
        f"'sdpa' does not support {dim!r} channels in {dtype!r} on {kind!r}; torch has fused kernels for CPUs, and on"
        f" CUDA for rows of a multiple of {ALIGNED_BYTES!r} bytes, not of float64: choose 'fused', which takes all"
    )


def mask(window: int, dtype: torch.dtype, like: Tensor) -> Float[Tensor, "row column"]:
    """Return the mask, new or cached: that of the first bucket, and from an aligned column on that of all others."""
    return cast(Tensor, kept(_mask, like)(window, dtype, like.device))


def _mask(window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    first, n_columns = _aligned(2 * window), _aligned(2 * window) + _aligned(3 * window)
    own = torch.zeros(window, n_columns, dtype=dtype, device=device)
    # the own keys of the first bucket are the first w; those of others are the second w, after `first` columns
    own.as_strided((2, window), (first + window, n_columns + 1)).fill_(OWN)
    return own


def _zeros(window: int, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return four buckets of zeros."""
    return torch.zeros(4, window, dim, dtype=dtype, device=device)


def _aligned(n: int) -> int:
    return -(-n // ALIGNED_COLUMNS) * ALIGNED_COLUMNS
