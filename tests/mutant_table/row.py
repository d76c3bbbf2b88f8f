"""One row of the tables, and the paths that several of them name."""

from dataclasses import dataclass

P = "lightning_amp/parallel"
M = "lightning_amp/models"
L = "lightning_amp/lightning"
MODULES = "lightning_amp/planning/modules"


@dataclass(frozen=True, slots=True)
class Mutant:
    """One edit: the line `old` of a file becomes `new`, and the tests must fail."""

    technique: str
    kind: str
    file: str
    old: str
    new: str
    tests: str
