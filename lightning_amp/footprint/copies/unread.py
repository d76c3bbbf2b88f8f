"""Return placeholders from `item()` of tensors without values; they raise where code decides something by one.

A step that appends `loss.item()` to a list, or logs `correct.item() / n`, takes as many bytes whatever the number is.
So `item()` of a fake tensor is a number to compute with and to print, and every comparison and every use as a length
raises. Known limit: numpy and `torch.tensor` make a plain 1 of it, and what is decided by that is not noticed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import Tensor

from lightning_amp._torch import FakeTensor
from lightning_amp.footprint.copies.known_values import DataDependent, recipe_of


class _Unread:
    """Arithmetic gives further unknown numbers, and all that needs the value raises."""

    def _number(self, *others: Any) -> Any:
        return UnreadFloat() if isinstance(self, float) or any(isinstance(x, float) for x in others) else UnreadInt()

    def _ratio(self, *others: Any) -> Any:
        return UnreadFloat()

    def _needs_value(self, *others: Any) -> NoReturn:
        raise DataDependent("a number from .item() decides what is computed")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = __pos__ = __abs__ = _number
    __truediv__ = __rtruediv__ = __pow__ = __rpow__ = _ratio
    __bool__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __hash__ = _needs_value
    __int__ = __index__ = __float__ = __round__ = __trunc__ = __floor__ = __ceil__ = _needs_value
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __divmod__ = __rdivmod__ = _needs_value
    is_integer = as_integer_ratio = hex = _needs_value

    def __repr__(self) -> str:
        return "unread"

    def __format__(self, spec: str) -> str:
        return "unread"


class UnreadFloat(_Unread, float):
    """Loggers and torch take it for a float; torch gets a 1, which is neither zero, nor infinite, nor not a number."""

    def __new__(cls) -> "UnreadFloat":  # noqa: D102
        return super().__new__(cls, 1.0)

    def __reduce__(self) -> Any:
        return UnreadFloat, ()


class UnreadInt(_Unread):
    """No number for torch: it might be a length."""


@contextmanager
def numbers_may_be_taken() -> Iterator[None]:
    """Let `item()` of fake tensors give numbers while a step is counted."""
    usual = FakeTensor.item

    def item(tensor: FakeTensor) -> Any:
        if tensor.numel() != 1 or tensor.is_complex() or recipe_of(tensor) is not None:
            return usual(tensor)
        return UnreadFloat() if tensor.is_floating_point() else UnreadInt()

    FakeTensor.item = item  # type: ignore[assignment]
    try:
        yield
    finally:
        if usual is Tensor.item:
            del FakeTensor.item
        else:
            FakeTensor.item = usual  # type: ignore[method-assign]
