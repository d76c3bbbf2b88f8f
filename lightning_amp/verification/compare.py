"""Compute relative errors of what ranks have recorded, and bounds from rounding.

Rounding is amplified where a step divides by what is nearly zero: an adaptive optimiser makes a whole step of a
gradient that is zero but for rounding, such as that of a bias in front of batch normalisation. So one process trains a
second time from weights that differ in their last place, and what that changes is allowed several times over:

    error(x)   = ||x - x_one|| / max(||x_one||, FLOOR ||all of its kind||)
    allowed(x) = min(MOST, max(ALLOWED, NUDGE error of x on the single process after one rounding in every weight))

Where the single process's own error is beyond MOST already, an error above MOST says neither that ranks are right nor
that they are wrong: rounding swamps x.

Legend: one = the single process; x = the same quantity on a rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_amp.verification.recorder import Calls, Prints, Record
from lightning_amp.verification.result import Row

Precision = Literal["float32", "float64"]
DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "float64": torch.float64}
FIRST, AFTER = ("forward", "first loss", "gradients"), ("later losses", "parameters", "buffers")
"""Kinds of quantities of the first step, and after an update."""
ALLOWED: dict[str, dict[str, float]] = {
    "float64": dict.fromkeys(FIRST, 1e-10) | dict.fromkeys(AFTER, 1e-9),
    "float32": dict.fromkeys(FIRST + AFTER, 1e-4) | {"first loss": 1e-5},
}
NUDGE = 30.0
"""How much more than one rounding in every weight, on the single process, the ranks may do to a number."""
MOST = {"float64": 1e-6, "float32": 1e-2}
"""What is never allowed, however much one process by itself makes of a rounding."""
FLOOR = 0.01
"""Share of the norm of all tensors of a kind that a tensor is compared with at least."""

Errors = dict[str, dict[str, float]]
"""Kind of quantity -> relative error of every tensor of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What one rank has found in one precision, compared with the single process.

    Attributes:
        place: Data rank and number of data ranks.
        losses, one_losses, cells: Per step, losses of the rank and of the single process, and cells on the rank.
        all_cells: Cells of the first global batch, 0 where their number is not known.
        errors, nudged: Of the rank, and of the single process after one rounding in every weight.
        factor: What all gradients of the single process are those of the rank times, None where it is not one number.
        draws: Place where the single process drew random numbers for cells -> name of the module.
        origins: Modules whose outputs differ though their inputs agree, in the order of their calls.
        apart: Buffers that differ between the ranks.
        unshared: BatchNorm layers whose statistics are those of one rank's cells.
        uneven: Whether modalities have different numbers of cells, which the data ranks do not divide.
    """

    precision: Precision
    place: tuple[int, int]
    losses: list[list[float]]
    one_losses: list[list[float]]
    cells: list[int | None]
    all_cells: int
    errors: Errors
    nudged: Errors
    factor: float | None
    draws: dict[str, str]
    origins: list[str]
    apart: list[str]
    unshared: list[str]
    uneven: bool
    strategies: tuple[str, ...]
    mesh: tuple[int, int]


def rows_of(reports: Sequence[Report]) -> tuple[Row, ...]:
    """Compare every quantity that has a tensor, in the order in which a step makes them.

    loss of a step = sum over data ranks of (cells of the rank / cells of all) loss of the rank
    """
    first = reports[0]
    precision, steps = first.precision, len(first.one_losses)
    after = f"after {steps} step{'s' if steps > 1 else ''}"
    ranks = {report.place[0]: report for report in reversed(reports)}.values()

    def of_all(step: int, backward: int) -> float:
        if any(len(report.losses[step]) <= backward for report in ranks):
            return float("nan")
        equal = not all(report.cells[step] for report in ranks)
        weights = [1 if equal else report.cells[step] or 0 for report in ranks]
        losses = (report.losses[step][backward] for report in ranks)
        return sum(n * loss for n, loss in zip(weights, losses, strict=True)) / sum(weights)

    union = [[of_all(step, i) for i, _ in enumerate(losses)] for step, losses in enumerate(first.one_losses)]
    losses: tuple[dict[str, float], ...] = {}, {}
    for name, error in loss_errors(union, first.one_losses).items():
        losses[name.split(",")[0] != "step 1"][name] = error
    # of every tensor the rank where its error is largest; one that is no number is
    worst: Errors = {kind: {} for kind in first.errors}
    for report in reports:
        for kind, found in report.errors.items():
            for name, error in found.items():
                known = worst[kind].get(name, -1.0)
                if known == known and not error <= known:
                    worst[kind][name] = error
    quantities = (
        ("forward, step 1", "forward", worst["forward"]),
        ("loss, step 1", "first loss", losses[0]),
        ("gradients, step 1", "gradients", worst["gradients"]),
        ("loss, later steps", "later losses", losses[1]),
        (f"parameters {after}", "parameters", worst["parameters"]),
        (f"buffers {after}", "buffers", worst["buffers"]),
    )
    rows = []
    for quantity, kind, found in quantities:
        of_one = first.nudged["losses" if "loss" in kind else kind]
        nudged = {name: of_one.get(name, 0.0) for name in found}
        # NUDGE times what one process makes of a rounding is beyond what is ever allowed
        swamped = frozenset(name for name, error in nudged.items() if NUDGE * error > MOST[precision])
        row = Row(quantity, precision, found, allowed(kind, precision, nudged), swamped)
        rows += [row] if found else []
    return tuple(rows)


def allowed(kind: str, precision: Precision, nudged: Mapping[str, float]) -> dict[str, float]:
    """What is allowed of every tensor of a kind: more, where one process by itself makes much of a rounding."""
    least, most = ALLOWED[precision][kind], MOST[precision]
    return {
        name: min(most, max(least, NUDGE * error if error == error else least))
        for name, error in nudged.items()
    }


def record_errors(found: Record, one: Record) -> Errors:
    """Relative errors of everything but losses."""
    return {
        "forward": output_errors(found.calls, one.calls),
        "gradients": errors(found.gradients, one.gradients),
        "parameters": errors(found.parameters, one.parameters),
        "buffers": errors(found.buffers, one.buffers),
    }


def errors(found: Mapping[str, Tensor], one: Mapping[str, Tensor]) -> dict[str, float]:
    """Relative error of every tensor that either side has; infinite where one side lacks it, or its shape differs."""
    norms = {name: float(value.double().norm()) for name, value in one.items()}
    floor = FLOOR * sum(norm**2 for norm in norms.values() if norm == norm) ** 0.5
    result = {}
    for name in [*one, *sorted(found.keys() - one.keys())]:
        if name not in one or name not in found or found[name].shape != one[name].shape:
            result[name] = float("inf")
            continue
        difference = float((found[name].double() - one[name].double()).norm())
        # equal values have no error, nor have values that are all zero
        result[name] = difference and difference / max(norms[name], floor, torch.finfo().tiny)
    return result


def loss_errors(found: list[list[float]], one: list[list[float]]) -> dict[str, float]:
    """Relative error of every loss; not a number where there is no such loss."""
    result = {}
    for step, losses in enumerate(one):
        for i, loss in enumerate(losses):
            mine = found[step][i] if step < len(found) and i < len(found[step]) else float("nan")
            name = f"step {step + 1}" + (f", backward {i + 1}" if len(losses) > 1 else "")
            result[name] = abs(mine - loss) / max(abs(loss), torch.finfo().tiny)
    return result


def output_errors(found: Calls, one: Calls, *, side: int = 1) -> dict[str, float]:
    """Relative error of what every module returns (or reads: side 0) for the rank's cells, where both sides show it."""
    floor = FLOOR * max((_size(part) for call in one.values() for _, part in call[1]), default=0.0)
    result = {}
    for name in one:
        error = _largest(found[name][side], one[name][side], floor) if name in found else None
        if error is not None:
            result[name] = error
    return result


def origins(found: Calls, one: Calls, *, tolerance: float) -> list[str]:
    """Modules whose outputs differ though their inputs agree, in the order of their calls."""
    read = output_errors(found, one, side=0)
    differing = [name for name, error in output_errors(found, one).items() if not error <= tolerance]
    first = [name for name in differing if one[name][0] and read.get(name, 0.0) <= tolerance]
    # a container differs because something in it does
    return [name for name in first if not any(other.startswith(f"{name}.") for other in first)]


def common_factor(found: Mapping[str, Tensor], one: Mapping[str, Tensor]) -> float | None:
    """What all tensors of `one` are those of `found` times, None where it is not one number."""
    pairs = [(found[k].double().flatten(), one[k].double().flatten()) for k in one if k in found]
    pairs = [(a, b) for a, b in pairs if a.shape == b.shape]
    mixed, own, ones = (sum(float(p[i] @ p[j]) for p in pairs) for i, j in ((0, 1), (0, 0), (1, 1)))
    return mixed / own if own and ones and abs(1 - mixed * mixed / (own * ones)) < 1e-6 else None


def _largest(found: Prints, one: Prints, floor: float) -> float | None:
    """The largest relative error of some tensors; None where there are none, or not those of the rank's cells."""
    if len(found) != len(one) or not one:
        return None
    largest = 0.0
    for (start, mine), (_, whole) in zip(found, one, strict=True):
        rows = whole[start : start + len(mine)]
        if rows.shape != mine.shape:
            return None
        difference = float((mine - rows)[:, 0].norm())
        if difference != difference:
            return difference
        if difference:
            largest = max(largest, difference / max(_size(rows), floor))
    return largest


def _size(part: Tensor) -> float:
    return float(part[:, 1].norm())
