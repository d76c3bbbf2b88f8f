"""Compare the results of two computations; all checks of replacements use this.

A technique replaces a part of a user's module by another implementation. That is exact only if the part has no state
and returns what the reference returns. Examples are whole numbers, which are exact in any order of summation, or
float64. Modules of the same class and settings, such as those of 32 strata, are checked once (`found_out`).

Under `InFloat64` everything is computed in float64, whatever dtypes the code names: code that computes a softmax in
float32, or generated code with captured dtypes, then computes the same function without rounding. Python constants that
were converted before (`torch.tensor(0.1)`) keep the rounding of their dtype.

Known limits: differences for other numbers than those of the example are not detected.
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
"""Most elements of a tensor that a message prints."""


def mismatch(
    candidate: Any,
    reference: Values | nn.Module,
    example: Callable[[Any], Values],
    *,
    rtol: float = 0.0,
    scale: float | None = None,
) -> str:
    """Describe how a candidate differs from its replacement, as what follows its name in a message; "" if it does not.

    Args:
        candidate: The module to be replaced.
        reference: The expected values by name, or a module that computes them.
        example: Runs a module on a small example and returns results by name.
        rtol, scale: As in `difference`.
    """
    if not isinstance(candidate, nn.Module):
        return f"is {shown(candidate)} and no module"
    # a replacement would lose the state, or rename it in checkpoints
    state = sorted(candidate.state_dict())
    if state:
        return f"has the state {state!r}"
    # warnings of libraries are ignored, also where the user turns warnings into errors
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
    """Describe the first result that differs, with its name; "" if all are equal.

    Args:
        found, right: Results, and expected results, by name.
        rtol: Largest error of a number, relative to that number plus `scale`.
        scale: By default the largest finite number of each tensor, so that zeros with rounding errors are accepted.
        equal_nan: Whether NaN equals NaN.
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
    """Whether two tensors have the same shape, dtype and numbers; arguments as in `difference`."""
    if found.shape != right.shape or found.dtype != right.dtype:
        return False
    # torch cannot subtract booleans, and differences of unsigned numbers wrap around
    if rtol == 0 or not (right.is_floating_point() or right.is_complex()):
        return torch.equal(found, right)
    error = (found - right).abs()
    allowed = rtol * right.abs() + rtol * (largest(right) if scale is None else scale)
    # not `>`: an error of NaN is an error; for an infinite number any error would be allowed, so it must be equal
    right_numbers = ((error <= allowed) & right.isfinite()) | (found == right)
    if equal_nan:
        right_numbers |= found.isnan() & right.isnan()
    return bool(right_numbers.all())


def largest(tensor: Tensor) -> float:
    """Return the largest finite magnitude in a tensor."""
    found = (tensor if tensor.is_complex() else tensor.double()).detach().abs()
    return float(torch.where(found.isfinite(), found, 0.0).max()) if found.numel() else 0.0


def shown(value: object) -> str:
    """Format a value for a message: a layer with its settings, a module with children by its class name."""
    composed = isinstance(value, nn.Module) and any(True for _ in value.children())
    return repr(type(value).__name__) if composed else repr(value)


def failure(error: Exception) -> str:
    """Format an error for a message, on one line."""
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


def outcome(
    results: Mapping[str, Tensor], leaves: Mapping[str, Tensor], generator: torch.Generator | None = None
) -> dict[str, Tensor | None]:
    """Return results by name, and the gradients of the leaves for random gradients of the results.

    The gradient of a leaf on which no result depends is None.

    Args:
        results, leaves: By name; a gradient has the name "gradient of" its leaf.
        generator: Draws the gradients of the results; by default torch's own, so that one draw more or less in the
            computation shows.
    """
    found: dict[str, Tensor | None] = {name: result.detach() for name, result in results.items()}
    learned = [result for result in results.values() if result.requires_grad]
    if learned and leaves:
        given = [torch.randn(r.shape, dtype=r.dtype, generator=generator).to(r.device) for r in learned]
        grads = torch.autograd.grad(learned, [*leaves.values()], given, allow_unused=True)
        found |= {f"gradient of {name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return found


Found = TypeVar("Found")

_FOUND: dict[tuple[Any, ...], Any] = {}
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """Attributes of a module that not every module has, without parameters, buffers and children."""
    return {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}


def found_out(module: nn.Module, probe: Callable[[nn.Module], Found]) -> Found:
    """Return `probe(module)`, cached for modules with equal class and settings.

    Args:
        module: Not cached if it has parameters, buffers, children, or settings that are not plain values: only without
            these do class and settings determine what it computes.
        probe: Part of the cache key, so it must be the same object in every call.
    """
    own = own_attributes(module)
    plain = all(isinstance(value, bool | int | float | str | slice | type | None) for value in own.values())
    if not plain or list(module.children()) or module.state_dict():
        return probe(module)
    # slices are not hashable
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
    """Mode that computes in float64; below autograd, so that gradients are float64 too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map(lambda x: WIDER.get(x, x) if isinstance(x, torch.dtype) else x, (args, kwargs or {}))
        before = torch.get_default_dtype()
        # tensors without a given dtype, or results from integers, have the default dtype
        torch.set_default_dtype(torch.float64)
        try:
            return tree_map(widened, func(*args, **kwargs))
        finally:
            torch.set_default_dtype(before)


def widened(value: Any) -> Any:
    """Convert a floating-point tensor to 64 bits; anything else is returned unchanged."""
    return value.to(WIDER[value.dtype]) if isinstance(value, Tensor) and value.dtype in WIDER else value
