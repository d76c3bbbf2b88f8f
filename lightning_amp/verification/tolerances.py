"""Relative errors of named tensors, and how large rounding may make them.

Rounding is amplified where a step divides by what is nearly zero: an adaptive optimiser makes a whole step of a
gradient that is zero but for rounding, such as that of a bias in front of batch normalisation. So one process trains a
second time from weights that differ in their last place, and what that changes is allowed several times over:

    allowed(x) = min(MOST, max(table, NUDGE error of x on the single process after one rounding in every weight))

Where already the second is beyond MOST, rounding swamps x: an error above MOST says neither that ranks are right nor
that they are wrong.

Legend: one = the single process; x = the same quantity on a rank.
"""

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

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


def errors(found: Mapping[str, Tensor], one: Mapping[str, Tensor]) -> dict[str, float]:
    """Relative error of every tensor that either side has; infinite where one side lacks it, or its shape differs."""
    norms = {name: _norm(value) for name, value in one.items()}
    floor = FLOOR * sum(norm**2 for norm in norms.values() if norm == norm) ** 0.5
    result = {name: float("inf") for name in found.keys() ^ one.keys()}
    for name in one.keys() & found.keys():
        result[name] = relative(found[name], one[name], at_least=floor)
    return {name: result[name] for name in [*one, *sorted(found.keys() - one.keys())]}


def loss_errors(found: list[list[float]], one: list[list[float]]) -> dict[str, float]:
    """Relative error of every loss; not a number where there is no such loss."""
    result = {}
    for step, losses in enumerate(one):
        for i, loss in enumerate(losses):
            mine = found[step][i] if step < len(found) and i < len(found[step]) else float("nan")
            name = f"step {step + 1}" + (f", backward {i + 1}" if len(losses) > 1 else "")
            result[name] = abs(mine - loss) / max(abs(loss), torch.finfo().tiny)
    return result


def allowed(kind: str, precision: Precision, nudged: Mapping[str, float]) -> dict[str, float]:
    """What is allowed of every tensor of a kind: more, where one process by itself makes much of a rounding."""
    least = ALLOWED[precision][kind]
    most = max(least, MOST[precision])
    return {
        name: min(most, max(least, NUDGE * error if error == error else least))
        for name, error in nudged.items()
    }


def swamped(precision: Precision, nudged: Mapping[str, float]) -> frozenset[str]:
    """Tensors of which one process by itself makes so much of a rounding that a large error tells nothing."""
    return frozenset(name for name, error in nudged.items() if NUDGE * error > MOST[precision])


def relative(x: Tensor, one: Tensor, *, at_least: float = 0.0) -> float:
    """Norm of the difference, relative to the norm of `one` or to `at_least`; equal values have none."""
    if x.shape != one.shape:
        return float("inf")
    difference = _norm(x.double() - one.double())
    return difference if difference == 0 else difference / max(_norm(one), at_least, torch.finfo().tiny)


def _norm(x: Tensor) -> float:
    return float(x.double().norm())
