"""Check that a likelihood is that of zero-inflated negative binomial counts, in value and gradients, for `sparse`.

The likelihood, called as leaf(x, log_mu, log_theta, zi_logits), and ours are compared on two examples in float64: one
with usual numbers, and one with extreme numbers of training, where clamps, and constants added to a mean, show. Two
settings are measured: the constant that is added to the probability of a zero, and which counts raise an error.

Torch's distributions validate their arguments by default. Any import may turn that off for the whole process;
`torch.compile` does when it is first used. The result must not depend on that, so both cases are tested.

Known limit: differences for other numbers than those of the examples are not detected.
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
from lightning_amp.techniques.checks.same_function import mismatch, outcome

ARGUMENTS = ("x", "log_mu", "log_theta", "zi_logits")
RTOL = 1e-9
CELLS = 3
IMPOSSIBLE = 20.0, 8.0, -1000.0
"""log_mu, log_theta and zi_logits for which the probability of a zero underflows to 0."""
Whole = tuple[bool, bool]
"""Whether fractional counts raise an error: without, and with validation of torch's distributions."""


class _ExampleCounts(NamedTuple):
    """Counts of CELLS cells, and the first and the last value of every argument, with linear steps between them."""

    x: tuple[float, ...]
    log_mu: tuple[float, float]
    log_theta: tuple[float, float]
    zi: tuple[float, float]


EXAMPLES = (
    _ExampleCounts((0, 1, 0, 7, 2, 0, 0, 0, 0, 0, 3.5, 1), log_mu=(-2, 1), log_theta=(1, -2), zi=(-0.9, 0.8)),
    _ExampleCounts((1, 0, 3, 0, 0, 20, 0, 500, 4e3, 0, 0, 1e5), log_mu=(-40, 20), log_theta=(8, -8), zi=(-15, 15)),
)


def likelihood_settings(leaf: nn.Module) -> tuple[float, Whole]:
    """Return what a likelihood adds to the probability of a zero, and which counts it refuses; (0, none) on failure."""
    try:
        with checking_values(False), warnings.catch_warnings(action="ignore"):
            least = float(_of_impossible(leaf, 0.0).exp())
        # rounded to the constant in the code, such as 1e-8: logarithm and exponential keep at least twelve digits
        return float(f"{least:.12g}"), (_refuses_halves(leaf, False), _refuses_halves(leaf, True))
    except Exception:
        # `likelihood_problem` repeats the call, and describes the failure
        return 0.0, (False, False)


def likelihood_problem(leaf: nn.Module, ours: nn.Module, *, whole: Whole) -> str:
    """Describe how a likelihood differs from ours with its settings, as what follows its name; "" if it does not."""
    parameters = inspect.signature(leaf.forward)
    try:
        parameters.bind(*ARGUMENTS)
    except TypeError:
        return f"takes {list(parameters.parameters)!r}, where counts with many zeros have {list(ARGUMENTS)!r}"
    # tables have one row for all cells, or one for each cell
    for checked, one, rows in product((False, True), EXAMPLES, (1, CELLS)):
        example = partial(_values, example=one, rows=rows, whole=whole[checked])
        with checking_values(checked):
            # magnitudes differ widely, so that the largest number is no scale for the others
            problem = mismatch(leaf, ours, example, rtol=RTOL, scale=1.0)
        if problem:
            return problem
    return ""


def _values(leaf: nn.Module, *, example: _ExampleCounts, rows: int, whole: bool) -> dict[str, Tensor | None]:
    """Return value and gradients for an example, with `rows` rows in its tables, and only whole counts if `whole`."""
    x = torch.tensor(example.x, dtype=torch.float64, device="cpu").view(CELLS, -1)
    # one count of the first example is a fraction, for which some likelihoods raise
    x = x.ceil() if whole else x
    given = {
        name: torch.linspace(*ends, n * x.shape[1], dtype=torch.float64, device="cpu").view(n, -1)
        for name, ends, n in zip(
            ARGUMENTS[1:], (example.log_mu, example.log_theta, example.zi), (CELLS, rows, rows), strict=True
        )
    }
    leaves = {name: tensor.requires_grad_() for name, tensor in given.items()}
    with torch.enable_grad():
        return outcome({"value": leaf(x, *leaves.values())}, leaves, torch.Generator().manual_seed(0))


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
    """Context manager: turn validation of torch's distributions on or off, in all threads."""
    before = values_are_checked()
    Distribution.set_default_validate_args(wanted)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)
