"""Define our decoder with a foreign decoder's layers and tables, and read the layout of its strata.

One of `feature_masks` and `strata_masks` lists anchors, the other columns of the tables. The columns are the list whose
numbers ascend from 0 through all strata, one run after the other. Keys use the foreign decoder's layers, with their
hooks and parameters, but our local attention.

    attention      p = prenorm(v), qk = p W_qk^T, val = p W_val^T
                   key = val + LocalAttention(qk, qk, p or val)
                   key = [key +] GEGLU(postnorm(key) or key W_ff^T)
    convolution    key = activation(Conv1d(v padded)) of anchors i and i + k (padded at the end), or with a centred
                   kernel (the layer pads); with several resolutions, v of one resolution
    both           key of the convolution, p = prenorm(key), qk = p W_qk^T
                   key = key + LocalAttention(qk, qk, p)
                   key = key + GEGLU(postnorm(key) W_ff^T)

    log mu = log(softmax(logit) library weight + least)        some variants add `least`: the logarithm is finite then

A stratum holds the full tables, because the optimizer has these parameters, and reads its columns, listed in `runs`; a
technique may pass only these columns (stream.py does). Without stream, the backward pass of every stratum makes
gradients of the full tables.

Legend: cell (B), anchor (N), own_anchor (of one resolution), dim (D), stratum (K), feature (F in all, stratum_feature
of one stratum, stratum-major), experiment (row of the tables, one per batch).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_amp.data.sparse_counts import SparseCounts
from lightning_amp.errors import ModelError
from lightning_amp.models.decoders.likelihoods import table_rows
from lightning_amp.models.decoders.stratified import StrataRegion, StratifiedDecoder
from lightning_amp.models.decoders.stratum import AllCells, AllFeatures, Decode, EveryStratum, Stratum
from lightning_amp.models.decoders.stratum_keys import AttentionKey, Variant, geglu
from lightning_amp.shapes import (
    Counts,
    Experiment,
    Library,
    LogWeights,
    OwnCounts,
    OwnTable,
    PerAnchor,
    PerCell,
    Scalar,
)
from lightning_amp.techniques.ranks.sharded_region import SharedRegion


class AdaptedAttentionKey(AttentionKey):
    """Key by local attention to p or the `projected` anchors, and a gated feed-forward layer, optionally `residual`."""

    def __init__(self, layers: dict[str, nn.Module], *, projected: bool, residual: bool) -> None:
        nn.Module.__init__(self)
        # in the order of AttentionKey, with the names of protocol.ATTENTION_KEY
        for name in ("prenorm", "qk", "value", "attention", "postnorm", "ff"):
            self.add_module(name, layers[name])
        self.projected = projected
        self.residual = residual


class AdaptedConvolutionKey(nn.Module):
    """Key by a depthwise convolution of kernel 2 over rows of v, with `padding` zeros behind the last anchor."""

    def __init__(self, pairs: nn.Module, activation: nn.Module, *, padding: int, rows: slice = slice(None)) -> None:
        super().__init__()
        self.pairs = pairs
        self.activation = activation
        self.padding = padding
        self.rows = rows

    def forward(self, v: PerAnchor) -> tuple[Float[Tensor, "own_anchor dim"], PerAnchor]:
        """Key, and v unchanged."""
        padded = F.pad(v[self.rows], (0, 0, 0, self.padding))
        return self.activation(self.pairs(padded.T[None])[0].T), v


class PairedAttentionKey(nn.Module):
    """Key by a convolution, local attention and a gated layer; `checkpointed`: recomputed in the backward pass."""

    def __init__(self, paired: AdaptedConvolutionKey, layers: dict[str, nn.Module], *, checkpointed: bool) -> None:
        super().__init__()
        self.paired = paired
        self.prenorm, self.qk, self.attention = (layers[name] for name in ("prenorm", "qk", "attention"))
        self.postnorm, self.ff = (layers[name] for name in ("postnorm", "ff"))
        self.checkpointed = checkpointed

    def forward(self, v: PerAnchor) -> tuple[Float[Tensor, "own_anchor dim"], PerAnchor]:
        """Key, and v unchanged."""
        if self.checkpointed and torch.is_grad_enabled():
            return cast(Tensor, checkpoint(self._key, v, use_reentrant=False)), v
        return self._key(v), v

    def _key(self, v: Tensor) -> Tensor:
        key, _ = self.paired(v)
        p = self.prenorm(key)
        qk = self.qk(p)
        key = key + self.attention(qk, qk, p)
        return cast(Tensor, key + geglu(self.ff(self.postnorm(key))))


class GivenDistribution(nn.Module):
    """Log-probability from the foreign decoder's distribution, used if our likelihood differs from it."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.kind = kind

    def forward(
        self, x: OwnCounts, location: OwnCounts, log_theta: OwnTable | None = None, zi_logits: OwnTable | None = None
    ) -> Scalar:
        """Return the sum over cells and features; the location is log mu, or the logits of binary data."""
        given = distribution(self.kind, location, log_theta, zi_logits)
        total: Tensor = given.log_prob(x).sum()
        return total


def distribution(
    kind: type, location: Tensor, log_theta: Tensor | None, zi_logits: Tensor | None
) -> torch.distributions.Distribution:
    """Return a distribution of a foreign class: zero-inflated negative binomial, or Bernoulli without tables."""
    if log_theta is None or zi_logits is None:
        return kind(logits=location)  # type: ignore[no-any-return]
    return kind(  # type: ignore[no-any-return]
        zi_logits=zi_logits.expand_as(location), total_count=log_theta.exp(), logits=location - log_theta
    )


class AdaptedStratum(Stratum):
    """Stratum with the layers and tables of a foreign decoder."""

    runs: dict[str, slice | Tensor]

    def __init__(
        self,
        key: nn.Module | None,  # module that computes the key; None if the anchors are the keys
        nodes: Int[Tensor, " stratum_feature"],
        *,
        columns: tuple[int, int],  # first and one past the last of the stratum's columns
        # full tables by name: scale, bias, log_theta and zi_logits; for binary data only the first two
        tables: Mapping[str, nn.Parameter],
        likelihood: nn.Module,
        chained: bool,  # whether the next stratum reads this one's projected anchors
        least: float,
    ) -> None:
        nn.Module.__init__(self)
        # not Stratum.__init__, which would create tables: the foreign ones are used
        self.key = key  # type: ignore[assignment]
        self.decode, self.features, self.sum_over_cells = Decode(), AllFeatures(), AllCells()
        self.likelihood = likelihood  # type: ignore[assignment]
        self.columns = columns
        self.chained = chained
        self.binarized = "log_theta" not in tables
        self.least = least
        self.register_buffer("feature_anchor", nodes, persistent=False)
        for name, table in tables.items():
            self.register_parameter(name, table)
        self.runs = dict.fromkeys(tables, slice(*columns))

    def _log_mean(self, logits: Tensor, library: Tensor, log_weight: Tensor) -> Tensor:
        log_mu = super()._log_mean(logits, library, log_weight)
        # log(mu + least) without mu, which may underflow
        return torch.logaddexp(log_mu, log_mu.new_tensor(math.log(self.least))) if self.least else log_mu

    def own_library(self, library: Tensor) -> Tensor:
        """Return the library size for the stratum's features."""
        return library

    def arguments(
        self, k: int, log_weights: Tensor, *, x: Tensor | SparseCounts, **cells: Tensor
    ) -> dict[str, Tensor | SparseCounts]:
        """Return the arguments of any stratum, with `own_library`."""
        found = super().arguments(k, log_weights, x=x, **cells)
        return found | {"library": self.own_library(cells["library"])}

    def _table(self, table: Tensor, batch: Tensor) -> Tensor:
        # a technique may have replaced the table by the stratum's columns
        own = table if table.shape[1] == len(self.feature_anchor) else self._columns(table)
        return table_rows(self.features.own(own), batch)

    def _columns(self, table: Tensor) -> Tensor:
        return table[:, slice(*self.columns)]


LISTS = ("feature_masks", "strata_masks")


class NotDetected(ModelError):
    """Error for a module that resembles a supported decoder but is none; the text follows the module's name."""


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Layout:
    """Anchors and columns of the strata of a decoder."""

    nodes: tuple[Int[Tensor, " stratum_feature"], ...]
    columns: tuple[tuple[int, int], ...]  # first and one past the last column, for every stratum
    n_anchors: int  # N by the features: one past the last anchor with a feature
    listed_in: str = ""  # name of the decoder's list that holds the columns

    @property
    def n_features(self) -> int:
        """Number of features F."""
        return self.columns[-1][1]


def layout_of(nodes: Sequence[Tensor], listed_in: str) -> Layout:
    """Return the layout of strata with these anchors and consecutive runs of columns."""
    ends = list(accumulate((len(rows) for rows in nodes), initial=0))
    return Layout(
        nodes=tuple(nodes),
        columns=tuple(pairwise(ends)),
        n_anchors=1 + max(int(rows.max()) for rows in nodes),
        listed_in=listed_in,
    )


def read_layout(decoder: nn.Module) -> Layout:
    """Read the layout from a foreign decoder's lists."""
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
    # if both lists ascend, there is one stratum, and the lists are equal
    columns = "strata_masks" if "strata_masks" in runs else "feature_masks"
    return layout_of(next(lists for name, lists in found.items() if name != columns), columns)


def _indices(name: str, value: Any) -> list[Tensor]:
    if not isinstance(value, list | tuple) or not value:
        raise NotDetected(f"has {name}={type(value).__name__!r}, and not a list with one list of indices per stratum")
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
    """Decoder with all strata of a foreign decoder.

    Attributes:
        reads_all_rows: Whether keys have all rows of v, not only the anchors that have features.
    """

    reads_all_rows = True

    def __init__(
        self,
        strata: Sequence[AdaptedStratum],
        layout: Layout,
        *,
        dim: int,
        window: int,  # anchors per attention bucket
        variant: Variant,  # form of the keys for the memory model, "higlue" or "paper"
        # logits of the strata's weights; if None, all strata have equal weights
        strata_weights: nn.Parameter | None,
        head: nn.Linear | None,  # adds the cell's part to these logits
        normalised: bool,  # without logits: whether the weights are 1 / K, else 1
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
        """Return minus the log-likelihood, summed over all cells and features."""
        self._check_inputs(v, x)
        u, v, log_weights = self.region.enter(u, v, self.log_weights(u))
        total = self.walk(self.strata, u, v, log_weights, batch=batch, library=library, x=x)
        return self.region.leave(total)

    def location(self, u: PerCell, v: PerAnchor, *, batch: Experiment, library: Library) -> Counts:
        """Return the log mean (logits of binary data) of every feature; all ranks of the model axis must call it."""
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
        """Return library sizes, from the decoder's argument l."""
        if not isinstance(given, Tensor) or given.shape != (len(u), 1):
            found = tuple(given.shape) if isinstance(given, Tensor) else given
            raise ModelError(
                f"a decoder of HiGLUE's shape was called with l={found!r}; allowed is the library size of every cell,"
                f" of the shape {(len(u), 1)!r}"
            )
        return given

    def log_weights(self, u: PerCell) -> LogWeights:
        """Return the log of each stratum's share of a cell's contacts; without a head, one row for all cells."""
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
