"""Compute attention of a rank's anchors: local with a bucket of each neighbouring rank, full with the rows of all.

    own buckets that see own ones only     attend(prepare(own q, k, values))
    the first and the last own bucket      attend(prepare(three buckets, the neighbour's among them)), one bucket of it

Exact up to the order of sums. No copy of all own keys with the neighbours' rows is made; up to six buckets are prepared
once more. Rows travel in 1 all-to-all forward and 1 backward, 2 w D numbers to each neighbour, during which the inner
buckets are attended. S3 asks for chunks of buckets in any order, so that under S3 the rows are waited for first.

    start_exchange     own edges -> what is under way                 forward starts to send; backward waits
    finish_exchange    what is under way -> the neighbours' rows      forward waits; backward starts to send gradients

Full attention: keys and values travel a ring of ranks; no rank has scores [N, N], nor keys and values of more than two.

    collectives of a call   forward, R - 1 steps      backward, R steps
                            2 all-to-all  n D each    4 all-to-all  n D each; in the last step 2

Legend: N anchors, n own anchors, D dim, R ranks, w anchors of a bucket, own buckets 0 .. W - 1; before, after: the
bucket of the rank before, and after. Known limit: second derivatives are refused.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lightning_amp.dist.ring_attention import ring_attention
from lightning_amp.dist.sharded_tensor import computed_in
from lightning_amp.dist.splits import axis_of
from lightning_amp.shapes import PerAnchor
from lightning_amp.techniques.contract.protocol import BucketedAttention
from lightning_amp.techniques.hic.attention.sizes import check_rows
from lightning_amp.techniques.ranks import collectives
from lightning_amp.techniques.ranks.anchor_shards import AnchorShards


def start_exchange(
    rows: AnchorShards, edges: Sequence[Float[Tensor, "_ two_dim"]]
) -> Float[Tensor, "halo two_dim"]:
    """Send keys and values, side by side, to the neighbours; what is returned is only for `finish_exchange`.

    Every rank must call it. `edges`: the first own bucket for the rank before, the last for the rank after, if there
    are.
    """
    # the last bucket of all may be short, and alone on its rank; autograd wants as many rows back as were sent
    sent = torch.cat([F.pad(edge, (0, 0, 0, rows.window - len(edge))) for edge in edges])
    return cast(Tensor, _Start.apply(sent, rows))  # type: ignore[no-untyped-call]


def finish_exchange(
    rows: AnchorShards, under_way: Float[Tensor, "halo two_dim"]
) -> tuple[Float[Tensor, "before two_dim"], Float[Tensor, "after two_dim"]]:
    """Keys and values of the bucket before, and of that after; none at an end of the sequence."""
    received: Tensor = _Finish.apply(under_way, rows)  # type: ignore[no-untyped-call]
    n_before = rows.window * rows.before
    return received[:n_before], received[n_before:][: rows.bounds[-1] - rows.own.stop]


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sent: Tensor, rows: AnchorShards) -> Tensor:
        return _exchange(rows, sent)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return collectives.wait_for(grad), None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, under_way: Tensor, rows: AnchorShards) -> Tensor:
        ctx.rows = rows
        return collectives.wait_for(under_way).view_as(under_way)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _exchange(ctx.rows, grad), None


def _exchange(rows: AnchorShards, sent: Tensor) -> Tensor:
    """A bucket to and from each neighbour; the result is not to be read before it was waited for."""
    own = rows.mesh.get_local_rank()
    sizes = [rows.window if abs(rank - own) == 1 else 0 for rank in range(len(rows.sizes))]
    return collectives.start_all_to_all(rows.mesh, sent, sizes, sizes)


State = tuple[Tensor, ...]


class HaloAttention(nn.Module):
    """Bucketed attention of a run of buckets among those of other ranks; made by `share_anchors`."""

    inner: BucketedAttention

    def __init__(self, inner: nn.Module, anchors: AnchorShards) -> None:
        super().__init__()
        self.inner = cast(Any, inner)
        self.anchors = anchors
        # at an end of the sequence the outer bucket has no other rank's rows to wait for
        self.inside = range(anchors.before, max(anchors.n_buckets - anchors.after, anchors.before))
        self.outer = [j for j in range(anchors.n_buckets) if j not in self.inside]

    def extra_repr(self) -> str:
        """Shown by `print(module)`."""
        own = self.anchors.own
        return f"anchors [{own.start}, {own.stop}) of {self.anchors.bounds[-1]}, ranks={self.anchors.mesh.size()}"

    def n_buckets(self, n: int) -> int:
        """Buckets that n anchors fill."""
        return self.inner.n_buckets(n)

    def forward(self, q: PerAnchor, k: PerAnchor, values: PerAnchor) -> PerAnchor:
        """Attention of all own buckets; the inner ones while the neighbours' rows are under way."""
        if not self.outer:
            return cast(Any, self.inner)(q, k, values)  # type: ignore[no-any-return]
        near = self._near(q, k, values)
        under_way = self._send(near)
        inside = self._inside(self.inner.prepare(q, k, values), self.inside) if self.inside else []
        pieces = self._pieces(near, under_way)
        return self._in_order(dict(zip(self.outer, pieces, strict=True)), inside)[: len(q)]

    def prepare(self, q: PerAnchor, k: PerAnchor, values: PerAnchor) -> State:
        """What `attend` reads: that of the own rows, then that of every outer bucket's surroundings."""
        own = self.inner.prepare(q, k, values)
        if not self.outer:
            return own
        near = self._near(q, k, values)
        pieces = self._pieces(near, self._send(near))
        return tuple(tensor for state in (own, *pieces) for tensor in state)

    def attend(self, state: State, first: int, last: int) -> Float[Tensor, "row dim"]:
        """Rows of the own buckets [first, last)."""
        length = len(state) // (1 + len(self.outer))
        own, *pieces = (state[i : i + length] for i in range(0, len(state), length))
        asked = {j: piece for j, piece in zip(self.outer, pieces, strict=True) if first <= j < last}
        buckets = range(max(first, self.inside.start), min(last, self.inside.stop))
        return self._in_order(asked, self._inside(own, buckets))

    def _inside(self, state: State, buckets: range) -> list[Tensor]:
        return [self.inner.attend(state, buckets.start, buckets.stop)] if buckets else []

    def _in_order(self, pieces: dict[int, State], inside: list[Tensor]) -> Tensor:
        """Rows of the outer buckets that are requested, and of those between."""
        # which bucket of its piece an outer bucket is
        places = {j: int(j > 0 or self.anchors.before) for j in pieces}
        rows = {j: self.inner.attend(piece, places[j], places[j] + 1) for j, piece in pieces.items()}
        first = self.inside.start
        before, after = ([r for j, r in rows.items() if (j < first) == side] for side in (True, False))
        return torch.cat([*before, *inside, *after])

    def _near(self, *own: Tensor) -> list[State]:
        """Own rows of q, k and values around every outer bucket."""
        w = self.anchors.window
        around = [slice(max(j - 1, 0) * w, (j + 2) * w) for j in self.outer]
        return [tuple(rows[part] for rows in own) for part in around]

    def _send(self, near: list[State]) -> Tensor:
        w, (_, *first), (_, *last) = self.anchors.window, near[0], near[-1]
        edges = [[x[:w] for x in first]] * self.anchors.before + [[x[-w:] for x in last]] * self.anchors.after
        return start_exchange(self.anchors, [torch.cat(edge, dim=1) for edge in edges])

    def _pieces(self, near: list[State], under_way: Tensor) -> list[State]:
        """What `attend` reads of every outer bucket and its neighbours; waits for the neighbours' rows."""
        before, after = finish_exchange(self.anchors, under_way)
        none = before[:0]
        sides = [
            (before if j == 0 else none, after if j == self.anchors.n_buckets - 1 else none)
            for j in self.outer
        ]
        return [self._piece(own, *side) for own, side in zip(near, sides, strict=True)]

    def _piece(self, own: State, before: Tensor, after: Tensor) -> State:
        q, k, values = own
        dim = k.shape[1]
        # queries of the neighbours' rows are asked by nobody; under autocast, keys and values were sent as one type
        return self.inner.prepare(
            F.pad(q, (0, 0, len(before), len(after))),
            torch.cat((before[:, :dim].to(k.dtype), k, after[:, :dim].to(k.dtype))),
            torch.cat((before[:, dim:].to(values.dtype), values, after[:, dim:].to(values.dtype))),
        )


class RingAttention(nn.Module):
    """Attention of the own anchors to all; made by `share_anchors`."""

    def __init__(self, anchors: AnchorShards) -> None:
        super().__init__()
        self.anchors = anchors

    def extra_repr(self) -> str:
        """Shown by `print(module)`."""
        own = self.anchors.own
        return f"anchors [{own.start}, {own.stop}) of {self.anchors.bounds[-1]}, ranks={self.anchors.mesh.size()}"

    def forward(self, q: PerAnchor, k: PerAnchor, values: PerAnchor) -> PerAnchor:
        """Rows of the own anchors."""
        check_rows(q, k, values)
        # autocast does not see the kernels of a block
        rows = [computed_in(x)[None, None] for x in (q, k, values)]
        owned = self.anchors.owned
        axis, scale = axis_of(self.anchors.mesh), q.shape[1] ** -0.5
        return ring_attention(*rows, axis=axis, rows=owned, columns=owned, scale=scale)[0, 0]
