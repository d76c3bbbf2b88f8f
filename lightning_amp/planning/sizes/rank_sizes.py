"""What one rank has of one stratum under the choices of a plan: anchors, channels, features, buckets.

Legend: B cells, N anchors, w attention window, D latent dimension, F_k features of the stratum, R ranks of the model
axis; n own anchors, p = n padded to whole buckets, d own channels, a channels that attention multiplies. Of ranks that
share unevenly it is the one that has most.
"""

from dataclasses import dataclass

from lightning_amp.planning.plan.axes import Axes
from lightning_amp.planning.plan.block_sizes import (
    block_cells,
    chunk_buckets,
    keeps_weights,
    strata_side_by_side,
)
from lightning_amp.planning.plan.model_shape import DecoderShape


@dataclass(frozen=True, kw_only=True, slots=True)
class RankSizes:
    """One stratum on one rank.

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
    def streamed(self) -> bool:
        """Whether cells come in blocks."""
        return self.axes.activations == "stream"

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
    def by_features(self) -> bool:
        """Whether features are split (S2)."""
        return self.axes.features == "sharded" and self.ranks > 1

    @property
    def neighbours(self) -> int:
        """Ranks with anchors next to the own ones."""
        return min(2, self.ranks - 1) if self.by_nodes else 0

    @property
    def anchors(self) -> int:
        """n."""
        anchors, window = self.decoder.anchors, self.decoder.window
        buckets = -(-anchors // window)
        return min(anchors, -(-buckets // self.ranks) * window) if self.by_nodes else anchors

    @property
    def padded(self) -> int:
        """p."""
        return -(-self.anchors // self.decoder.window) * self.decoder.window

    @property
    def chunk(self) -> int:
        """Rows of queries that attention takes at a time, where it does not take all."""
        return min(self.padded, chunk_buckets(self.decoder.window) * self.decoder.window)

    @property
    def width(self) -> int:
        """d."""
        return widest(self.decoder.dim, self.ranks) if self.hidden else self.decoder.dim

    @property
    def attended(self) -> int:
        """a."""
        return self.decoder.dim if self.gathered else self.width

    @property
    def block(self) -> int:
        """Cells of a block: B, or under stream at most those that the largest stratum leaves room for."""
        if not self.streamed:
            return self.cells
        return min(self.cells, block_cells(max(self.decoder.features), anchors=self.decoder.anchors))

    @property
    def keeps_weights(self) -> bool:
        """Whether fused attention keeps its weights."""
        fused = self.streamed and self.axes.attention == "fused"
        return fused and keeps_weights(self.decoder.anchors, window=self.decoder.window)

    @property
    def side_by_side(self) -> int:
        """Strata that run at the same time; ranks that compute one together take them in one order."""
        alone = self.axes.placement in ("replicated", "strata") and not self.by_features
        if not (self.streamed and alone):
            return 1
        return strata_side_by_side(self.decoder.threads, anchors=self.anchors, dim=self.decoder.dim)


def widest(dim: int, ranks: int) -> int:
    """d: channels of the rank that has most; pairs stay together where D is even."""
    return 2 * -(-dim // (2 * ranks)) if dim % 2 == 0 else -(-dim // ranks)
