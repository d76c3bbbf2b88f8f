"""recompute: nothing of a stratum is kept for the backward pass but v, where it is computed again.

Exact: the same computation twice (torch.utils.checkpoint), with the same random numbers. For decoders whose loss is not
computed inside them; where it is, `stream` keeps as little and computes everything once. What shrinks: all that K
strata keep becomes what one keeps. The price: every stratum's forward pass twice, its collectives included.

Hooks on a stratum run in the first pass only.
"""

from collections.abc import Callable
from typing import Any, cast

from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from lightning_amp.parallel.change import Change
from lightning_amp.parallel.walks import walk_of
from lightning_amp.planning.specs import RecomputeStrata


def recompute_strata(decoder: nn.Module, spec: RecomputeStrata, mesh: DeviceMesh | None) -> Change:
    """Compute a decoder's strata again in the backward pass.

    Args:
        decoder: A decomposed decoder.
        spec: Has no settings.
        mesh: Is not used.

    Raises:
        InstallError: The decoder's way through the strata is its own.
    """
    return Change({"walk": RecomputedStrata(walk_of(decoder, "recompute", once=True))})


class RecomputedStrata(nn.Module):
    """The way through the strata that keeps none of them; made by `recompute_strata`.

    Args:
        inner: The way whose strata are computed again.
    """

    is_technique = True

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(
        self,
        strata: nn.ModuleList,
        u: Float[Tensor, "cell dim"],
        v: Float[Tensor, "anchor dim"],
        log_weights: Float[Tensor, "#cell stratum"],
        *,
        own: range | None = None,
        **cells: Tensor,
    ) -> Float[Tensor, ""]:
        """Negative log-likelihood summed over cells and features."""
        again = [_Again(cast(Any, stratum)) for stratum in strata]
        return cast(Tensor, self.inner(cast(Any, again), u, v, log_weights, own=own, **cells))


class _Again:
    """Stands in for a stratum in the walk."""

    def __init__(self, stratum: Any) -> None:
        self.stratum = stratum
        self.arguments: Callable[..., dict[str, Tensor]] = stratum.arguments

    def spine(self, v: Tensor) -> Tensor:
        return cast(Tensor, self.stratum.spine(v))

    def __call__(self, v: Tensor, u: Tensor, **cells: Tensor) -> tuple[Tensor, Tensor]:
        calls = iter((self.stratum,))

        def run(v: Tensor, u: Tensor, cells: dict[str, Tensor]) -> Any:
            return next(calls, self.stratum.forward)(v, u, **cells)

        found = checkpoint(run, v, u, cells, use_reentrant=False)
        return cast(tuple[Tensor, Tensor], found)
