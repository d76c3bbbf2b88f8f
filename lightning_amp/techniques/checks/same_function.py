"""Whether a module computes what a technique would compute in its place: the one probe of all techniques.

A technique replaces a leaf of somebody's module by its own form of it. That is exact only where the leaf is a function
without state and returns, on a small example, what the reference returns. Examples are whole numbers, which are exact
in any order of summation, or float64.

Known limits: what a module does with other numbers than those of the example is not seen.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_amp.errors import InstallError

Values = Mapping[str, Any]
SHOWN = 12
"""Numbers of a tensor that a message spells out."""


def mismatch(
    candidate: Any,
    reference: Values | nn.Module,
    example: Callable[[Any], Values],
    *,
    rtol: float = 0.0,
) -> str:
    """What a candidate does that its replacement would not, as what follows its name; "" if nothing.

    Args:
        candidate: The module to be replaced.
        reference: The values that are right, by name, or a module that computes them.
        example: Runs a module on a small example: what it returns, by name. Two tensors are the same if they have the
            same shape and their difference is at most `rtol` of the reference's norm; all else if it is equal.
        rtol: Relative tolerance; 0 asks for equal numbers.
    """
    if not isinstance(candidate, nn.Module):
        return f"is {shown(candidate)} and no module"
    state = sorted(candidate.state_dict())
    if state:
        return f"has the state {state!r}"
    # a library's warning says nothing of the candidate, also where warnings are errors
    with warnings.catch_warnings(action="ignore"):
        expected = example(reference) if isinstance(reference, nn.Module) else reference
        try:
            found = example(candidate)
        except InstallError:
            raise
        except Exception as error:
            return f"fails on a small example with {failure(error)}"
    for name, right in expected.items():
        if not _same(found[name], right, rtol):
            return f"returns {_difference(name, found[name], right)} for a small example"
    return ""


def shown(value: object) -> str:
    """A value in a message: a layer with its settings, a module of several by its class alone."""
    composed = isinstance(value, nn.Module) and any(True for _ in value.children())
    return repr(type(value).__name__) if composed else repr(value)


def failure(error: Exception) -> str:
    """An error in a message, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _same(found: Any, right: Any, rtol: float) -> bool:
    if not isinstance(right, Tensor):
        return bool(found == right)
    if not isinstance(found, Tensor) or found.shape != right.shape:
        return False
    # not `>`: a NaN is no match
    return torch.equal(found, right) if rtol == 0 else bool((found - right).norm() <= rtol * right.norm())


def _difference(name: str, found: Any, right: Any) -> str:
    what = f"{name} " if name else ""
    if isinstance(found, Tensor) and isinstance(right, Tensor) and right.numel() > SHOWN:
        if found.shape != right.shape:
            return f"{what}of the shape {tuple(found.shape)!r} and not {tuple(right.shape)!r}"
        return f"{what}that differs by up to {(found - right).abs().max().item():.1e}"
    return f"{what}{found!r} and not {right!r}"
