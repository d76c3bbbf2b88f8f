"""Loop over a decoder's strata in a module, so that a technique can replace it."""

from typing import cast

from torch import Tensor, nn

from lightning_amp.models.decoders.stratum import Stratum
from lightning_amp.shapes import LogWeights, PerAnchor, PerCell, Scalar


class EveryStratum(nn.Module):
    """One stratum after the other, all kept for the backward pass; a leaf, so that it can be replaced."""

    def forward(
        self,
        strata: nn.ModuleList,
        u: PerCell,
        v: PerAnchor,
        log_weights: LogWeights,
        *,
        own: range | None = None,
        **cells: Tensor,
    ) -> Scalar:
        """Negative log-likelihood summed over cells and features.

        Args:
            own: strata to run, all of them when None; of those before them the spine is run, of those after nothing.
            cells: `batch`, `library` and `x` of the cells.
        """
        own = range(len(strata)) if own is None else own
        total = u.new_zeros(())
        for k, module in enumerate(strata[: own.stop] if len(own) else ()):
            stratum = cast(Stratum, module)
            if k < own.start:
                v = stratum.spine(v)
                continue
            nll, v = stratum(v, u, **stratum.arguments(k, log_weights, **cells))
            total = total + nll
        return total
