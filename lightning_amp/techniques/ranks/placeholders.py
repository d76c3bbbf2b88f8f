"""Define tensors with a shape and without values, for what is computed from parameters of other ranks.

A rank runs the user's full step up to its blocks. What depends on the batch only (targets, masks, positions) is
computed. What reads a parameter of another rank (on the device "meta"), or a placeholder, becomes a placeholder. So a
value that only another rank could compute is never mistaken for a number: an operator raises an error if it would
write a placeholder into a tensor with values, or if its result or control flow depends on the placeholder's values.

Once a rank's blocks run, the mode is off, because it costs time in every operator. Then torch raises an error if
placeholders and values are mixed, and so do absent parameters.

A placeholder reports the run's device, so that tensors created on it (`torch.arange(n, device=x.device)`) have values.

An absent parameter is one that another rank holds. A plain tensor on the device "meta" is not enough: torch returns
meaningless numbers for `x @ meta`, and ignores in-place additions (`loss += meta`). So every operator that reads an
absent parameter and a tensor with values raises an error, unless placeholders are being computed. Results from absent
parameters only are absent too. Writes into an absent parameter are allowed, because the rank that holds it does the
same.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from lightning_amp._torch import (
    FakeTensor,
    SharedFakeMode,
    TorchDispatchMode,
    disable_torch_function,
    has_no_values,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
    unseen,
)
from lightning_amp.errors import InstallError
from lightning_amp.footprint.live_bytes import named_arguments


class Absent(Tensor):
    """Result of operators on absent parameters."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, unless it reads values that are not on this rank."""
        kwargs = kwargs or {}
        with disable_torch_function():
            name = getattr(func, "__name__", "")
            in_place = name.startswith("__i") or name == "__setitem__" or (name.endswith("_") and name[-2:] != "__")
            if in_place and args and isinstance(args[0], Absent | AbsentParameter):
                # writes into an absent parameter, such as those of init, do nothing
                return func(*args, **kwargs)
            if _makers:
                # before autocast, which does not cast tensors on the device meta
                plain = func.__name__ == "__get__" and func is not Tensor.device.__get__
                args, kwargs = (args, kwargs) if plain else tree_map(_makers[-1], (args, kwargs))
                return func(*args, **kwargs)
            for value in tree_leaves((args, kwargs)):
                if isinstance(value, Tensor) and not value.is_meta and not isinstance(value, FakeTensor):
                    raise InstallError(
                        f"pipeline: {getattr(func, '__name__', func)!r} reads a parameter that another rank holds,"
                        f" together with a tensor of shape {tuple(value.shape)!r}. A stage has the parameters of its"
                        " blocks, and those outside the blocks that its first backward pass reached. Read parameters in"
                        " the modules that own them (for a penalty on weights use the optimizer's weight_decay), or"
                        " leave 'pipeline' out"
                    )
            result = func(*args, **kwargs)
            # torch.Size would become a tuple
            return result if isinstance(result, torch.Size) else tree_map(_absent, result)


class AbsentParameter(nn.Parameter):
    """Parameter on the device "meta" that replaces a parameter of another rank in its modules."""

    __torch_function__ = Absent.__torch_function__


def absent_parameter(like: nn.Parameter) -> AbsentParameter:
    """Make an absent parameter with the shape of a parameter."""
    values = like.detach().to("meta")
    made = values.as_subclass(AbsentParameter)
    made.requires_grad_(like.requires_grad)
    return made


class NeedsValuesError(InstallError):
    """An operator cannot be computed on placeholders."""


WHY = {
    "DynamicOutputShapeException": ", on which the shape of its result depends",
    "DataDependentOutputException": ", which it would hand to Python",
}
"""For types of torch's errors, why an operator needs values."""
UNIFORM = (torch.ops.aten.rand.default, torch.ops.aten.rand.generator)
"""Operators that draw numbers in [0, 1)."""
BELOW: dict[Any, bool] = {
    torch.ops.aten.lt.Scalar: True,
    torch.ops.aten.le.Scalar: True,
    torch.ops.aten.gt.Scalar: False,
    torch.ops.aten.ge.Scalar: False,
}
"""Comparisons with a number, and their result for smaller numbers."""
_makers: list[Callable[[Any], Any]] = []
"""If not empty, operators may read absent parameters together with values: the last function makes placeholders."""


def _absent(value: Any) -> Any:
    if type(value) is Tensor and value.is_meta:
        return value.as_subclass(Absent)
    return value


def without_values(values: Any) -> Iterator[Tensor]:
    """Yield the placeholders in nested containers."""
    return (leaf for leaf in tree_leaves(values) if has_no_values(leaf))


class Placeholders(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode in which operators that read a tensor without values return placeholders.

    A draw without values does not advance this rank's random state, and a draw in a block of another rank happens here
    only the first time. After that the random state differs between ranks, so later draws return placeholders too.

    Args:
        device: Device of the run, which placeholders report.

    Attributes:
        device: As given.
        missed: Number of such draws since the mode is on.
        in_block: Whether a block of another rank runs.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device, self._fake, self.missed = device, SharedFakeMode(), 0
        self.in_block = False
        # the parameter is kept, so that its id is not reused
        self._absent: dict[int, tuple[Tensor, Tensor]] = {}
        self._uniform: Tensor | None = None

    def __enter__(self) -> "Placeholders":
        """Allow reads of absent parameters together with values."""
        self.missed, self.in_block, self._uniform = 0, False, None
        _makers.append(lambda value: self.of(value) if isinstance(value, Absent | AbsentParameter) else value)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """Disallow such reads again."""
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        _makers.pop()

    def of(self, value: Any) -> Any:
        """Return the placeholder of a tensor; anything else is returned unchanged."""
        if not isinstance(value, Tensor) or isinstance(value, FakeTensor):
            return value
        if not value.is_meta:
            return self._like(value)
        if id(value) not in self._absent:
            self._absent[id(value)] = (value, self._like(value))
        return self._absent[id(value)][1]

    def _like(self, value: Tensor) -> Tensor:
        # a validation under torch.inference_mode may create it, and a training step save it for its backward pass
        with torch.inference_mode(False):
            if value.layout is not torch.strided:
                # a copy, which is not an inference tensor
                return self._fake.from_tensor(value.detach().clone())
            # meters count memory, which a placeholder does not take
            with unseen(), self._fake:
                return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=self.device)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator on values if all inputs have some, otherwise on placeholders."""
        kwargs = kwargs or {}
        # valid for the next operator only, because any other operator may write into it
        uniform, self._uniform = self._uniform, None
        if uniform is not None and args and args[0] is uniform and (found := _decided(func, args[1:])) is not None:
            return torch.full(uniform.shape, found, device=self.device)
        flat, form = tree_flatten((args, kwargs))
        draws, without = _draws(func, args, kwargs), any(map(has_no_values, flat))
        self.missed += draws and (without or self.in_block)
        if not without and (self.in_block or not (draws and self.missed)):
            return func(*args, **kwargs)
        _refuse_writing(func, args, kwargs)
        args, kwargs = tree_unflatten([self.of(value) for value in flat], form)
        try:
            with unseen(), self._fake:
                made = func(*args, **kwargs)
        except Exception as error:
            raise NeedsValuesError(
                f"pipeline: the operator {func.name()!r} needs values that another rank computed"
                f"{WHY.get(type(error).__name__, f': {error}')}. Before its blocks a rank has only the batch and the"
                " parameters outside the blocks: compute it inside a block, or leave 'pipeline' out"
            ) from error
        # torch returns drawn tensors detached
        same = func is torch.ops.aten.detach.default and args[0] is uniform
        self._uniform = made if same or func in UNIFORM else None
        return made


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operator draws random numbers: attention has the tag also without dropout."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    given = named_arguments(func, args, kwargs)
    never = given.get("dropout_p", given.get("dropout")) == 0, given.get("train", given.get("training")) is False
    return not any(never)


def _decided(func: Any, bound: Any) -> bool | None:
    """Result of comparing any number in [0, 1) with a bound; None if it depends on the number."""
    below = BELOW.get(func)
    if below is None:
        return None
    if bound[0] >= 1:
        return below
    # 0 itself may be drawn
    zero_too = func in (torch.ops.aten.lt.Scalar, torch.ops.aten.ge.Scalar)
    return not below if bound[0] < 0 or (zero_too and bound[0] == 0) else None


def _refuse_writing(func: Any, args: Any, kwargs: Any) -> None:
    """Raise if a placeholder would be written into a tensor with values, which would be lost silently."""
    for index, argument in enumerate(func._schema.arguments):
        written = argument.alias_info is not None and argument.alias_info.is_write
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        if written and any(isinstance(leaf, Tensor) and not has_no_values(leaf) for leaf in tree_leaves(value)):
            raise InstallError(
                f"pipeline: the operator {func.name()!r} writes a value of another rank into a tensor of this rank,"
                " whose values would be wrong; use an operator that does not write in place (torch.cat,"
                " torch.where), or leave 'pipeline' out"
            )
