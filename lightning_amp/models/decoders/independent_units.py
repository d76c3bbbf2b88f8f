"""Define UnitDecoder, whose loss is a sum over independent units; the user writes the loss of a unit.

    loss = sum over units k of nll_k(v, u, cells)

The classes implement the protocol of `techniques/contract/protocol.py`, so that `stream`, `recompute` and `strata` can
change how units run. A unit reads v, u and its own parameters, and no results of other units.

Legend: cell (B), anchor (N), dim (D), unit (K).
Known limits: of the tensors that a unit saves, the prediction has only [cell, n_features]; a loss that is not a sum
over cells is detected only by `stream` (techniques/hic/strata/streamed_stratum.py).
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
    """All cells at once, for a loss written by the user: `stream` checks it before it splits the cells."""

    known = False


class Unit(nn.Module):
    """Abstract unit; a subclass defines its loss in `nll`.

    `n_features`: columns of the unit's largest tensor [cell, feature], for the plan's prediction.
    """

    chained = False

    def __init__(self, n_features: int) -> None:
        super().__init__()
        self.n_features = n_features
        self.sum_over_cells = UnitCells()

    @abstractmethod
    def nll(self, v: PerAnchor, u: PerCell, **cells: Tensor) -> Scalar:
        """Return the negative log-likelihood summed over cells and features.

        Args:
            v: Latents of the anchors.
            u: Latents of some cells.
            cells: Keyword arguments of the decoder: one row for each of these cells, or one value for all.
        """

    def forward(self, v: PerAnchor, u: PerCell, **cells: Tensor) -> tuple[Scalar, PerAnchor]:
        """Return the unit's loss, and v unchanged for the next unit."""
        return self.sum_over_cells(self.nll, v, u, parameters=self.parameters(), **cells), v

    def arguments(self, k: int, log_weights: Tensor, **cells: Tensor) -> dict[str, Tensor]:
        """Return the arguments of unit k in addition to v and u; by default all of the decoder's."""
        return {**cells, "log_weight": log_weights[:, k : k + 1]}

    def spine(self, v: PerAnchor) -> PerAnchor:
        """Return v for the next unit."""
        return v


class UnitDecoder(nn.Module):
    """Sum of the losses of units, in the form that techniques support.

    Args:
        units: The units.
        n_anchors: Rows of v.
        dim: Channels of u and v.

    Raises:
        ModelError: `units` is empty, or has an item that is not a Unit.
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
        """Return the sum of the units' losses; every unit receives `cells`.

        Each of `cells` has one row per cell, or is the same for all cells: one row, no dimension, a number, a string or
        None. Only u, v, parameters of units and `library` may require a gradient.
        """
        # units have no weights: the logarithm of 1
        none = u.new_zeros(1, len(self.strata))
        cells.setdefault("library", u.new_ones(len(u), 1))
        u, v, none = self.region.enter(u, v, none)
        return self.region.leave(cast(Tensor, self.walk(self.strata, u, v, none, **cells)))
