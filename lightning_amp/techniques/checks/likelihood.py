"""Check that a likelihood is that of zero-inflated negative binomial counts, in value and gradients, for `sparse`.

It is called as leaf(x, log_mu, log_theta, zi_logits) on two examples, in float64, and so is ours: one with usual
numbers, and one with numbers as far apart as training may meet, where clamps, and what is added to a mean, show. Two
settings are found by trying: what is added to the probability of a zero, and which counts are refused.

Torch's distributions check the values that they are given, unless this is turned off for the whole process, which any
import may do: `torch.compile` does when it is first used. What a likelihood is must not depend on that, so that it is
tried with and without.

Known limit: what a likelihood does with other numbers than those of the examples is not seen.
"""

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from lightning_amp._torch import values_are_checked
from lightning_amp.techniques.checks.same_function import mismatch

ARGUMENTS = ("x", "log_mu", "log_theta", "zi_logits")
RTOL = 1e-9
CELLS = 3
IMPOSSIBLE = 20.0, 8.0, -1000.0
"""log_mu, log_theta and zi_logits for which exp says that a zero has no probability."""
Whole = tuple[bool, bool]
"""Whether counts that are no whole numbers are refused, while torch's distributions do not check values, and while
they do."""


class _ExampleCounts(NamedTuple):
    """Counts of CELLS cells, and the first and the last number of every argument, between which the others lie."""

    x: tuple[float, ...]
    log_mu: tuple[float, float]
    log_theta: tuple[float, float]
    zi: tuple[float, float]


EXAMPLES = (
    _ExampleCounts((0, 1, 0, 7, 2, 0, 0, 0, 0, 0, 3.5, 1), log_mu=(-2, 1), log_theta=(1, -2), zi=(-0.9, 0.8)),
    _ExampleCounts((1, 0, 3, 0, 0, 20, 0, 500, 4e3, 0, 0, 1e5), log_mu=(-40, 20), log_theta=(8, -8), zi=(-15, 15)),
)


def likelihood_settings(leaf: nn.Module) -> tuple[float, Whole]:
    """What a likelihood adds to the probability of a zero, and which counts it refuses; of any other 0 and none."""
    try:
        with checking_values(False), warnings.catch_warnings(action="ignore"):
            least = float(_of_impossible(leaf, 0.0).exp())
        # to the number that was written down, such as 1e-8, of which logarithm and exponential leave twelve digits or
        # more
        return float(f"{least:.12g}"), (_refuses_halves(leaf, False), _refuses_halves(leaf, True))
    except Exception:
        # whatever has failed: `likelihood_problem` tries again, and says what it is
        return 0.0, (False, False)


def likelihood_problem(leaf: nn.Module, ours: nn.Module, *, whole: Whole) -> str:
    """What a likelihood does that ours, with its settings, does not, as what follows its name; "" if nothing."""
    parameters = inspect.signature(leaf.forward)
    try:
        parameters.bind(*ARGUMENTS)
    except TypeError:
        return f"takes {list(parameters.parameters)!r}, where counts with many zeros have {list(ARGUMENTS)!r}"
    for checked, one, rows in product((False, True), EXAMPLES, (1, CELLS)):
        example = partial(_values, example=one, rows=rows, whole=whole[checked])
        with checking_values(checked):
            # numbers are far apart, so that the largest one is no scale for the others
            problem = mismatch(leaf, ours, example, rtol=RTOL, scale=1.0)
        if problem:
            return problem
    return ""


def _values(leaf: nn.Module, *, example: _ExampleCounts, rows: int, whole: bool) -> dict[str, Tensor]:
    """Value and gradients for an example with that many rows in its tables, and perhaps whole counts alone."""
    x = torch.tensor(example.x, dtype=torch.float64, device="cpu").view(CELLS, -1)
    # one count of the first example is a fraction, which some refuse
    x = x.ceil() if whole else x
    given = {
        name: torch.linspace(*ends, n * x.shape[1], dtype=torch.float64, device="cpu").view(n, -1)
        for name, ends, n in zip(
            ARGUMENTS[1:], (example.log_mu, example.log_theta, example.zi), (CELLS, rows, rows), strict=True
        )
    }
    leaves = [tensor.requires_grad_() for tensor in given.values()]
    with torch.enable_grad():
        value = leaf(x, *leaves)
        grads = torch.autograd.grad(value, leaves)
    return {"value": value.detach()} | {f"gradient of {n}": g for n, g in zip(given, grads, strict=True)}


@torch.no_grad()
def _of_impossible(leaf: nn.Module, count: float) -> Tensor:
    given = [torch.full((1, 1), value, dtype=torch.float64, device="cpu") for value in (count, *IMPOSSIBLE)]
    found: Tensor = leaf(*given)
    return found


def _refuses_halves(leaf: nn.Module, checked: bool) -> bool:
    try:
        with checking_values(checked), warnings.catch_warnings(action="ignore"):
            _of_impossible(leaf, 0.5)
    except ValueError:
        return True
    return False


@contextmanager
def checking_values(wanted: bool) -> Iterator[None]:
    """Let torch's distributions check values, or not; in all threads."""
    before = values_are_checked()
    Distribution.set_default_validate_args(wanted)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)
