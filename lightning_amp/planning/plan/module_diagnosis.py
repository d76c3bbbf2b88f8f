"""What a plan of any module says of its step as it is: where the bytes are, and which techniques help.

Legend: module_profile.py.
"""

from dataclasses import dataclass
from typing import Any

from lightning_amp.errors import PlanError
from lightning_amp.footprint.module_profile import PARTS


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleDiagnosis:
    """The second training step on one device with nothing installed.

    Attributes:
        largest: The largest part of the peak, one of `PARTS`.
        evidence: One sentence per finding, with its numbers.
        helps: Techniques by id, and what they would make of the peak; that which helps most first.
        does_not_help: Techniques by id, and why they would not.
        peak_bytes: The peak.
        parts: The peak in parts.
        modules: Those that hold most at the peak, largest first, without what their children hold.
        measured: "fake tensors", or "a real step".
        reason: Why the step could not run on fake tensors, "" where it could.

    Raises:
        PlanError: A value of another kind.
    """

    largest: str
    evidence: tuple[str, ...]
    helps: dict[str, str]
    does_not_help: dict[str, str]
    peak_bytes: int
    parts: dict[str, int]
    modules: dict[str, int]
    measured: str
    reason: str = ""

    def __post_init__(self) -> None:
        named = {"helps": self.helps, "does_not_help": self.does_not_help}
        texts = [*self.evidence, *(text for row in named.values() for pair in row.items() for text in pair)]
        sizes = [self.peak_bytes, *self.parts.values(), *self.modules.values()]
        if (
            self.largest not in PARTS
            or set(self.parts) != set(PARTS)
            or not all(isinstance(text, str) for text in [*texts, self.measured, self.reason, *self.modules])
            or not all(type(size) is int and size >= 0 for size in sizes)
        ):
            raise PlanError(
                f"a diagnosis was asked for that is none: {self!r}; `largest` is one of {', '.join(PARTS)}, `parts` has"
                " all of them, sizes are whole numbers of bytes, all else is text"
            )

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> "ModuleDiagnosis":
        """What `dataclasses.asdict` made, from JSON."""
        return cls(**{**plain, "evidence": tuple(plain["evidence"])})
