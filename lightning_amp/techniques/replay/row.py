"""Define the row of `replay` in the table of strategies, and the spec of its rule in a plan."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayOperators:
    """Stretches of the training step keep what they read, and their operators run again in the backward pass.

    Attributes:
        ends: Where stretches end, as places among the operators of the forward pass: "120,180-,300". One with "-" is
            kept as it is; so is what comes after the last.
    """

    ends: str

    @property
    def segments(self) -> list[tuple[int, bool]]:
        """The places, and whether the stretch before is replayed."""
        return [(int(end.rstrip("-")), not end.endswith("-")) for end in self.ends.split(",") if end]


def written(segments: list[tuple[int, bool]]) -> str:
    """Segments as a plan has them."""
    return ",".join(f"{end}" if again else f"{end}-" for end, again in segments)


ROW: dict[str, Any] = {
    "title": "replay of operators",
    "shrinks": "what autograd keeps of any code to what stretches of it read",
    "specs": (ReplayOperators,),
}
