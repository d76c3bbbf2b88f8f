"""Define one stratum of the Hi-C decoder: its key, its inner product with the cells and its likelihood.

    logit = softplus(scale) (u key^T)[:, feature_anchor] + bias      mu = softmax(logit) * library * weight
    x ~ ZINB(mu, exp(log_theta), zi_logits)

Legend: cell, anchor (N), dim (D), stratum_feature (F_k), experiment (row of the tables, one per batch).
"""

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from lightning_amp.data.sparse_counts import SparseCounts
from lightning_amp.models.decoders.likelihoods import (
    FIRST_LOG_THETA,
    FIRST_ZI_LOGIT,
    Output,
    bernoulli,
    predicted,
    table_rows,
    zinb,
)
from lightning_amp.models.decoders.stratum_keys import AttentionKey, ConvolutionKey
from lightning_amp.shapes import (
    Counts,
    Experiment,
    FeatureAnchor,
    Library,
    LogWeights,
    OwnCounts,
    OwnTable,
    PerAnchor,
    PerCell,
    Scalar,
)


class EveryStratum(nn.Module):
    """Run one stratum after the other, saving all for the backward pass; a leaf module, which can be replaced."""

    def forward(
        self,
        strata: nn.ModuleList,
        u: PerCell,
        v: PerAnchor,
        log_weights: LogWeights,
        *,
        # strata to run, None for all; of earlier strata only `spine` runs, later strata do not run
        own: range | None = None,
        **cells: Tensor,  # `batch`, `library` and `x` of the cells
    ) -> Scalar:
        """Return the negative log-likelihood summed over cells and features."""
        own = range(len(strata)) if own is None else own
        total = u.new_zeros(())
        for k, module in enumerate(strata[: own.stop] if len(own) else ()):
            stratum = cast(Stratum, module)
            if k < own.start:
                # strata of other ranks: later strata read only their `spine`
                v = stratum.spine(v)
                continue
            nll, v = stratum(v, u, **stratum.arguments(k, log_weights, **cells))
            total = total + nll
        return total


KeyModule = AttentionKey | ConvolutionKey


class Decode(nn.Module):
    """Inner product of cells with the keys of a stratum's features; a leaf module, which can be replaced."""

    def forward(
        self, u: PerCell, key: PerAnchor, feature_anchor: FeatureAnchor
    ) -> Float[Tensor, "cell stratum_feature"]:
        """Return (u key^T)[:, feature_anchor]."""
        return (u @ key.T)[:, feature_anchor]


class AllFeatures(nn.Module):
    """All features of a stratum on one device; a leaf module, which a technique replaces to shard features."""

    def own(self, values: Shaped[Tensor, "*row stratum_feature"]) -> Shaped[Tensor, "*row own_feature"]:
        """Return the columns of this device's features."""
        return values

    def scores(self, decode: nn.Module, u: PerCell, key: PerAnchor, feature_anchor: FeatureAnchor) -> OwnCounts:
        """Return the decoded scores of this device's features."""
        scores: Tensor = decode(u, key, feature_anchor)
        return scores

    def log_softmax(self, logits: OwnCounts) -> OwnCounts:
        """Return the log-softmax over all features of the stratum, for this device's features."""
        return logits.log_softmax(dim=1)

    def whole(self, values: OwnCounts) -> Float[Tensor, "cell stratum_feature"]:
        """Gather the columns of all features; without gradients."""
        return values


class ZINB(nn.Module):
    """Log-probability of a stratum's counts; a leaf module, which can be replaced."""

    def forward(
        self, x: OwnCounts | SparseCounts, log_mu: OwnCounts, log_theta: OwnTable, zi_logits: OwnTable
    ) -> Scalar:
        """Sum over cells and features."""
        return zinb(_dense(x, log_mu), log_mu, log_theta, zi_logits).sum()


class Bernoulli(nn.Module):
    """Log-probability of binarized counts of a stratum; a leaf module, which can be replaced."""

    def forward(self, x: OwnCounts | SparseCounts, logits: OwnCounts) -> Scalar:
        """Sum over cells and features."""
        return bernoulli((_dense(x, logits) > 0).to(logits.dtype), logits).sum()


class AllCells(nn.Module):
    """All cells of a stratum at once; a leaf module, which a technique replaces to split the cells."""

    def forward(
        self,
        nll: Callable[..., Scalar],
        key: PerAnchor,
        u: PerCell,
        *,
        parameters: Iterable[nn.Parameter],
        **cells: Tensor,
    ) -> Scalar:
        """Return `nll(key, u, **cells)`, a sum over cells; `nll` reads no parameters except `parameters`."""
        return nll(key, u, **cells)


class Stratum(nn.Module):
    """One stratum: key, decoder and likelihood of its features."""

    feature_anchor: Tensor

    def __init__(
        self,
        key: KeyModule | None,  # module that makes the key; None for stratum 0, whose key is v
        feature_anchor: FeatureAnchor,
        *,
        distance: int,  # k, in anchors
        columns: tuple[int, int],  # first and one past the last of the stratum's columns in the data matrix
        n_batches: int,  # experimental batches, the rows of the tables
        chained: bool = False,  # whether the next stratum reads this one's projected anchors instead of v
        binarized: bool = False,  # Bernoulli likelihood of x > 0 instead of ZINB
    ):
        super().__init__()
        self.key = key
        self.decode = Decode()
        self.features = AllFeatures()
        self.likelihood = Bernoulli() if binarized else ZINB()
        self.sum_over_cells = AllCells()
        self.distance = distance
        self.columns = columns
        self.chained = chained
        self.binarized = binarized
        self.register_buffer("feature_anchor", feature_anchor, persistent=False)
        shape = (n_batches, len(feature_anchor))
        self.scale = nn.Parameter(torch.zeros(shape))
        self.bias = nn.Parameter(torch.zeros(shape))
        self.log_theta = nn.Parameter(torch.full(shape, FIRST_LOG_THETA))
        self.zi_logits = nn.Parameter(torch.full(shape, FIRST_ZI_LOGIT))

    def forward(self, v: PerAnchor, u: PerCell, **cells: Any) -> tuple[Scalar, PerAnchor]:
        """Return the negative log-likelihood summed over cells and features, and v for the next stratum."""
        key, v_next = self.keys(v)
        return self.sum_over_cells(self.nll, key, u, parameters=self.parameters(recurse=False), **cells), v_next

    def arguments(
        self, k: int, log_weights: LogWeights, *, x: Counts | SparseCounts, **cells: Tensor
    ) -> dict[str, Tensor | SparseCounts]:
        """Return the arguments of stratum k in addition to v and u, from those of the decoder."""
        start, stop = self.columns
        # views, not copies, of the columns
        return {**cells, "x": x[:, start:stop], "log_weight": log_weights[:, k : k + 1]}

    def nll(
        self,
        key: PerAnchor,
        u: PerCell,
        *,
        batch: Experiment,
        library: Library,
        x: Float[Tensor, "cell stratum_feature"] | SparseCounts,
        log_weight: Float[Tensor, "#cell 1"],
    ) -> Scalar:
        """Return the negative log-likelihood of some cells for a key; the only parameters it reads are the tables."""
        logits = self._logits(key, u, batch)
        # SparseCounts are sliced like a tensor
        own: Tensor | SparseCounts = self.features.own(cast(Tensor, x))
        arguments = [logits]
        if not self.binarized:
            tables = [self._table(table, batch) for table in (self.log_theta, self.zi_logits)]
            arguments = [self._log_mean(logits, library, log_weight), *tables]
        total: Tensor = self.likelihood(own, *arguments)
        return -total

    def spine(self, v: PerAnchor) -> PerAnchor:
        """Return only v for the next stratum."""
        return self.key.spine(v) if self.chained and isinstance(self.key, AttentionKey) else v

    def predicted(
        self,
        v: PerAnchor,
        u: PerCell,
        *,
        output: Output,
        batch: Experiment,
        library: Library,
        log_weight: Float[Tensor, "#cell 1"],
    ) -> tuple[Float[Tensor, "cell stratum_feature"], PerAnchor]:
        """Return the output of all features (expected ones of binarized data are probabilities), and v for the next.

        mean = mu    dropout = sigmoid(zi_logits)    expected = (1 - dropout) mean
        """
        key, v_next = self.keys(v)
        logits = self._logits(key, u, batch)
        if self.binarized:
            own = predicted(output, logits.sigmoid(), None)
        else:
            mean = self._log_mean(logits, library, log_weight).exp()
            own = predicted(output, mean, self._table(self.zi_logits, batch))
        return self.features.whole(own), v_next

    def location(
        self, v: PerAnchor, u: PerCell, *, batch: Experiment, library: Library, log_weight: Float[Tensor, "#cell 1"]
    ) -> tuple[Float[Tensor, "cell stratum_feature"], PerAnchor]:
        """Return the log mean of all features (logits if binarized), and v for the next stratum."""
        key, v_next = self.keys(v)
        logits = self._logits(key, u, batch)
        own = logits if self.binarized else self._log_mean(logits, library, log_weight)
        return self.features.whole(own), v_next

    def shares(self, key: PerAnchor, u: PerCell, batch: Experiment) -> OwnCounts:
        """Return the features' shares of the stratum's counts, for a key."""
        return self.features.log_softmax(self._logits(key, u, batch)).exp()

    def keys(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the key, and v for the next stratum."""
        key, val = (v, v) if self.key is None else self.key(v)
        return key, (val if self.chained else v)

    def _logits(self, key: Tensor, u: Tensor, batch: Tensor) -> Tensor:
        decoded = self.features.scores(self.decode, u, key, self.feature_anchor)
        return F.softplus(self._table(self.scale, batch)) * decoded + self._table(self.bias, batch)

    def _log_mean(self, logits: Tensor, library: Tensor, log_weight: Tensor) -> Tensor:
        return self.features.log_softmax(logits) + library.log() + log_weight

    def _table(self, table: Tensor, batch: Tensor) -> Tensor:
        return table_rows(self.features.own(table), batch)


def _dense(x: Tensor | SparseCounts, like: Tensor) -> Tensor:
    """Return the dense counts of a stratum; sparse counts are converted to at least the precision of `like`."""
    return x.to_dense(torch.promote_types(x.dtype, like.dtype)) if isinstance(x, SparseCounts) else x
