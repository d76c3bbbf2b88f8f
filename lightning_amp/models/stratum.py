"""One stratum of the Hi-C decoder: its key, its inner product with the cells and its likelihood.

    logit = softplus(scale) (u key^T)[:, nodes] + bias      mu = softmax(logit) * library * weight
    x ~ ZINB(mu, exp(log_theta), zi_logits)

Legend: cell, anchor (N), dim (D), stratum_feature (F_k), experiment (row of the tables, one per batch).
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from lightning_amp.models.blocks import AttentionKey, ConvolutionKey
from lightning_amp.models.likelihoods import bernoulli, zinb
from lightning_amp.models.tables import table_rows

KeyModule = AttentionKey | ConvolutionKey


class Decode(nn.Module):
    """Inner product of cells with the keys of a stratum's features; a leaf, so that it can be replaced."""

    def forward(
        self,
        u: Float[Tensor, "cell dim"],
        key: Float[Tensor, "anchor dim"],
        nodes: Int[Tensor, " stratum_feature"],
    ) -> Float[Tensor, "cell stratum_feature"]:
        """(u key^T)[:, nodes]."""
        return (u @ key.T)[:, nodes]


class AllFeatures(nn.Module):
    """What a device does with the features of a stratum: it holds all of them; a leaf, so that it can be replaced."""

    def own(self, values: Shaped[Tensor, "*row stratum_feature"]) -> Shaped[Tensor, "*row own_feature"]:
        """The columns of the features that this device holds."""
        return values

    def scores(
        self,
        decode: nn.Module,
        u: Float[Tensor, "cell dim"],
        key: Float[Tensor, "anchor dim"],
        nodes: Int[Tensor, " stratum_feature"],
    ) -> Float[Tensor, "cell own_feature"]:
        """Decoded scores of the own features."""
        scores: Tensor = decode(u, key, nodes)
        return scores

    def log_softmax(self, logits: Float[Tensor, "cell own_feature"]) -> Float[Tensor, "cell own_feature"]:
        """Logarithm of the softmax over all features of the stratum, for the own ones."""
        return logits.log_softmax(dim=1)

    def whole(self, values: Float[Tensor, "cell own_feature"]) -> Float[Tensor, "cell stratum_feature"]:
        """All columns again; without gradients."""
        return values


class Stratum(nn.Module):
    """One stratum: key, decode and likelihood of its features.

    Args:
        key: module that makes the key; None for stratum 0, whose key is v.
        nodes: anchor of each of the stratum's features.
        distance: k, in anchors.
        columns: first and one past the last of the stratum's columns in the data matrix.
        n_batches: experimental batches, the rows of the tables.
        chained: whether the next stratum reads this one's projected anchors instead of v.
        binarized: Bernoulli likelihood of x > 0 instead of ZINB.
    """

    nodes: Tensor

    def __init__(
        self,
        key: KeyModule | None,
        nodes: Int[Tensor, " stratum_feature"],
        *,
        distance: int,
        columns: tuple[int, int],
        n_batches: int,
        chained: bool = False,
        binarized: bool = False,
    ):
        super().__init__()
        self.key = key
        self.decode = Decode()
        self.features = AllFeatures()
        self.distance = distance
        self.columns = columns
        self.chained = chained
        self.binarized = binarized
        self.register_buffer("nodes", nodes, persistent=False)
        shape = (n_batches, len(nodes))
        self.scale = nn.Parameter(torch.zeros(shape))
        self.bias = nn.Parameter(torch.zeros(shape))
        self.log_theta = nn.Parameter(torch.zeros(shape))
        self.zi_logits = nn.Parameter(torch.zeros(shape))

    def forward(
        self,
        v: Float[Tensor, "anchor dim"],
        u: Float[Tensor, "cell dim"],
        *,
        batch: Int[Tensor, " cell"],
        library: Float[Tensor, "cell 1"],
        x: Float[Tensor, "cell stratum_feature"],
        log_weight: Float[Tensor, "#cell 1"],
    ) -> tuple[Float[Tensor, ""], Float[Tensor, "anchor dim"]]:
        """Negative log-likelihood summed over cells and features, and v for the next stratum."""
        logits, v_next = self._logits(v, u, batch)
        x = self.features.own(x)
        if self.binarized:
            return -bernoulli((x > 0).to(logits.dtype), logits).sum(), v_next
        log_mu = self._log_mean(logits, library, log_weight)
        log_theta, zi_logits = self._table(self.log_theta, batch), self._table(self.zi_logits, batch)
        return -zinb(x, log_mu, log_theta, zi_logits).sum(), v_next

    def mean(
        self,
        v: Float[Tensor, "anchor dim"],
        u: Float[Tensor, "cell dim"],
        *,
        batch: Int[Tensor, " cell"],
        library: Float[Tensor, "cell 1"],
        log_weight: Float[Tensor, "#cell 1"],
    ) -> tuple[Float[Tensor, "cell stratum_feature"], Float[Tensor, "anchor dim"]]:
        """Expected contacts without zero inflation (probabilities if binarized), and the next v."""
        logits, v_next = self._logits(v, u, batch)
        mean = logits.sigmoid() if self.binarized else self._log_mean(logits, library, log_weight).exp()
        return self.features.whole(mean), v_next

    def _logits(self, v: Tensor, u: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
        key, val = (v, v) if self.key is None else self.key(v)
        decoded = self.features.scores(self.decode, u, key, self.nodes)
        logits = F.softplus(self._table(self.scale, batch)) * decoded + self._table(self.bias, batch)
        return logits, (val if self.chained else v)

    def _log_mean(self, logits: Tensor, library: Tensor, log_weight: Tensor) -> Tensor:
        return self.features.log_softmax(logits) + library.log() + log_weight

    def _table(self, table: Tensor, batch: Tensor) -> Tensor:
        return table_rows(self.features.own(table), batch)
