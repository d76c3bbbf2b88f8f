"""The sizes of one stratum's tensors on one rank, in numbers of elements.

Legend: rank_sizes.py, with N for the own anchors and P for these padded to whole buckets; B cells of a block, f_k
features of a rank (F_k, under S2 the first rank's, under nodes those of the own anchors), C chunks of attention, r
queries of a chunk (with eager attention one chunk of all P).
"""

from dataclasses import dataclass

from lightning_amp.planning.sizes.rank_sizes import RankSizes


@dataclass(frozen=True, kw_only=True, slots=True)
class StratumSizes(RankSizes):
    """One stratum under the choices of a plan.

    Attributes:
        element: Bytes per element.
    """

    element: int = 4

    @property
    def scattered(self) -> bool:
        """Whether parts of the scores go to the features' owners (S5 with S2)."""
        return self.hidden and self.by_features

    @property
    def copies_keys(self) -> bool:
        """Whether S4 copies the keys of the features' anchors; where these are a run of anchors it needs none."""
        run = self.decoder.features[self.k] >= self.decoder.anchors - self.decoder.distances[self.k]
        return self.axes.decode == "key-first" and not run

    @property
    def fused(self) -> bool:
        """Whether attention keeps nothing but what it is given."""
        return self.axes.attention == "fused"

    @property
    def sparse(self) -> bool:
        """Whether the likelihood is computed from the counts that are not zero."""
        return self.axes.likelihood == "sparse"

    @property
    def near(self) -> int:
        """Keys that the own anchors meet: themselves and, under nodes, a bucket of each neighbour."""
        return self.anchors + self.neighbours * self.decoder.window

    @property
    def rows(self) -> int:
        """N d, the size of most tensors of a key."""
        return self.anchors * self.width

    @property
    def products(self) -> int:
        """R N d: what S5 multiplies before the ranks' products are summed; 0 without S5."""
        return self.ranks * self.rows if self.hidden else 0

    @property
    def features(self) -> int:
        """f_k."""
        features = self.decoder.features[self.k]
        if self.by_nodes:
            return min(features, self.anchors)
        return -(-features // self.ranks) if self.by_features else features

    @property
    def decoded(self) -> int:
        """Features that a rank decodes: under S5 F_k, for it has a part of every score."""
        return self.decoder.features[self.k] if self.hidden else self.features

    @property
    def scores(self) -> int:
        """B f_k."""
        return self.block * self.features

    @property
    def queries(self) -> int:
        """r."""
        return self.padded if self.axes.attention == "eager" else self.chunk

    @property
    def weights(self) -> int:
        """Attention weights that are kept: 3 w of every anchor, less what lies outside the sequence."""
        n, w = self.anchors, self.decoder.window
        if not (self.attends and self.keeps_weights):
            return 0
        last = n - (self.padded - w)
        if n <= w:
            return n * (n + (n < w))
        # the rest of the last bucket is one more key of those that meet it
        rest = (w + last) * (last < w)
        outside = 0 if self.by_nodes else w * w + w * (w - last) + last * (2 * w - last)
        return 3 * w * n - outside + rest

    @property
    def chunks(self) -> int:
        """C."""
        return -(-self.padded // self.queries)
