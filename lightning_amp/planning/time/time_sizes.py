"""The sizes that one rank computes with in one stratum, in rows, channels and features, and what it reaches.

Legend: rank_sizes.py; f own features, C chunks of attention (S3), blocks of cells (stream).
"""

from dataclasses import dataclass

from lightning_amp.planning.sizes.rank_sizes import RankSizes
from lightning_amp.planning.time.device_rates import CPU_CORE, Rates

ELEMENT_BYTES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkSizes(RankSizes):
    """One stratum on the rank that has most of it.

    Attributes:
        element: Bytes per number.
        rates: What the rank's device reaches.
    """

    element: int = ELEMENT_BYTES
    rates: Rates = CPU_CORE

    @property
    def recomputed(self) -> bool:
        """Whether the forward pass is run again in the backward pass."""
        return self.axes.activations == "recompute"

    @property
    def features(self) -> int:
        """f."""
        features = self.decoder.features[self.k]
        if self.by_nodes:
            return -(-features * self.anchors // self.decoder.anchors)
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
        return -(-self.cells // self.block)

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
        last = self.anchors - (self.padded - window)
        outside = 0 if self.by_nodes else window * (min(self.anchors, window) + last)
        return 3 * window * self.anchors - outside
