"""Replace a decoder's local attention by chunked (S3), fused or sdpa attention.

    S3      rows [a, b) = attend(prepare(q, k, values), a, b), a few buckets at a time, recomputed in the backward pass
    fused   products of a few rows at a time, and a hand-written backward pass (banded_softmax.py)
    sdpa    one or two calls of torch's fused kernels: few operators, more bytes kept (sdpa.py)

S3 equals eager attention bit for bit; only the order of sums over chunks differs, in the gradients of keys and values.
The probabilities [N, 3w] and the copies of keys and values [W, 3w, D] exist for one chunk only; with `retain` (the
paper's form) autograd keeps those of every chunk. Every chunk is computed twice, and adds gradients [N, D].

fused and sdpa agree with the reference to 1e-15 in float64, output and gradients. In float32 they are closer to the
float64 result than the reference is, which rounds the angles of its positions to float32. fused keeps q, k and values
only, and computes the scores twice unless it keeps the weights [N, 3w]; sdpa stores no scores, and keeps 3 to 4 tensors
[N, D]. There are no collectives.

Legend: anchor (N), dim (D), row (of a run of buckets), key (of these rows and their neighbours), w window, W = ceil(N /
w) buckets.
"""

import copy
from functools import partial
from itertools import product
from typing import Any, Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_amp.errors import InstallError
from lightning_amp.shapes import PerAnchor
from lightning_amp.techniques.checks.key import attention_results
from lightning_amp.techniques.checks.same_function import found_out, mismatch, own_attributes
from lightning_amp.techniques.contract.change import hooks_within
from lightning_amp.techniques.contract.protocol import BucketedAttention
from lightning_amp.techniques.hic.attention.banded_softmax import banded_softmax
from lightning_amp.techniques.hic.attention.sdpa import sdpa_attention
from lightning_amp.techniques.hic.attention.sizes import check_rows, check_sizes
from lightning_amp.techniques.hic.rows import ChunkedAttention, FusedAttention, SdpaAttention

Kernel = Literal["products", "sdpa"]
EXAMPLE_WINDOW = 3
EXAMPLE_ROWS = (2, 12, 14)
"""Numbers of rows that are tested: one bucket; full buckets; an incomplete last bucket."""
CLOSE = 1e-10


def fuse_attention(attention: nn.Module, *, keep: bool = False, kernel: Kernel = "products") -> nn.Module:
    """Return equivalent fused attention; `keep` keeps the weights for the backward pass (products only)."""
    problem = _structure_problem(attention) or found_out(attention, _value_problem)
    if problem:
        strategy = "fused" if kernel == "products" else kernel
        raise InstallError(
            f"{strategy!r} does not support {type(attention).__name__!r}, which {problem}; only a module that computes"
            " what LocalAttention(dim, window) does, of all channels, and has no state except its numbers can be"
            f" replaced: move the rest to its parent, or leave {strategy!r} out (S3 takes any bucketed attention)"
        )
    return FusedLocalAttention(cast(Any, attention).dim, cast(Any, attention).window, keep=keep, kernel=kernel)


class FusedLocalAttention(nn.Module):
    """Local attention in buckets of `window` anchors, with a hand-written backward pass; made by `fuse_attention`."""

    stays_eager = True

    def __init__(self, dim: int, window: int, *, keep: bool = False, kernel: Kernel = "products") -> None:
        super().__init__()
        check_sizes("FusedLocalAttention", dim, window)
        self.dim = dim
        self.window = window
        self.keep = keep
        self.kernel: Kernel = kernel

    def extra_repr(self) -> str:
        """Shown by `print(module)`."""
        kernel = "" if self.kernel == "products" else f", kernel={self.kernel!r}"
        return f"dim={self.dim}, window={self.window}" + (", keep=True" if self.keep else "") + kernel

    def n_buckets(self, n: int) -> int:
        """Return the number of buckets that n anchors fill."""
        return -(-n // self.window)

    def prepare(self, q: PerAnchor, k: PerAnchor, values: PerAnchor) -> tuple[Tensor, ...]:
        """Return q, k and values unchanged."""
        check_rows(q, k, values)
        return q, k, values

    def attend(self, state: tuple[Tensor, ...], first: int, last: int) -> Float[Tensor, "row dim"]:
        """Return the rows of the buckets [first, last), without rows beyond the last anchor."""
        q, k, values = state
        n, w = len(q), self.window
        begin, end = first * w, min(last * w, n)
        # a bucket attends only to itself and its two neighbours
        start, stop = max(begin - w, 0), min(end + w, n)
        near = slice(start, stop)
        return fused_rows(
            q[begin:end],
            k[near],
            values[near],
            window=w,
            before=begin - start,
            after=stop - end,
            keep=self.keep,
            kernel=self.kernel,
        )

    def forward(self, q: PerAnchor, k: PerAnchor, values: PerAnchor) -> PerAnchor:
        """Compute attention of all buckets."""
        check_rows(q, k, values)
        return fused_rows(q, k, values, window=self.window, keep=self.keep, kernel=self.kernel)


def fused_rows(
    q: Float[Tensor, "row dim"],  # queries of the own rows, which start with a full bucket
    k: Float[Tensor, "key dim"],  # keys of the rows before, of the own rows and of the rows after
    values: Float[Tensor, "key dim"],
    *,
    window: int,
    before: int = 0,  # rows before the own ones, full buckets; 0 at the start of the sequence
    # rows after the own ones; 0 at the end of the sequence. If `after`, or without it the own rows, are not full
    # buckets, the sequence ends there, and the rest of the bucket counts as zeros
    after: int = 0,
    keep: bool = False,
    kernel: Kernel = "products",
) -> Float[Tensor, "row dim"]:
    """Compute local attention of a run of buckets, given the keys and values of its neighbours."""
    n = len(q)
    assert len(k) == len(values) == before + n + after, f"{len(k)=} is not {before=} + {n=} + {after=}"
    assert before % window == 0, f"{before=} is not a number of whole buckets of {window=}"
    assert after == 0 or n % window == 0, f"{n=} rows end within a bucket of {window=}, and {after=} follow"
    if kernel == "sdpa":
        return sdpa_attention(q, k, values, window=window, before=before)
    return banded_softmax(q, k, values, window=window, before=before, keep=keep)


def _structure_problem(attention: nn.Module) -> str:
    """Return why a module cannot be replaced, without computing anything; "" if it can."""
    sizes = {name: getattr(attention, name, None) for name in ("dim", "window")}
    found = {
        "the settings": [f"{name}={size!r}" for name, size in sizes.items() if type(size) is not int],
        "the state": [name for name, _ in (*attention.named_parameters(), *attention.named_buffers())],
        "the children": [name for name, _ in attention.named_children()],
        "the hooks": hooks_within(attention),
        # a function may be the sum over other ranks' channels: it cannot be probed
        "the attributes": [n for n, v in own_attributes(attention).items() if callable(v) or isinstance(v, Tensor)],
    }
    return " and ".join(f"has {what} {names!r}" for what, names in found.items() if names)


def _value_problem(attention: nn.Module) -> str:
    """Return where a module's results on small examples differ; "" if nowhere."""
    ours = FusedLocalAttention(cast(Any, attention).dim, EXAMPLE_WINDOW)
    for n, training in product(EXAMPLE_ROWS, (True, False)):
        # _structure_problem has excluded modules with state
        problem = mismatch(attention, ours, partial(_results, n=n, training=training), rtol=CLOSE)
        if problem:
            return f"{problem} of {n!r} anchors with window={EXAMPLE_WINDOW!r}"
    return ""


def _results(attention: nn.Module, *, n: int, training: bool) -> dict[str, Tensor | None]:
    """Return output and gradients with small buckets; a module whose result ignores the bucket size will differ."""
    small = cast(Any, copy.deepcopy(attention).train(training))
    small.window = EXAMPLE_WINDOW
    return attention_results(small, n, small.dim)


def chunk_attention(attention: nn.Module, *, buckets: int, retain: bool = False) -> nn.Module:
    """Return the same attention, `buckets` at a time; `retain` keeps every chunk's tensors for the backward pass."""
    kind = type(attention).__name__
    if not isinstance(attention, BucketedAttention):
        missing = [name for name in ("n_buckets", "prepare", "attend") if not hasattr(attention, name)]
        raise InstallError(
            f"S3 does not support {kind!r}, which lacks {missing!r}; chunks need a module with n_buckets(n),"
            " prepare(q, k, values) and attend(state, first, last): give it these, or leave S3 out"
        )
    names = sorted(attention.state_dict())
    if names:
        raise InstallError(
            f"S3 does not support {kind!r}, which has the state {names!r}; chunking would rename it in checkpoints, so"
            " only attention without state is allowed: move it to the parent, or leave S3 out"
        )
    if isinstance(buckets, bool) or not isinstance(buckets, int) or buckets < 1:
        raise InstallError(
            f"S3 got buckets={buckets!r}; a chunk has a whole number of buckets, at least 1: use 1 for the least memory"
        )
    return ChunkedLocalAttention(attention, buckets=buckets, retain=retain)


class ChunkedLocalAttention(nn.Module):
    """Compute attention chunk by chunk; made by `chunk_attention`."""

    stays_eager = True

    def __init__(self, inner: nn.Module, *, buckets: int, retain: bool) -> None:
        super().__init__()
        self.inner = inner
        self.buckets = buckets
        self.retain = retain

    def extra_repr(self) -> str:
        """Shown by `print(module)`."""
        return f"buckets={self.buckets}, retain={self.retain}"

    def forward(self, q: PerAnchor, k: PerAnchor, values: PerAnchor) -> PerAnchor:
        """Compute attention of all buckets; one chunk is alive at a time."""
        inner = cast(BucketedAttention, self.inner)
        state, n_buckets = inner.prepare(q, k, values), inner.n_buckets(len(q))
        firsts = range(0, n_buckets, self.buckets)
        attend = inner.attend
        if not self.retain:
            attend = partial(checkpoint, attend, use_reentrant=False, preserve_rng_state=False)
        rows = [attend(state, first, min(first + self.buckets, n_buckets)) for first in firsts]
        return torch.cat(rows)[: len(q)]


def chunked(module: nn.Module, spec: ChunkedAttention, mesh: Any) -> nn.Module:
    """Install S3: attention a few buckets at a time."""
    return chunk_attention(module, buckets=spec.buckets, retain=spec.retain)


def fused(module: nn.Module, spec: FusedAttention, mesh: Any) -> nn.Module:
    """Install fused attention: scores of a few queries at a time, and a hand-written backward pass."""
    return fuse_attention(module, keep=spec.keep)


def sdpa(module: nn.Module, spec: SdpaAttention, mesh: Any) -> nn.Module:
    """Install attention in torch's fused kernels."""
    return fuse_attention(module, kernel="sdpa")
