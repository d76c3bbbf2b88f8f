"""Define the result of a verification, as data and as text: errors with tolerances, and suspects."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import isnan
from textwrap import fill, indent
from typing import Any

from lightning_amp.text_table import WIDTH, table

NAMED = 4
"""Most places listed for a suspect."""
SUSPECTS = "Suspects; none is proved, and one difference can hide another: change one, then verify again."


@dataclass(frozen=True, slots=True)
class Row:
    """The comparison of one quantity in one precision."""

    quantity: str
    precision: str
    errors: Mapping[str, float]  # relative error of every tensor, by name; at least one
    allowed: float  # tolerance: the largest relative error that rounding explains

    @property
    def worst(self) -> str:
        """Name of the tensor with the largest error; nan counts as the largest."""
        return max(self.errors, key=lambda name: (isnan(self.errors[name]), self.errors[name]))

    @property
    def error(self) -> float:
        """The largest error."""
        return self.errors[self.worst]

    @property
    def wrong(self) -> list[str]:
        """Tensors whose error exceeds the tolerance, or is nan."""
        return [name for name, error in self.errors.items() if not error <= self.allowed]

    @property
    def ok(self) -> bool:
        """Whether no error exceeds the tolerance."""
        return not self.wrong


@dataclass(frozen=True, kw_only=True, slots=True)
class Suspect:
    """Something in the model that may make ranks differ; it is not proved."""

    # "random draws", "batch statistics", "buffers", "sum over samples", "unequal parts", "mean of means", "rounding",
    # "not finite" or "unknown"
    suspect: str
    where: str = ""  # modules, lines or tensors
    why: str  # what was observed
    advice: str  # what to do

    def at(self, names: Sequence[str]) -> "Suspect":
        """Return a copy with these places."""
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        return replace(self, where="; ".join(names[:NAMED]) + more)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """Result of `verify`: one process compared with several ranks."""

    module: str  # its class
    strategies: tuple[str, ...]  # strategies of the ranks' plan
    mesh: tuple[int, int]  # ranks of the data and of the model axis
    cells: int  # cells of the global batch; 0 if not known
    steps: int
    rows: tuple[Row, ...]  # every quantity in every precision
    suspects: tuple[Suspect, ...] = ()  # possible causes of differences; empty if all rows are equal

    @property
    def ok(self) -> bool:
        """Whether every quantity is equal up to rounding; in double precision if that was compared."""
        exact = [row for row in self.rows if row.precision == "float64"]
        return all(row.ok for row in exact or self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; infinite errors and nan as text."""
        rows = [
            {
                "quantity": row.quantity,
                "precision": row.precision,
                "error": _plain(row.error),
                "allowed": row.allowed,
                "worst": row.worst,
                "ok": row.ok,
                "errors": {name: _plain(error) for name, error in row.errors.items()},
            }
            for row in self.rows
        ]
        return asdict(self) | {"schema": 3, "ok": self.ok, "rows": rows}

    def __str__(self) -> str:
        data, model = self.mesh
        head = (
            f"{self.module}: one process against {data * model} ranks, {data} x {model} (data x model), with"
            f" {', '.join(self.strategies) or 'no strategies'}; {self.cells or 'an unknown number of'} samples in all,"
            f" {self.steps} step{'s' if self.steps > 1 else ''}"
        )
        rows = [
            [
                row.quantity,
                row.precision,
                f"{row.error:.1e}",
                f"{row.allowed:.0e}",
                "yes" if row.ok else "NO",
                row.worst if row.error else "",
            ]
            for row in self.rows
        ]
        found = table(["", "in", "error", "allowed", "equal", "largest at"], rows)
        verdict = "train as one process does" if self.ok else "do not train as one process does"
        parts = [f"The ranks {verdict}.", *[SUSPECTS] * bool(self.suspects)]
        text = [fill(head, WIDTH), found, *(fill(part, WIDTH) for part in parts)]
        for one in self.suspects:
            title = f"{one.suspect} at {one.where}" if one.where else one.suspect
            lines = [fill(title, WIDTH, subsequent_indent="  ")]
            lines += [indent(fill(line, WIDTH - 2), "  ") for line in (one.why, one.advice)]
            text.append("\n".join(lines))
        return "\n\n".join(text)


def _plain(error: float) -> float | str:
    return error if error - error == 0 else str(error)
