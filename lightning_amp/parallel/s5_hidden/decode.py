"""Decode from the own channels of cells and keys, under S5.

    forward    (u key^T)[:, feature_anchor] = sum_r (u_r key_r^T)[:, feature_anchor]     replicated
    scatter    the same sum for the rank's own features only, under S2 and S5

    forward    one all-reduce of B F_k numbers          backward nothing: every rank has the whole gradient
    scatter    one reduce-scatter of B R run numbers    backward one all-gather of B run per rank

Exact up to the order of the sum over ranks. What decodes inside (all anchors, or S4's selected ones) is kept.
Legend: cell (B), anchor (N), own_dim (d_r), feature (F_k), run = ceil(F_k / R) features per rank, R ranks.
"""

from typing import cast

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp.parallel.ranks import collectives
from lightning_amp.shapes import Counts, FeatureAnchor, OwnCounts


class HiddenDecode(nn.Module):
    """A decode whose inner products are summed over the ranks' channels.

    Args:
        inner: A decode that is bilinear in cells and keys.
        mesh: The mesh axis that shards the channels.
    """

    def __init__(self, inner: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__()
        self.inner = inner
        self.mesh = mesh

    def forward(
        self,
        u: Float[Tensor, "cell own_dim"],
        key: Float[Tensor, "anchor own_dim"],
        feature_anchor: FeatureAnchor,
    ) -> Counts:
        """Scores of all features, replicated."""
        return collectives.leave(self.mesh, self.inner(u, key, feature_anchor))

    def scatter(
        self,
        u: Float[Tensor, "cell own_dim"],
        key: Float[Tensor, "anchor own_dim"],
        feature_anchor: FeatureAnchor,
        run: int,
    ) -> OwnCounts:
        """Scores of the features [rank * run, (rank + 1) * run); `feature_anchor` are those of all features."""
        ranks, rank = self.mesh.size(), self.mesh.get_local_rank()
        assert ranks * run >= len(feature_anchor), (
            f"{ranks!r} runs of {run!r} do not hold {len(feature_anchor)!r} features"
        )
        part = cast(Tensor, self.inner(u, key, feature_anchor))
        filled = F.pad(part, (0, ranks * run - len(feature_anchor))).view(len(part), ranks, run)
        own = collectives.scatter(self.mesh, filled.movedim(1, 0))
        return own[:, : max(0, min(run, len(feature_anchor) - rank * run))]
