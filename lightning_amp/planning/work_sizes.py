"""The sizes that one rank computes with in one stratum, in rows, channels and features.

Legend: B cells, N anchors, D latent dimension, w attention window, F_k features of the stratum, R ranks of the model
axis; n own anchors, p = n padded to whole buckets, d own channels, a channels that attention multiplies, f own
features, C chunks of attention and r queries of one (S3), blocks of cells (stream).
"""

from dataclasses import dataclass

from lightning_amp.planning.chunks import block_cells, chunk_buckets
from lightning_amp.planning.plan import Axes
from lightning_amp.planning.shape import DecoderShape
from lightning_amp.planning.stratum_sizes import widest


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkSizes:
    """One stratum on the rank that has most of it.

    Attributes:
        decoder: The decoder.
        axes: Its choices.
        k: The stratum, 0 to K - 1.
        cells: B.
        ranks: R.
    """

    decoder: DecoderShape
    axes: Axes
    k: int
    cells: int
    ranks: int = 1

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
        """Whether the key has the paper's form: no second norm, no residual."""
        return self.decoder.variant == "paper"

    @property
    def hidden(self) -> bool:
        """Whether channels are split (S5)."""
        return self.axes.placement in ("hidden", "hidden-gathered") and self.ranks > 1

    @property
    def gathered(self) -> bool:
        """Whether S5 gathers keys and values for attention."""
        return self.axes.placement == "hidden-gathered" and self.ranks > 1

    @property
    def by_nodes(self) -> bool:
        """Whether anchors are split."""
        return self.axes.placement == "nodes" and self.ranks > 1

    @property
    def neighbours(self) -> int:
        """Ranks with anchors next to the own ones."""
        return min(2, self.ranks - 1) if self.by_nodes else 0

    @property
    def by_features(self) -> bool:
        """Whether features are split (S2)."""
        return self.axes.features == "sharded" and self.ranks > 1

    @property
    def recomputed(self) -> bool:
        """Whether the forward pass is run again in the backward pass."""
        return self.axes.activations == "recompute"

    @property
    def width(self) -> int:
        """d."""
        return widest(self.decoder.dim, self.ranks) if self.hidden else self.decoder.dim

    @property
    def attended(self) -> int:
        """a."""
        return self.decoder.dim if self.gathered else self.width

    @property
    def rows(self) -> int:
        """n."""
        anchors, window = self.decoder.anchors, self.decoder.window
        buckets = -(-anchors // window)
        return min(anchors, -(-buckets // self.ranks) * window) if self.by_nodes else anchors

    @property
    def padded(self) -> int:
        """p."""
        return -(-self.rows // self.decoder.window) * self.decoder.window

    @property
    def features(self) -> int:
        """f."""
        features = self.decoder.features[self.k]
        if self.by_nodes:
            return -(-features * self.rows // self.decoder.anchors)
        return -(-features // self.ranks) if self.by_features else features

    @property
    def decoded(self) -> int:
        """Features that the rank decodes: under S5 F_k, for it has a part of every score."""
        return self.decoder.features[self.k] if self.hidden else self.features

    @property
    def scores(self) -> int:
        """B f."""
        return self.cells * self.features

    @property
    def blocks(self) -> int:
        """Blocks of cells."""
        if self.axes.activations != "stream":
            return 1
        return -(-self.cells // block_cells(max(self.decoder.features), anchors=self.decoder.anchors))

    @property
    def chunk(self) -> int:
        """r."""
        return min(self.padded, chunk_buckets(self.decoder.window) * self.decoder.window)

    @property
    def chunks(self) -> int:
        """C; one without S3."""
        return -(-self.padded // self.chunk) if self.axes.attention.startswith("chunked") else 1

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that attention multiplies: p 3 w; the fused kernel leaves out what is masked."""
        window = self.decoder.window
        if self.axes.attention != "fused":
            return 3 * window * self.padded
        last = self.rows - (self.padded - window)
        outside = 0 if self.by_nodes else window * (min(self.rows, window) + last)
        return 3 * window * self.rows - outside
