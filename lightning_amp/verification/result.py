"""What a verification found, as inert data: errors beside what is allowed, and what breaks equivalence.

    error(x) = ||x - x_one|| / max(||x_one||, floor ||all of its kind||)    of a tensor; the largest of a kind counts

The floor keeps what is zero but for rounding, such as the gradient of a bias in front of batch normalisation, from
being compared with itself.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import isfinite
from textwrap import fill
from typing import Any

from lightning_amp.planning.reports.table import WIDTH, table

UNCLEAR = (
    "? Cannot tell: one process by itself makes as much of a single rounding in its weights, so the error says nothing;"
    " in float64, where there is less rounding, the same quantity can be told."
)


@dataclass(frozen=True, kw_only=True, slots=True)
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
        """Where the error is largest beside what is allowed, of what is wrong first; what is no number comes before."""
        names = self.wrong or self.unclear or self.errors
        return max(names, key=lambda name: _rank(self.errors[name] / self.tolerances[name]))

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
class Culprit:
    """Something in the model that breaks equivalence.

    Attributes:
        cause: "random draws", "batch statistics", "unequal parts", "sum over samples", "mean of means", "buffers",
            "rounding", "not finite" or "unknown".
        where: Module, line or tensors.
        evidence: What was tried and what became of the errors.
        advice: What to do.
    """

    cause: str
    where: str
    evidence: str
    advice: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """One process against several ranks.

    Attributes:
        module: Class of the module.
        strategies, mesh: Of the plan that the ranks have carried out; ranks of the data and of the model axis.
        cells: Cells of the global batch, 0 where its tensors do not tell.
        rows: Every quantity in every precision.
        culprits: What breaks equivalence; empty where all rows are equal.
    """

    module: str
    strategies: tuple[str, ...]
    mesh: tuple[int, int]
    cells: int
    steps: int
    rows: tuple[Row, ...]
    culprits: tuple[Culprit, ...] = ()

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
        return asdict(self) | {"schema": 1, "ok": self.ok, "rows": rows}

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
        parts = [head, *([UNCLEAR] if any(row.unclear for row in self.rows) else []), self._verdict()]
        about, *after = (fill(part, WIDTH) for part in parts)
        return "\n\n".join([about, found, *after, *map(_paragraph, self.culprits)])

    def _verdict(self) -> str:
        if self.ok:
            return "The ranks train as one process does."
        if any(row.wrong for row in self.rows):
            return "The ranks do not train as one process does."
        return "Cannot tell whether the ranks train as one process does: verify in float64 too, with fewer steps."


def _paragraph(culprit: Culprit) -> str:
    lines = [f"{culprit.cause} at {culprit.where}" if culprit.where else culprit.cause]
    lines += [
        fill(text, WIDTH, initial_indent="  ", subsequent_indent="  ")
        for text in (culprit.evidence, culprit.advice)
    ]
    return "\n".join([fill(lines[0], WIDTH, subsequent_indent="  "), *lines[1:]])


def _rank(error: float) -> float:
    return float("inf") if error != error else error


def _plain(error: float) -> float | str:
    return error if error - error == 0 else str(error)
