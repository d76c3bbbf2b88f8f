"""Decoders of modalities whose features are vertices of the guidance graph: RNA, ATAC, methylation.

    linear = softplus(scale) u v^T + bias
    counts (NB, ZINB)                 mean softmax(linear) * library, inverse dispersion exp(log_theta)
    values (ZILN)                     location linear, deviation exp(log_scale)
    loss = - mean over all cells and features of log p(x)

scale, bias and the tables of a likelihood have one row per experimental batch.
"""

from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from lightning_amp.models.decoders import likelihoods
from lightning_amp.models.decoders.likelihoods import table_rows
from lightning_amp.shapes import Counts, Experiment, Library, PerCell, Scalar

FIRST = {"log_theta": likelihoods.FIRST_LOG_THETA, "zi_logits": likelihoods.FIRST_ZI_LOGIT}


class PlainDecoder(nn.Module):
    """Abstract; a likelihood is a function of (x, location, *tables)."""

    likelihood: ClassVar[Callable[..., Tensor]]
    tables: ClassVar[tuple[str, ...]]
    counts: ClassVar[bool]

    def __init__(self, n_features: int, n_batches: int):
        super().__init__()
        for name in ("scale", "bias", *self.tables):
            table = torch.full((n_batches, n_features), FIRST.get(name, 0.0))
            self.register_parameter(name, nn.Parameter(table))

    def forward(
        self, u: PerCell, v: Float[Tensor, "feature dim"], *, batch: Experiment, library: Library, x: Counts
    ) -> Scalar:
        """Minus the mean log-likelihood over cells and features; library must be positive."""
        tables = (self._rows(name, batch) for name in self.tables)
        return -type(self).likelihood(x, self._location(u, v, batch, library), *tables).mean()

    def mean(
        self, u: PerCell, v: Float[Tensor, "feature dim"], *, batch: Experiment, library: Library
    ) -> Counts:
        """Expected counts without zero inflation, or the location of values (of their logarithm for ZILN)."""
        location = self._location(u, v, batch, library)
        return location.exp() if self.counts else location

    def _location(self, u: Tensor, v: Tensor, batch: Tensor, library: Tensor) -> Tensor:
        linear = F.softplus(self._rows("scale", batch)) * (u @ v.T) + self._rows("bias", batch)
        return linear.log_softmax(dim=1) + library.log() if self.counts else linear

    def _rows(self, name: str, batch: Tensor) -> Tensor:
        return table_rows(self.get_parameter(name), batch)


class NBDecoder(PlainDecoder):
    """Negative binomial counts."""

    likelihood, tables, counts = staticmethod(likelihoods.nb), ("log_theta",), True


class ZINBDecoder(PlainDecoder):
    """Zero-inflated negative binomial counts."""

    likelihood, tables, counts = staticmethod(likelihoods.zinb), ("log_theta", "zi_logits"), True


class ZILNDecoder(PlainDecoder):
    """Zero-inflated log-normal values."""

    likelihood, tables, counts = staticmethod(likelihoods.ziln), ("log_scale", "zi_logits"), False


PLAIN_DECODERS: dict[str, type[PlainDecoder]] = {
    "nb": NBDecoder,
    "zinb": ZINBDecoder,
    "ziln": ZILNDecoder,
}
