"""Assign anchors to ranks, and cut v [N, D] to a rank's rows.

Anchors are sharded in whole buckets of attention, so that a bucket and its two neighbours lie on three ranks at most
(with full attention, which has no buckets, in buckets of one):
rank r has the buckets [r W // R, (r + 1) W // R). Ranks may differ by one bucket; the last bucket may be short.

    take_anchors v -> own rows, forward nothing     backward one all-gather of the rows' gradients, and of the
                 u, log_weights -> the same           parts of those of u and log_weights, which are added up

Exact: gradients of rows are moved, and those that every rank has a part of are summed once.
Legend: cell (B), anchor (N), dim (D), stratum (K), W buckets of w anchors, R ranks, n the most anchors of a rank.
A rank sends n D + B D + K numbers; with a head for the strata's weights, n D + B D + B K.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp.errors import InstallError
from lightning_amp.shapes import LogWeights, PerAnchor, PerCell
from lightning_amp.techniques.ranks import collectives


@dataclass(frozen=True, eq=False, slots=True)
class AnchorShards:
    """The anchors of all ranks of a mesh axis.

    Attributes:
        bounds: First anchor of every rank, and N.
    """

    mesh: DeviceMesh
    window: int
    bounds: tuple[int, ...]

    @property
    def sizes(self) -> list[int]:
        """Anchors of every rank."""
        return list(map(len, self.owned))

    @property
    def owned(self) -> list[range]:
        """The anchors of every rank."""
        return [range(start, stop) for start, stop in pairwise(self.bounds)]

    @property
    def own(self) -> range:
        """The anchors of this rank."""
        return self.owned[self.mesh.get_local_rank()]

    @property
    def n_buckets(self) -> int:
        """Own buckets."""
        return -(-len(self.own) // self.window)

    @property
    def before(self) -> bool:
        """Whether a rank has the bucket before the first of this one."""
        return self.own.start > 0

    @property
    def after(self) -> bool:
        """Whether a rank has the bucket after the last of this one."""
        return self.own.stop < self.bounds[-1]

    def pad(self, part: Float[Tensor, "own_anchor dim"]) -> Float[Tensor, "most_anchor dim"]:
        """Own rows with zeros up to the most of a rank; all-gathers move parts of one size."""
        fill = max(self.sizes) - len(part)
        return F.pad(part, (0, 0, 0, fill)) if fill else part

    def join(self, block: Float[Tensor, "rank most_anchor dim"]) -> PerAnchor:
        """All rows from all ranks' padded ones."""
        return torch.cat([part[:size] for part, size in zip(block, self.sizes, strict=True)])


def shard_anchors(n_anchors: int, window: int, mesh: DeviceMesh) -> AnchorShards:
    """Shard anchors over a mesh axis in whole buckets.

    Raises:
        InstallError: More ranks than there are buckets.
    """
    ranks, buckets = mesh.size(), -(-n_anchors // window)
    if ranks > buckets:
        raise InstallError(
            f"nodes got {ranks!r} ranks on the model axis, and N={n_anchors!r} anchors fill {buckets!r}"
            f" buckets of {window!r}, which are sharded whole; use a model axis of {buckets!r} ranks or"
            " fewer"
        )
    firsts = (rank * buckets // ranks * window for rank in range(ranks))
    return AnchorShards(mesh=mesh, window=window, bounds=(*firsts, n_anchors))


def take_anchors(
    rows: AnchorShards, u: PerCell, v: PerAnchor, log_weights: LogWeights
) -> tuple[PerCell, Float[Tensor, "own_anchor dim"], LogWeights]:
    """What the strata of this rank read, of values that every rank holds whole."""
    return cast(tuple[Tensor, Tensor, Tensor], _TakeAnchors.apply(rows, u, v, log_weights))  # type: ignore[no-untyped-call]


class _TakeAnchors(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: AnchorShards, u: Tensor, v: Tensor, log_weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.rows, ctx.behind = rows, "outside"
        # what no rank uses has no gradient, and not one of zeros, which an optimiser would decay by
        ctx.set_materialize_grads(False)
        return u.view_as(u), v[rows.own.start : rows.own.stop], log_weights.view_as(log_weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        rows: AnchorShards = ctx.rows
        # one all-gather for all three: v's rows are joined, of u and log_weights every rank has a part to add up
        padded = [rows.pad(grad) if i == 1 and grad is not None else grad for i, grad in enumerate(grads)]
        sent = [grad for grad in padded if grad is not None]
        if not sent:
            return None, *grads
        block = collectives.all_gather(rows.mesh, torch.cat([grad.reshape(-1) for grad in sent]))
        parts = iter(torch.split(block, [grad.numel() for grad in sent], dim=1))
        blocks = [None if grad is None else next(parts).reshape(-1, *grad.shape) for grad in padded]
        u, v, log_weights = (
            None if part is None else rows.join(part) if i == 1 else part.sum(0) for i, part in enumerate(blocks)
        )
        return None, u, v, log_weights
