"""Compare the results of two computations; every check of a replacement uses this.

A technique replaces a part of a user's module by another form of it. That is exact only where the part has no state
and returns what the reference returns. Examples are whole numbers, which are exact in any order of summation, or
float64. Modules of the same class and settings are checked once (`found_out`), such as those of 32 strata.

Under `InFloat64` everything is computed in float64, whatever types the code names: a forward that makes a softmax in
float32, or generated code with the types of a capture, then computes the same function without their rounding. Numbers
that Python has written down (`torch.tensor(0.1)`) keep the rounding of their type.

Known limits: what a module does with numbers other than those of the example is not seen.
"""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_amp._torch import TorchDispatchMode, tree_map
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
    scale: float | None = None,
) -> str:
    """What a candidate does that its replacement would not, as what follows its name; "" if nothing.

    Args:
        candidate: The module to be replaced.
        reference: The right values by name, or a module that computes them.
        example: Runs a module on a small example and returns results by name.
        rtol: As of `difference`, as is `scale`.
    """
    if not isinstance(candidate, nn.Module):
        return f"is {shown(candidate)} and no module"
    # a replacement would lose it, or rename it in checkpoints
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
    problem = difference(found, expected, rtol=rtol, scale=scale)
    return f"returns {problem} for a small example" if problem else ""


def difference(
    found: Values, right: Values, *, rtol: float = 0.0, scale: float | None = None, equal_nan: bool = False
) -> str:
    """The first result that differs, with its name; "" if all are the same.

    Args:
        rtol: Largest error of a number, as a share of that number plus `scale`.
        scale: By default the largest finite number of each tensor: one that is zero but for rounding has no scale.
        equal_nan: Whether a NaN is the same as a NaN.
    """
    for name, expected in right.items():
        own = found[name]
        if isinstance(own, Tensor) and isinstance(expected, Tensor):
            if not close(own, expected, rtol=rtol, scale=scale, equal_nan=equal_nan):
                return f"{name} {_in_words(own, expected)}".strip()
        elif own is not expected and (isinstance(own, Tensor) or isinstance(expected, Tensor) or own != expected):
            return f"{name} {_short(own)} and not {_short(expected)}".strip()
    return ""


def close(found: Tensor, right: Tensor, *, rtol: float, scale: float | None = None, equal_nan: bool = False) -> bool:
    """Whether two tensors have the same shape, type and numbers; arguments as of `difference`."""
    if found.shape != right.shape or found.dtype != right.dtype:
        return False
    # the difference of booleans is an error in torch, and that of unsigned numbers wraps around
    if rtol == 0 or not (right.is_floating_point() or right.is_complex()):
        return torch.equal(found, right)
    error = (found - right).abs()
    allowed = rtol * right.abs() + rtol * (largest(right) if scale is None else scale)
    # not `>`: an error that is NaN is one; an infinite number allows any error, and has to be the same
    right_numbers = ((error <= allowed) & right.isfinite()) | (found == right)
    if equal_nan:
        right_numbers |= found.isnan() & right.isnan()
    return bool(right_numbers.all())


def largest(tensor: Tensor) -> float:
    """The largest finite magnitude of a tensor's numbers."""
    found = (tensor if tensor.is_complex() else tensor.double()).detach().abs()
    return float(torch.where(found.isfinite(), found, 0.0).max()) if found.numel() else 0.0


def shown(value: object) -> str:
    """A value in a message: a layer with its settings, a module of several by its class alone."""
    composed = isinstance(value, nn.Module) and any(True for _ in value.children())
    return repr(type(value).__name__) if composed else repr(value)


def failure(error: Exception) -> str:
    """An error in a message, on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _in_words(found: Tensor, right: Tensor) -> str:
    if found.shape != right.shape or found.dtype != right.dtype:
        return f"{_short(found)} and not {_short(right)}"
    if right.numel() <= SHOWN:
        return f"{found!r} and not {right!r}"
    wide = torch.complex128 if right.is_complex() else torch.float64
    error = (found.to(wide) - right.to(wide)).abs().max()
    return f"that differs by up to {float(error):.1e}, where the largest number is {largest(right):.1e}"


def _short(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    return f"of the shape {tuple(value.shape)!r} and {value.dtype}"


Found = TypeVar("Found")

_FOUND: dict[tuple[Any, ...], Any] = {}
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """Attributes of a module that not every module has, without parameters, buffers and children."""
    return {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}


def found_out(module: nn.Module, probe: Callable[[nn.Module], Found]) -> Found:
    """What `probe` returns for a module.

    Args:
        module: Checked every time if it has parameters, buffers, children, or settings that are not plain values: only
            without does its class, with its settings, say what it computes.
        probe: The same object for the same question.
    """
    own = own_attributes(module)
    plain = all(isinstance(value, bool | int | float | str | slice | type | None) for value in own.values())
    if not plain or list(module.children()) or module.state_dict():
        return probe(module)
    # slices cannot be keys
    settings = sorted((name, v if isinstance(v, type) else repr(v)) for name, v in own.items())
    key = probe, type(module), module.training, *settings
    if key not in _FOUND:
        _FOUND[key] = probe(module)
    found: Found = _FOUND[key]
    return found


WIDER = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}


class InFloat64(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Below autograd, so that gradients have 64 bits too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda x: WIDER.get(x, x) if isinstance(x, torch.dtype) else x, (args, kwargs or {}))
        before = torch.get_default_dtype()
        # what is made without a type, or of whole numbers, has the default's
        torch.set_default_dtype(torch.float64)
        try:
            return tree_map(widened, func(*args, **kwargs))
        finally:
            torch.set_default_dtype(before)


def widened(value: Any) -> Any:
    """A tensor of floating point in 64 bits; anything else as it is."""
    return value.to(WIDER[value.dtype]) if isinstance(value, Tensor) and value.dtype in WIDER else value
