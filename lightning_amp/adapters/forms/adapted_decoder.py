"""Compute what a foreign decoder returns, with its layers and tables, and read its strata from its two lists.

One of `feature_masks` and `strata_masks` lists anchors, the other columns of the tables. Which is which depends on the
numbers: columns count up from 0 through all strata, one run after the other.
Legend: cell (B), anchor (N), dim (D), stratum (K), feature (F in all, F_k of stratum k, stratum-major).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
from jaxtyping import Int
from torch import Tensor, nn

from lightning_amp.adapters.forms.adapted_stratum import AdaptedStratum
from lightning_amp.errors import ModelError
from lightning_amp.models.decoders.stratified import StrataRegion, StratifiedDecoder
from lightning_amp.models.decoders.stratum import EveryStratum
from lightning_amp.models.decoders.stratum_keys import Variant
from lightning_amp.shapes import Counts, Experiment, Library, LogWeights, PerAnchor, PerCell, Scalar
from lightning_amp.techniques.ranks.sharded_region import SharedRegion

LISTS = ("feature_masks", "strata_masks")


class NotDetected(ModelError):
    """A module that looks like a decoder we know and is none; its text says why, as what follows the module's name."""


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Layout:
    """The strata of a decoder."""

    nodes: tuple[Int[Tensor, " stratum_feature"], ...]
    columns: tuple[tuple[int, int], ...]  # first and one past the last column, for every stratum
    n_anchors: int  # N, as far as the features tell: one past the last anchor that has any
    listed_in: str = ""  # name of the decoder's list that holds the columns

    @property
    def n_features(self) -> int:
        """F."""
        return self.columns[-1][1]


def layout_of(nodes: Sequence[Tensor], listed_in: str) -> Layout:
    """The layout of strata with these anchors, their columns one run after the other."""
    ends = list(accumulate((len(rows) for rows in nodes), initial=0))
    return Layout(
        nodes=tuple(nodes),
        columns=tuple(pairwise(ends)),
        n_anchors=1 + max(int(rows.max()) for rows in nodes),
        listed_in=listed_in,
    )


def read_layout(decoder: nn.Module) -> Layout:
    """The layout that a foreign decoder's lists say."""
    found = {name: _indices(name, getattr(decoder, name, None)) for name in LISTS}
    one, other = found.values()
    if [len(rows) for rows in one] != [len(rows) for rows in other]:
        raise NotDetected("has strata with other numbers of anchors than of columns")
    whole = {name: torch.cat(lists) for name, lists in found.items()}
    runs = [name for name, columns in whole.items() if torch.equal(columns, torch.arange(len(columns)))]
    if not runs:
        raise NotDetected(
            f"has columns in neither of {LISTS!r}: those of a stratum must follow those of the stratum"
            " before, from 0 on"
        )
    # where both count up there is one stratum, and both are the same
    columns = "strata_masks" if "strata_masks" in runs else "feature_masks"
    return layout_of(next(lists for name, lists in found.items() if name != columns), columns)


def _indices(name: str, value: Any) -> list[Tensor]:
    if not isinstance(value, list | tuple) or not value:
        raise NotDetected(
            f"has {name}={type(value).__name__!r}, and not a list with one list of indices per stratum"
        )
    try:
        lists = [torch.as_tensor(rows).detach().cpu() for rows in value]
    except (TypeError, ValueError, RuntimeError) as error:
        raise NotDetected(f"has {name} that cannot be read as lists of indices: {error}") from error
    whole = [not rows.is_floating_point() and rows.dtype != torch.bool for rows in lists]
    wrong = [k for k, x in enumerate(lists) if x.dim() != 1 or not len(x) or not whole[k] or x.min() < 0]
    if wrong:
        raise NotDetected(f"has {name} without indices of 0 or more in the strata {wrong!r}")
    return [rows.long() for rows in lists]


class AdaptedDecoder(StratifiedDecoder):
    """All strata of a foreign decoder.

    Attributes:
        reads_all_rows: Whether keys are made of all rows of v, and not only of those that features say.
    """

    reads_all_rows = True

    def __init__(
        self,
        strata: Sequence[AdaptedStratum],
        layout: Layout,
        *,
        dim: int,
        window: int,  # anchors per attention bucket
        variant: Variant,  # the form of the keys that the memory model is to take, "higlue" or "paper"
        # logits of the strata's weights; without any, all strata have the same
        strata_weights: nn.Parameter | None,
        head: nn.Linear | None,  # adds the cell's part to these logits
        normalised: bool,  # whether the weights of the strata add up to 1 where there are no logits, or are 1 each
        kind: type,  # class of the distribution that the foreign decoder returns
    ) -> None:
        nn.Module.__init__(self)
        self.dim = dim
        self.n_anchors = layout.n_anchors
        self.n_strata = len(strata)
        self.n_features = layout.n_features
        self.chained = any(stratum.chained for stratum in strata)
        self.variant = variant
        self.window = window
        self.strata = nn.ModuleList(strata)
        self.region = StrataRegion()
        self.walk = EveryStratum()
        self.register_parameter("strata_weights", strata_weights)
        self.head = head
        self.normalised = normalised
        self.kind = kind

    @property
    def shared(self) -> bool:
        """Whether several ranks compute the strata together."""
        return isinstance(self.region, SharedRegion)

    def nll(self, u: PerCell, v: PerAnchor, *, batch: Experiment, library: Library, x: Counts) -> Scalar:
        """Minus the log-likelihood summed over all cells and features."""
        self._check_inputs(v, x)
        u, v, log_weights = self.region.enter(u, v, self.log_weights(u))
        total = self.walk(self.strata, u, v, log_weights, batch=batch, library=library, x=x)
        return self.region.leave(total)

    def location(self, u: PerCell, v: PerAnchor, *, batch: Experiment, library: Library) -> Counts:
        """Logarithm of the mean (logits of binary data) of every feature; every rank of the model axis must call it."""
        self._check_inputs(v, None)
        u, v, log_weights = self.region.enter(u, v, self.log_weights(u))
        found = []
        for k, module in enumerate(self.strata):
            stratum = cast(AdaptedStratum, module)
            own, v = stratum.location(
                v, u, batch=batch, library=stratum.own_library(library), log_weight=log_weights[:, k : k + 1]
            )
            found.append(own)
        return torch.cat(found, dim=1)

    def library(self, u: PerCell, given: Any) -> Library:
        """Library sizes, from what the decoder is called with."""
        if not isinstance(given, Tensor) or given.shape != (len(u), 1):
            found = tuple(given.shape) if isinstance(given, Tensor) else given
            raise ModelError(
                f"a decoder of HiGLUE's shape was called with l={found!r}; allowed is the library size of every cell,"
                f" of the shape {(len(u), 1)!r}"
            )
        return given

    def log_weights(self, u: PerCell) -> LogWeights:
        """Log of each stratum's share of a cell's contacts; one row for all cells without a head."""
        if isinstance(self.strata_weights, Tensor):
            return super().log_weights(u)
        return u.new_full((1, self.n_strata), -math.log(self.n_strata) if self.normalised else 0.0)

    def _check_inputs(self, v: Tensor, x: object) -> None:
        rows = self.region.anchors if isinstance(self.region, SharedRegion) else None
        if rows is not None and len(v) != rows.bounds[-1]:
            raise ModelError(
                f"nodes does not support a decoder whose features have {rows.bounds[-1]!r} anchors, and v"
                f" has {len(v)!r} rows; ranks can share the anchors only if the last one has a feature: pass"
                " as many rows as there are anchors, or leave 'nodes' out"
            )
