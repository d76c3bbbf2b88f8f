"""Define the spec of replayed operators in a plan."""

from dataclasses import dataclass

KEPT, AT_ONCE, ONE_BY_ONE = 0, 1, 2
"""Kinds of stretches: as it is, replayed as a whole, or anew for each tensor that the backward pass asks for."""
MARKS = {KEPT: "-", AT_ONCE: "", ONE_BY_ONE: "+"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayOperators:
    """Stretches of the training step keep what they read, and their operators run again in the backward pass.

    Attributes:
        ends: Where stretches end, as places among the operators of the forward pass: "120,180-,300+". One with "-" is
            kept as it is; so is what comes after the last. One with "+" runs again for each of its tensors.
    """

    ends: str

    @property
    def segments(self) -> list[tuple[int, int]]:
        """The places, and the kind of the stretch before."""
        kinds = {mark: kind for kind, mark in MARKS.items()}
        ends = [(end.rstrip("-+"), end) for end in self.ends.split(",") if end]
        return [(int(place), kinds[end.removeprefix(place)]) for place, end in ends]


def written(segments: list[tuple[int, int]]) -> str:
    """Segments as a plan has them."""
    return ",".join(f"{end}{MARKS[kind]}" for end, kind in segments)
