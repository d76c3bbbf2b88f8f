"""S3: local attention a few buckets at a time, recomputed in the backward pass.

    rows [a, b) = attend(prepare(q, k, values), a, b)        out = all rows, cut to N

Exact: the output equals the eager one bit for bit; in the gradients of keys and values only the order of the
sum over chunks differs. No collectives. What shrinks: the probabilities [N, 3w] and the copies of the three
neighbouring buckets' keys and values [W, 3w, D] exist for one chunk only, forward and backward. With `retain`
(the paper's form) autograd keeps those of every chunk, so that only what is not kept shrinks.
The price: every chunk is computed twice, and its backward adds gradients of the size [N, D].

Legend: anchor (N), dim (D), w window, W = ceil(N / w) buckets.
"""

from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_amp.errors import InstallError
from lightning_amp.shapes import PerAnchor
from lightning_amp.techniques.contract.protocol import BucketedAttention


def chunk_attention(attention: nn.Module, *, buckets: int, retain: bool = False) -> nn.Module:
    """The same attention, computed `buckets` at a time.

    Args:
        attention: Bucketed attention without parameters.
        buckets: Buckets in one chunk, at least 1.
        retain: Keep every chunk's intermediates for the backward pass instead of recomputing them.

    Raises:
        InstallError: The module is no bucketed attention, has state, or `buckets` is not positive.
    """
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
            f"S3 does not support {kind!r}, which has the state {names!r}; chunking would rename it in"
            " checkpoints, so only attention without state is allowed: move it to the parent, or leave S3"
            " out"
        )
    if isinstance(buckets, bool) or not isinstance(buckets, int) or buckets < 1:
        raise InstallError(
            f"S3 got buckets={buckets!r}; a chunk has a whole number of buckets, at least 1: use 1 for the"
            " least memory"
        )
    return ChunkedLocalAttention(attention, buckets=buckets, retain=retain)


class ChunkedLocalAttention(nn.Module):
    """Attention chunk by chunk; made by `chunk_attention`."""

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
        """Attention over all buckets, one chunk alive at a time."""
        inner = cast(BucketedAttention, self.inner)
        state, n_buckets = inner.prepare(q, k, values), inner.n_buckets(len(q))
        firsts = range(0, n_buckets, self.buckets)
        rows = [self._chunk(state, first, min(first + self.buckets, n_buckets)) for first in firsts]
        return torch.cat(rows)[: len(q)]

    def _chunk(self, state: tuple[Tensor, ...], first: int, last: int) -> Tensor:
        attend = cast(BucketedAttention, self.inner).attend
        if self.retain:
            return attend(state, first, last)
        rows = checkpoint(attend, state, first, last, use_reentrant=False, preserve_rng_state=False)
        return cast(Tensor, rows)
