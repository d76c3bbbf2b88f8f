"""Define a placeholder for a parameter that another rank holds: a shape without values that cannot be misused.

A plain tensor on the device "meta" would not do: torch gives numbers that mean nothing for `x @ meta`, and adds nothing
where one is added in place (`loss += meta`). So every operator that reads an absent parameter and a tensor with
values is refused, unless placeholders are being computed (placeholders.py), and what is computed from absent parameters
alone is absent too. To write into one is allowed: whoever holds it does the same.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_amp._torch import FakeTensor, disable_torch_function, tree_leaves, tree_map
from lightning_amp.errors import InstallError


class Absent(Tensor):
    """What is computed from absent parameters."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, if no value is read that is not here."""
        kwargs = kwargs or {}
        with disable_torch_function():
            if _writes_into_absent(func, args):
                return func(*args, **kwargs)
            if _makers:
                # before autocast, which would not cast what is on no device
                plain = func.__name__ == "__get__" and func is not Tensor.device.__get__
                args, kwargs = (args, kwargs) if plain else tree_map(_makers[-1], (args, kwargs))
                return func(*args, **kwargs)
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, Tensor) and not value.is_meta and not isinstance(value, FakeTensor):
                    raise InstallError(_refusal(func, value))
            result = func(*args, **kwargs)
            # a shape would become a tuple
            return result if isinstance(result, torch.Size) else tree_map(_absent, result)


class AbsentParameter(nn.Parameter):
    """One, on the device "meta", in the place of the parameter in its modules."""

    __torch_function__ = Absent.__torch_function__


def absent_parameter(like: nn.Parameter) -> AbsentParameter:
    """The shape of a parameter."""
    values = like.detach().to("meta")
    made = values.as_subclass(AbsentParameter)
    made.requires_grad_(like.requires_grad)
    return made


_makers: list[Callable[[Any], Any]] = []


@contextmanager
def placeholders_are_made(make: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """While it lasts operators may read absent parameters together with values: by `make` these become placeholders."""
    _makers.append(lambda value: make(value) if isinstance(value, Absent | AbsentParameter) else value)
    try:
        yield
    finally:
        _makers.pop()


def _refusal(func: Any, value: Tensor) -> str:
    return (
        f"pipeline: {getattr(func, '__name__', func)!r} reads a parameter that another rank holds, together with a"
        f" tensor of shape {tuple(value.shape)!r}. A stage has the parameters of its blocks, and those outside the"
        " blocks that its first backward pass reached. Read parameters in the modules that own them (for a penalty"
        " on weights use the optimizer's weight_decay), or leave 'pipeline' out"
    )


def _absent(value: Any) -> Any:
    if type(value) is Tensor and value.is_meta:
        return value.as_subclass(Absent)
    return value


def _writes_into_absent(func: Any, args: Any) -> bool:
    name = getattr(func, "__name__", "")
    in_place = name.startswith("__i") or name == "__setitem__" or (name.endswith("_") and name[-2:] != "__")
    return in_place and bool(args) and isinstance(args[0], Absent | AbsentParameter)
