"""Compute full attention of a rank's anchors to those of all ranks: keys and values travel a ring of ranks.

Exact up to the order of the sums over ranks. No rank has scores [N, N], nor keys and values of more than two ranks.

    collectives of a call   forward, R - 1 steps      backward, R steps
                            2 all-to-all  n D each    4 all-to-all  n D each; in the last step 2

Legend: N anchors, n own anchors, D dim, R ranks.
Known limit: second derivatives are refused.
"""

from torch import nn

from lightning_amp.dist.ring_attention import ring_attention
from lightning_amp.dist.sharded_tensor import computed_in
from lightning_amp.dist.splits import axis_of
from lightning_amp.shapes import PerAnchor
from lightning_amp.techniques.hic.attention.sizes import check_rows
from lightning_amp.techniques.ranks.anchor_shards import AnchorShards


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
