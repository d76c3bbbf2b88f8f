"""Select the keys of a stratum's anchors before the product with the cells (S4).

    (u key^T)[:, feature_anchor] = u key[feature_anchor]^T

Exact: every entry is the same inner product (the matrix product may round its sums in another order). No collectives.
Saved: the products [B, N] of all anchors become the requested [B, F_k]. Cost: the selected keys [F_k, D], which are a
view without cost if the feature_anchor are consecutive. With fewer cells than dimensions and F_k near N, the cost
exceeds the savings.

Legend: cell (B), anchor (N), dim (D), feature (F_k of the stratum).
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_amp._torch import version_of
from lightning_amp.errors import InstallError
from lightning_amp.shapes import Counts, FeatureAnchor, PerAnchor, PerCell
from lightning_amp.techniques.checks.decoder import decode_problem
from lightning_amp.techniques.ranks.shards import run_of


def key_first(decode: nn.Module, spec: object = None, mesh: object = None) -> nn.Module:
    """Return a decode that selects the keys first."""
    problem = decode_problem(decode)
    if problem:
        raise InstallError(
            f"S4 does not support {type(decode).__name__!r}, which {problem}; only a module without state"
            " for which decode(u, key, feature_anchor) is (u @ key.T)[:, feature_anchor] can be replaced:"
            " move the rest to the stratum, or leave S4 out"
        )
    return KeyFirst()


class KeyFirst(nn.Module):
    """Decode from selected keys; made by `key_first`."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: Tensor | None = None
        self._version = 0
        self._run: slice | None = None

    def forward(self, u: PerCell, key: PerAnchor, feature_anchor: FeatureAnchor) -> Counts:
        """Return (u key^T)[:, feature_anchor], computed from key[feature_anchor]."""
        run = None
        # one graph for all strata, whatever their feature_anchor
        if not torch.compiler.is_compiling():
            version = version_of(feature_anchor)
            if feature_anchor is not self._seen or version != self._version:
                self._seen, self._version, self._run = feature_anchor, version, run_of(feature_anchor)
            run = self._run
        if run is None:
            # the backward pass of embedding fills one [N, D]; that of indexing fills two, and is slower
            return u @ F.embedding(feature_anchor, key).T
        return u @ (key if run == slice(0, len(key)) else key[run]).T
