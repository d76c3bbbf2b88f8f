"""Define `MeshShape`, the sizes of the two axes of the mesh of ranks."""

from dataclasses import dataclass

from lightning_amp.errors import PlanError


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

    @property
    def ranks(self) -> int:
        """Return the number of all ranks."""
        return self.data * self.model
