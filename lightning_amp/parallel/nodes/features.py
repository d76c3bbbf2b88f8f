"""The features of a stratum whose anchors a rank holds, in any order of the stratum's features.

    own columns = those f with feature_anchor[f] in the own anchors; their anchors count from the first own one

Softmax and scores are those of S2 (s2_features/decoder.py); a rank may own no feature, and takes part all the same.
Where the own columns are a run, as when the anchors ascend, they are sliced, which costs nothing; else gathered.

    collectives      forward                   backward
    log_softmax      1 all-gather [B]          1 all-reduce [B]
    whole            1 all-gather [B, f]       none                   for `mean`

Legend: cell (B), stratum_feature (F_k), own_feature (those of this rank), f the most features of a rank.
"""

from itertools import accumulate

import torch
from torch import Tensor, nn

from lightning_amp.parallel.ranks.anchor_shards import AnchorShards
from lightning_amp.parallel.s2_features.decoder import ShardedFeatures
from lightning_amp.shapes import FeatureAnchor


class AnchorFeatures(ShardedFeatures):
    """The part of a stratum's features that belongs to this rank's anchors; made by `share_anchors`."""

    def __init__(self, feature_anchor: FeatureAnchor, anchors: AnchorShards) -> None:
        nn.Module.__init__(self)
        self.mesh, self.n_features = anchors.mesh, len(feature_anchor)
        firsts = torch.tensor(anchors.bounds[1:-1], dtype=feature_anchor.dtype, device=feature_anchor.device)
        owner = torch.bucketize(feature_anchor, firsts, right=True)
        order = owner.argsort(stable=True)
        self.sizes = owner.bincount(minlength=len(anchors.sizes)).tolist()
        rank = anchors.mesh.get_local_rank()
        first = list(accumulate(self.sizes, initial=0))[rank]
        columns = order[first : first + self.sizes[rank]]
        # one tensor for good: S4 looks at the values of a tensor that it has not seen, which waits for the device
        self.register_buffer("feature_anchor", feature_anchor[columns] - anchors.own.start, persistent=False)
        self.run = _run(columns)
        self.register_buffer("columns", columns.clone() if self.run is None else None, persistent=False)
        ascending = _run(order) is not None
        self.register_buffer("places", None if ascending else order.argsort(), persistent=False)


def _run(columns: Tensor) -> slice | None:
    if not len(columns):
        return slice(0, 0)
    first = int(columns[0])
    run = torch.arange(first, first + len(columns), device=columns.device)
    return slice(first, first + len(columns)) if torch.equal(columns, run) else None
