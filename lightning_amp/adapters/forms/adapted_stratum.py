"""Define a stratum whose tables are columns of tables that all strata of a foreign decoder share, and its keys.

The layers of a key are the foreign decoder's own, with their hooks and parameters; local attention is computed by ours.

    attention      p = prenorm(v), qk = p W_qk^T, val = p W_val^T
                   key = val + LocalAttention(qk, qk, p or val)
                   key = [key +] GEGLU(postnorm(key) or key W_ff^T)
    convolution    key = activation(Conv1d(v padded)), anchor i meets anchor i + k (padded at the end), or the kernel is
                   centred (the layer pads by itself); v of one resolution, where there are several
    both           key of the convolution, p = prenorm(key), qk = p W_qk^T
                   key = key + LocalAttention(qk, qk, p)
                   key = key + GEGLU(postnorm(key) W_ff^T)

    log mu = log(softmax(logit) library weight + least)        `least` keeps the logarithm of copies that add it finite

The stratum holds the whole tables, so that their parameters stay those that an optimiser knows, and reads its own
columns; `runs` says which, and a technique may hand in only these columns (stream.py does: the gradient of a table is
then made once for all strata, and not once for each).

Legend: cell (B), anchor (N), own_anchor (those of one resolution), dim (D), stratum_feature (F_k), experiment (row of
the tables, one per batch).
Known limit: without stream, the backward pass of every stratum makes gradients of the whole tables.
"""

import math
from collections.abc import Mapping
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_amp.data.sparse_counts import SparseCounts
from lightning_amp.models.decoders.likelihoods import table_rows
from lightning_amp.models.decoders.stratum import AllCells, AllFeatures, Decode, Stratum
from lightning_amp.models.decoders.stratum_keys import AttentionKey, geglu
from lightning_amp.shapes import OwnCounts, OwnTable, PerAnchor, Scalar


class AdaptedAttentionKey(AttentionKey):
    """Key by local attention, to p or the `projected` anchors, and a gated feed-forward layer, `residual` or not."""

    def __init__(self, layers: dict[str, nn.Module], *, projected: bool, residual: bool) -> None:
        nn.Module.__init__(self)
        # in the order of the model's key; names are those of protocol.ATTENTION_KEY
        for name in ("prenorm", "qk", "value", "attention", "postnorm", "ff"):
            self.add_module(name, layers[name])
        self.projected = projected
        self.residual = residual

    def extra_repr(self) -> str:
        """Shown by `print(module)`."""
        return f"projected={self.projected}, residual={self.residual}"


class AdaptedConvolutionKey(nn.Module):
    """Key by a depthwise convolution of kernel 2 over rows of v, with `padding` zeros behind the last anchor."""

    def __init__(
        self, pairs: nn.Module, activation: nn.Module, *, padding: int, rows: slice = slice(None)
    ) -> None:
        super().__init__()
        self.pairs = pairs
        self.activation = activation
        self.padding = padding
        self.rows = rows

    def extra_repr(self) -> str:
        """Shown by `print(module)`."""
        return f"padding={self.padding}"

    def forward(self, v: PerAnchor) -> tuple[Float[Tensor, "own_anchor dim"], PerAnchor]:
        """Key, and v unchanged."""
        padded = F.pad(v[self.rows], (0, 0, 0, self.padding))
        return self.activation(self.pairs(padded.T[None])[0].T), v


class PairedAttentionKey(nn.Module):
    """Key by a convolution, local attention and a gated layer; `checkpointed`: computed again in the backward pass."""

    def __init__(
        self, paired: AdaptedConvolutionKey, layers: dict[str, nn.Module], *, checkpointed: bool
    ) -> None:
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
    """Log-probability by the distribution that the foreign decoder returns, where ours differs from it."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.kind = kind

    def extra_repr(self) -> str:
        """Shown by `print(module)`."""
        return self.kind.__name__

    def forward(
        self,
        x: OwnCounts,
        location: OwnCounts,
        log_theta: OwnTable | None = None,
        zi_logits: OwnTable | None = None,
    ) -> Scalar:
        """Sum over cells and features; the location is log mu, or the logits of binary data."""
        given = distribution(self.kind, location, log_theta, zi_logits)
        total: Tensor = given.log_prob(x).sum()
        return total


def distribution(
    kind: type, location: Tensor, log_theta: Tensor | None, zi_logits: Tensor | None
) -> torch.distributions.Distribution:
    """A distribution of a foreign class: negative binomial with additional zeros, or without tables Bernoulli."""
    if log_theta is None or zi_logits is None:
        return kind(logits=location)  # type: ignore[no-any-return]
    return kind(  # type: ignore[no-any-return]
        zi_logits=zi_logits.expand_as(location), total_count=log_theta.exp(), logits=location - log_theta
    )


class AdaptedStratum(Stratum):
    """One stratum."""

    runs: dict[str, slice | Tensor]

    def __init__(
        self,
        key: nn.Module | None,  # module that makes the key; None where the anchors are the keys
        nodes: Int[Tensor, " stratum_feature"],
        *,
        columns: tuple[int, int],  # first and one past the last of the stratum's columns
        # the whole tables scale, bias, log_theta and zi_logits, by name; of binary data the first two
        tables: Mapping[str, nn.Parameter],
        likelihood: nn.Module,
        chained: bool,  # whether the next stratum reads this one's projected anchors
        least: float,
    ) -> None:
        nn.Module.__init__(self)
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
        return torch.logaddexp(log_mu, log_mu.new_tensor(math.log(self.least))) if self.least else log_mu

    def own_library(self, library: Tensor) -> Tensor:
        """What the stratum's features are parts of."""
        return library

    def arguments(
        self, k: int, log_weights: Tensor, *, x: Tensor | SparseCounts, **cells: Tensor
    ) -> dict[str, Tensor | SparseCounts]:
        """As of any stratum, with the own library."""
        found = super().arguments(k, log_weights, x=x, **cells)
        return found | {"library": self.own_library(cells["library"])}

    def _table(self, table: Tensor, batch: Tensor) -> Tensor:
        # a technique may have put the own columns there already
        own = table if table.shape[1] == len(self.feature_anchor) else self._columns(table)
        return table_rows(self.features.own(own), batch)

    def _columns(self, table: Tensor) -> Tensor:
        return table[:, slice(*self.columns)]
