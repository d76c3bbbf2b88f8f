"""Define the diagnosis of a module's step without techniques: where its bytes are, and which techniques help.

Legend: module_profile.py.
"""

from dataclasses import dataclass
from typing import Any

NEEDLESS = "{} was not looked for, which takes seconds: the step fits as it is"
"""Reason in `does_not_help` of a technique that may help."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleDiagnosis:
    """The second training step on one device with nothing installed.

    Attributes:
        largest: The largest part of the peak, one of module_profile.PARTS.
        evidence: One sentence per finding, with its numbers.
        helps: Techniques by id, and what they would make of the peak; that which helps most first.
        does_not_help: Techniques by id, and why they would not.
        peak_bytes: The peak.
        parts: The peak in parts.
        modules: Those that hold most at the peak, largest first, without what their children hold.
        measured: "fake tensors", or "a real step".
        reason: Why the step could not run on fake tensors, "" where it could.
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

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> "ModuleDiagnosis":
        """What `dataclasses.asdict` made, from JSON."""
        return cls(**{**plain, "evidence": tuple(plain["evidence"])})
