"""Define a decoder whose loss is a sum over independent units; the user writes only the loss of a unit.

    loss = sum over units k of nll_k(v, u, cells)

The two classes hold what `techniques/contract/protocol.py` asks for: with them, `stream`, `recompute` and `strata` can
change how the units are run. Units read v and u and their own parameters, and nothing of one another.

Legend: cell (B), anchor (N), dim (D), unit (K).
Known limits: what a unit keeps is not predicted, only [cell, n_features] of it; a loss that is no sum over cells is
noticed only by `stream` (techniques/hic/strata/streamed_stratum.py).
"""

from abc import abstractmethod
from collections.abc import Iterable
from typing import cast

from torch import Tensor, nn

from lightning_amp.errors import ModelError
from lightning_amp.models.decoders.stratified import StrataRegion
from lightning_amp.models.decoders.stratum import AllCells, EveryStratum
from lightning_amp.shapes import PerAnchor, PerCell, Scalar


class UnitCells(AllCells):
    """All cells at once, with a loss that other code provides: who takes some of them at a time looks first."""

    known = False


class Unit(nn.Module):
    """Abstract: a subclass says in `nll` what its loss is.

    `n_features`: columns that the unit's largest tensor [cell, feature] has, for the plan's prediction.
    """

    chained = False

    def __init__(self, n_features: int) -> None:
        super().__init__()
        self.n_features = n_features
        self.sum_over_cells = UnitCells()

    @abstractmethod
    def nll(self, v: PerAnchor, u: PerCell, **cells: Tensor) -> Scalar:
        """Negative log-likelihood summed over cells and features.

        Args:
            v: Latents of the anchors.
            u: Latents of some cells.
            cells: Of the same cells, one row each, or the same for all: what the decoder was called with.
        """

    def forward(self, v: PerAnchor, u: PerCell, **cells: Tensor) -> tuple[Scalar, PerAnchor]:
        """The unit's loss, and v unchanged for the next unit."""
        return self.sum_over_cells(self.nll, v, u, parameters=self.parameters(), **cells), v

    def arguments(self, k: int, log_weights: Tensor, **cells: Tensor) -> dict[str, Tensor]:
        """Arguments of this unit, the decoder's k-th, in addition to v and u: by default all that the decoder got."""
        return {**cells, "log_weight": log_weights[:, k : k + 1]}

    def spine(self, v: PerAnchor) -> PerAnchor:
        """v for the next unit."""
        return v


class UnitDecoder(nn.Module):
    """A sum over units, as techniques know it.

    Args:
        units: The units.
        n_anchors: Rows of v.
        dim: Channels of u and v.

    Raises:
        ModelError: There are no units, or something else among them.
    """

    chained = False

    def __init__(self, units: Iterable[Unit], *, n_anchors: int, dim: int) -> None:
        super().__init__()
        strata = list(units)
        others = [type(unit).__name__ for unit in strata if not isinstance(unit, Unit)]
        if others or not strata:
            raise ModelError(
                f"UnitDecoder got {others or 'nothing'!r} for units; allowed are one or more modules of the class Unit"
            )
        self.strata = nn.ModuleList(strata)
        self.n_anchors = n_anchors
        self.dim = dim
        self.region = StrataRegion()
        self.walk = EveryStratum()

    def forward(self, u: PerCell, v: PerAnchor, **cells: Tensor) -> Scalar:
        """Sum of the units' losses; `cells` are handed to all units.

        They have one row per cell, or are the same for all: one row, no dimension, a number, a name, None. A tensor
        that needs a gradient is u, v, a parameter of a unit, or `library`.
        """
        # units have no weights: the logarithm of 1
        none = u.new_zeros(1, len(self.strata))
        cells.setdefault("library", u.new_ones(len(u), 1))
        u, v, none = self.region.enter(u, v, none)
        return self.region.leave(cast(Tensor, self.walk(self.strata, u, v, none, **cells)))
