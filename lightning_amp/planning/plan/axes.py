"""Define the choices of a plan: ranks along the two axes of the mesh, one technique per axis of the decoder."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from lightning_amp.costs.rule import Spec
from lightning_amp.errors import PlanError
from lightning_amp.techniques.table import STRATEGIES, without_blocks


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshShape:
    """Ranks along the two axes of the device mesh; the model axis is innermost."""

    data: int
    model: int

    def __post_init__(self) -> None:
        if not all(type(n) is int and n >= 1 for n in (self.data, self.model)):
            raise PlanError(
                f"a mesh of {self.data!r} x {self.model!r} is not supported; both axes need a whole number of 1 or more"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Axes:
    """One choice on each axis of a decomposed decoder; a form that a rule asks for is part of the name."""

    placement: str = "replicated"
    features: str = "all"
    attention: str = "eager"
    decode: str = "full"
    likelihood: str = "dense"
    activations: str = "retain"
    kernels: str = "eager"

    @classmethod
    def of(cls, strategies: Iterable[str], specs: Iterable[Spec] = ()) -> "Axes":
        """The choices of some strategies of the library, and on the other axes the eager ones.

        Args:
            specs: What their rules ask for, where that may not be the usual.
        """
        specs = tuple(specs)
        choosing = without_blocks(strategies, specs)
        choices = [
            *(STRATEGIES[strategy].choice for strategy in choosing),
            *(getattr(spec, "choice", None) for spec in specs),
        ]
        axes = cls(**dict(choice for choice in choices if choice is not None))
        # where strata or anchors are split, S2 is left with the layers outside the decoder
        return axes if axes.placement not in ("strata", "nodes") else replace(axes, features="all")
