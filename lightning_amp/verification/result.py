"""Define the result of a verification, as data and as text: errors with tolerances, and suspects."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import isfinite
from textwrap import fill, indent
from typing import Any

from lightning_amp.planning.reports.table import WIDTH, table

NAMED = 4
"""Places of a suspect that are named."""
SUSPECTS = "Suspects; none is proved, and one difference can hide another: change one, then verify again."
UNCLEAR = (
    "? Cannot tell: a single rounding of weights in one process has an effect as large, so the error says"
    " nothing; in float64, where there is less rounding, the same quantity can be judged."
)


@dataclass(frozen=True, slots=True)
class Row:
    """One quantity in one precision.

    Attributes:
        errors: Relative error of every tensor, by name; at least one.
        tolerances: Largest relative error of each that is rounding.
        swamped: Tensors of which a larger error may still be rounding, so that it tells nothing.
    """

    quantity: str
    precision: str
    errors: Mapping[str, float]
    tolerances: Mapping[str, float]
    swamped: frozenset[str] = frozenset()

    @property
    def worst(self) -> str:
        """The largest error relative to its tolerance, failures first; NaN comes before all."""
        names = self.wrong or self.unclear or self.errors
        return max(names, key=lambda name: _or_infinite(self.errors[name] / self.tolerances[name]))

    @property
    def error(self) -> float:
        """The error there."""
        return self.errors[self.worst]

    @property
    def allowed(self) -> float:
        """What is allowed there."""
        return self.tolerances[self.worst]

    @property
    def wrong(self) -> list[str]:
        """Tensors whose error is not rounding; one that is not a finite number never is."""
        return [name for name in self._large if name not in self.swamped or not isfinite(self.errors[name])]

    @property
    def unclear(self) -> list[str]:
        """Tensors whose error may be rounding or not."""
        return [name for name in self._large if name in self.swamped and isfinite(self.errors[name])]

    @property
    def ok(self) -> bool:
        """Whether all errors are rounding."""
        return not self._large

    @property
    def _large(self) -> list[str]:
        return [name for name, error in self.errors.items() if not error <= self.tolerances[name]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Suspect:
    """Something in the model that may make ranks differ; nothing was tried to prove it.

    Attributes:
        suspect: "random draws", "batch statistics", "buffers", "sum over samples", "unequal parts", "mean of means",
            "rounding", "not finite" or "unknown".
        where: Modules, lines or tensors.
        why: What was seen.
        advice: What to do.
    """

    suspect: str
    where: str = ""
    why: str
    advice: str

    def at(self, names: Sequence[str]) -> "Suspect":
        """The same at some places."""
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        return replace(self, where="; ".join(names[:NAMED]) + more)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """One process against several ranks.

    Attributes:
        module: Class of the module.
        strategies, mesh: Of the plan that the ranks have carried out; ranks of the data and of the model axis.
        cells: Cells of the global batch, 0 where their number is not known.
        rows: Every quantity in every precision.
        first_difference: The first module whose outputs differ, one whose inputs agree where there is one; "" where
            none differs.
        suspects: What may make the ranks differ; empty where all rows are equal.
    """

    module: str
    strategies: tuple[str, ...]
    mesh: tuple[int, int]
    cells: int
    steps: int
    rows: tuple[Row, ...]
    first_difference: str = ""
    suspects: tuple[Suspect, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every quantity is equal up to rounding; where one precision cannot tell, in the other."""
        told = {row.quantity for row in self.rows if row.ok}
        return all(row.ok or (not row.wrong and row.quantity in told) for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; errors that are no finite number as text."""
        rows = [
            {
                "quantity": row.quantity,
                "precision": row.precision,
                "error": _plain(row.error),
                "allowed": row.allowed,
                "worst": row.worst,
                "ok": row.ok,
                "unclear": row.unclear,
                "errors": {name: _plain(error) for name, error in row.errors.items()},
            }
            for row in self.rows
        ]
        return asdict(self) | {"schema": 2, "ok": self.ok, "rows": rows}

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
                "yes" if row.ok else "NO" if row.wrong else "?",
                row.worst if row.error else "",
            ]
            for row in self.rows
        ]
        found = table(["", "in", "error", "allowed", "equal", "largest at"], rows)
        if self.ok:
            verdict = "The ranks train as one process does."
        elif any(row.wrong for row in self.rows):
            verdict = "The ranks do not train as one process does."
        else:
            verdict = (
                "Cannot tell whether the ranks train as one process does: verify fewer steps, in float64 too."
            )
        parts = [UNCLEAR] * any(row.unclear for row in self.rows) + [verdict]
        if self.first_difference:
            parts.append(f"The first module whose outputs differ: {self.first_difference}.")
        parts += [SUSPECTS] * bool(self.suspects)
        text = [fill(head, WIDTH), found, *(fill(part, WIDTH) for part in parts)]
        for one in self.suspects:
            title = f"{one.suspect} at {one.where}" if one.where else one.suspect
            lines = [fill(title, WIDTH, subsequent_indent="  ")]
            lines += [indent(fill(line, WIDTH - 2), "  ") for line in (one.why, one.advice)]
            text.append("\n".join(lines))
        return "\n\n".join(text)


def _or_infinite(error: float) -> float:
    return float("inf") if error != error else error


def _plain(error: float) -> float | str:
    return error if error - error == 0 else str(error)
