"""Exchange rows of keys and values between neighbouring ranks: one bucket of anchors each way.

    start     own first and last bucket -> what is under way    forward starts to send; backward waits
    finish    what is under way -> the neighbours' rows         forward waits; backward starts to send gradients back

Whatever is computed between the two runs while rows are under way: forward, because it is called then; backward,
because autograd goes from the last node to the first. A row's gradient is the sum of its owner's and its neighbours'.

Each is one all-to-all in which a rank has rows for its neighbours only: as fast on gloo as a send and a receive for
each neighbour, and the only one of the two that works without values, for a simulation. Sent are 2 w D numbers to each
neighbour, and as many back.

Legend: row (own anchors), dim (D), w anchors of a bucket; before, after: the bucket of the rank before, and after.
Known limit: second derivatives are refused.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from lightning_amp._torch import functional_collectives as functional
from lightning_amp.techniques.ranks.anchor_shards import AnchorShards


def start(rows: AnchorShards, edges: Sequence[Float[Tensor, "_ two_dim"]]) -> Float[Tensor, "halo two_dim"]:
    """Send keys and values, side by side, to the neighbours; what is returned is only for `finish`.

    Every rank must call it, also one that has a single neighbour.

    Args:
        edges: The first own bucket for the rank before, and the last for the rank after, as far as there are these.
    """
    sent = torch.cat([_pad(edge, rows.window) for edge in edges])
    return cast(Tensor, _Start.apply(sent, rows))  # type: ignore[no-untyped-call]


def finish(
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
        return _wait(grad), None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, under_way: Tensor, rows: AnchorShards) -> Tensor:
        ctx.rows = rows
        return _wait(under_way).view_as(under_way)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _exchange(ctx.rows, grad), None


def _pad(bucket: Tensor, window: int) -> Tensor:
    """The last bucket of all may be short, and alone on its rank; autograd wants as many rows back as were sent."""
    return F.pad(bucket, (0, 0, 0, window - len(bucket))) if len(bucket) < window else bucket


def _exchange(rows: AnchorShards, sent: Tensor) -> Tensor:
    """A bucket to and from each neighbour; the result is not to be read before it was waited for."""
    own = rows.mesh.get_local_rank()
    sizes = [rows.window if abs(rank - own) == 1 else 0 for rank in range(len(rows.sizes))]
    found = functional.all_to_all_single(sent.contiguous(), sizes, sizes, rows.mesh.get_group())
    # the wrapper would wait wherever autograd looks at it
    return cast(Tensor, getattr(found, "elem", found))


def _wait(under_way: Tensor) -> Tensor:
    return cast(Tensor, functional.wait_tensor(under_way))  # type: ignore[no-untyped-call]
