"""The sizes of one stratum's tensors on one rank, in numbers of elements.

Legend: B cells (of a block under stream), N anchors (the own ones under nodes), P = N padded to whole buckets of w, D
latent dimension, d channels of a rank (D, or under S5 those of the widest), a channels that attention reads (d, or D
where keys and values are gathered), R ranks that share the channels, F_k features of the stratum, f_k those of a rank
(F_k, under S2 the first rank's, under nodes those of the own anchors), C chunks of attention, r queries of a chunk
(without S3 one chunk of all P).
"""

from dataclasses import dataclass

from lightning_amp.planning.chunks import block_cells, chunk_buckets
from lightning_amp.planning.plan import Axes
from lightning_amp.planning.shape import DecoderShape


@dataclass(frozen=True, kw_only=True, slots=True)
class StratumSizes:
    """One stratum under the choices of a plan.

    Attributes:
        decoder: The decoder.
        axes: Its choices.
        k: The stratum, 0 to K - 1.
        cells: B.
        model_ranks: Ranks of the model axis.
        element: Bytes per element.
    """

    decoder: DecoderShape
    axes: Axes
    k: int
    cells: int
    model_ranks: int = 1
    element: int = 4

    @property
    def keyed(self) -> bool:
        """Whether the stratum makes a key of its own."""
        return self.decoder.distances[self.k] > 0

    @property
    def attends(self) -> bool:
        """Whether it makes the key by attention."""
        return self.keyed and self.decoder.attention

    @property
    def paper(self) -> bool:
        """Whether attention is that of the paper: its layers keep one tensor less."""
        return self.decoder.variant == "paper"

    @property
    def gathered(self) -> bool:
        """Whether S5 gathers keys and values for attention."""
        return self.axes.placement == "hidden-gathered"

    @property
    def scattered(self) -> bool:
        """Whether parts of the scores go to the features' owners (S5 with S2)."""
        return self.ranks > 1 and self.axes.features == "sharded"

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
    def streamed(self) -> bool:
        """Whether cells come in blocks."""
        return self.axes.activations == "stream"

    @property
    def by_nodes(self) -> bool:
        """Whether anchors are split."""
        return self.axes.placement == "nodes" and self.model_ranks > 1

    @property
    def anchors(self) -> int:
        """N."""
        anchors, window = self.decoder.anchors, self.decoder.window
        buckets = -(-anchors // window)
        return min(anchors, -(-buckets // self.model_ranks) * window) if self.by_nodes else anchors

    @property
    def near(self) -> int:
        """Keys that the own anchors meet: themselves and, under nodes, a bucket of each neighbour."""
        sides = min(2, self.model_ranks - 1) if self.by_nodes else 0
        return self.anchors + sides * self.decoder.window

    @property
    def block(self) -> int:
        """B."""
        if not self.streamed:
            return self.cells
        return min(self.cells, block_cells(max(self.decoder.features), anchors=self.decoder.anchors))

    @property
    def ranks(self) -> int:
        """R, 1 without S5."""
        return self.model_ranks if self.axes.placement.startswith("hidden") else 1

    @property
    def width(self) -> int:
        """d."""
        return widest(self.decoder.dim, self.ranks)

    @property
    def attended(self) -> int:
        """a."""
        return self.decoder.dim if self.gathered else self.width

    @property
    def rows(self) -> int:
        """N d, the size of most tensors of a key."""
        return self.anchors * self.width

    @property
    def products(self) -> int:
        """R N d: what S5 multiplies before the ranks' products are summed; 0 without S5."""
        return self.ranks * self.rows if self.ranks > 1 else 0

    @property
    def features(self) -> int:
        """f_k."""
        features = self.decoder.features[self.k]
        if self.by_nodes:
            return min(features, self.anchors)
        return features if self.axes.features == "all" else -(-features // self.model_ranks)

    @property
    def decoded(self) -> int:
        """Features that a rank decodes: under S5 F_k, for it has a part of every score."""
        return self.decoder.features[self.k] if self.ranks > 1 else self.features

    @property
    def scores(self) -> int:
        """B f_k."""
        return self.block * self.features

    @property
    def padded(self) -> int:
        """P."""
        return -(-self.anchors // self.decoder.window) * self.decoder.window

    @property
    def chunk(self) -> int:
        """r."""
        window = self.decoder.window
        whole = self.axes.attention == "eager"
        return self.padded if whole else min(self.padded, chunk_buckets(window) * window)

    @property
    def chunks(self) -> int:
        """C."""
        return -(-self.padded // self.chunk)


def widest(dim: int, ranks: int) -> int:
    """d: channels of the rank that has most; pairs stay together where D is even."""
    return 2 * -(-dim // (2 * ranks)) if dim % 2 == 0 else -(-dim // ranks)
