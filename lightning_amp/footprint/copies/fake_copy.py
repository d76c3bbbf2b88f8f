"""Copy a module and a batch to fake tensors, which have shapes and no values.

The module is copied with its tensors replaced, so its parameters are never held twice. It is built before the fake mode
is entered: a module that is constructed or copied under the mode may keep a reference to the mode.

`copy.deepcopy` shares functions. One that a module holds, as a hook or an attribute, may have closed over the module
itself, and would run on the module that trains: it is copied too, with what it has closed over.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import partial
from types import CellType, FunctionType, ModuleType
from typing import Any, TypeVar, cast

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_amp._torch import FakeTensor, FakeTensorMode, has_no_values
from lightning_amp.data.batch import tensors_in
from lightning_amp.errors import ModelError
from lightning_amp.footprint.copies.as_before import apart, contents, is_of_user
from lightning_amp.footprint.copies.known_values import give_values, numbers_may_be_taken

M = TypeVar("M", bound=nn.Module)
DATA = (Dataset, DataLoader, LightningDataModule)
"""Attributes of a module that a copy of it shares."""
SHARED = (*DATA, np.ndarray, ModuleType, type)
"""What a copied function shares with the function that it is a copy of."""


def copy_of(module: M, fake: FakeTensorMode | None) -> M:
    """A copy without a Trainer; its tensors are fake if a mode is given.

    Raises:
        ModelError: Something in the module cannot be copied.
    """
    memo: dict[int, Any] = {}
    for child in module.modules():
        # a Trainer holds loaders, loggers and process groups
        for key in ("_trainer", "_fabric"):
            attached = vars(child).get(key)
            if attached is not None:
                memo[id(attached)] = _NOTHING
        # data are not part of a step, and may be larger than the module
        memo |= {id(value): value for value in vars(child).values() if isinstance(value, DATA)}
        # what it has computed of parameters, as torch's older weight_norm does, which deepcopy refuses
        computed = [v for v in vars(child).values() if isinstance(v, Tensor) and v.grad_fn is not None]
        memo |= {id(v): v.detach() if fake is None else fake_tensor(v.detach(), fake) for v in computed}
        if fake is not None:
            for tensor in (*child._parameters.values(), *child._buffers.values()):
                if tensor is None:
                    continue
                memo[id(tensor)] = found = fake_tensor(tensor, fake)
                # not those of parameters: every step changes them, so that nothing may be decided by their values
                if not (isinstance(tensor, nn.Parameter) or has_no_values(tensor)):
                    give_values(found, tensor)
    try:
        _copy_functions([*module.modules()], memo)
        twin = copy.deepcopy(module, memo)
    except Exception as error:
        raise ModelError(
            f"cannot profile {type(module).__name__!r}, which cannot be copied: {error!r}; a profile runs a"
            " step on a copy, so that the module stays as it is; take what cannot be copied out of its"
            " attributes"
        ) from error
    for child, own in zip(twin.modules(), module.modules(), strict=True):
        if own._compiled_call_impl is not None:
            # still known as compiled; a copy has lost it, or, of a LightningModule, would call the original
            child._compiled_call_impl = child._call_impl
        for key in ("_trainer", "_fabric"):
            if vars(child).get(key) is _NOTHING:
                vars(child)[key] = None
        if vars(child).get("_metric_attributes") is not None:
            # Lightning knows logged metrics by their ids, of a module that trains
            vars(child)["_metric_attributes"] = None
    return twin


def copy_of_data(
    data: LightningDataModule | None, module: nn.Module, twin: nn.Module, fake: FakeTensorMode | None
) -> LightningDataModule | None:
    """The data module that a copied module finds: a copy in what it remembers, with copies of modules; data are shared.

    Args:
        data: Of the run.
        module, twin, fake: As of `copy_of`, and the copy.
    """
    if data is None:
        return None
    found = copy.copy(data)
    memo: dict[int, Any] = {id(module): twin, id(data): found}
    _copy_functions([data], memo)
    for name, value in vars(data).items():
        if isinstance(value, nn.Module) and id(value) not in memo:
            memo[id(value)] = copy_of(value, fake)
        vars(found)[name] = apart(value, memo)
    return found


def _copy_functions(owners: Sequence[Any], memo: dict[int, Any]) -> None:
    """Put into a memo copies of the functions that some objects hold and that hold something themselves."""
    cells: dict[int, tuple[CellType, CellType]] = {}
    copies: list[tuple[FunctionType, FunctionType]] = []
    waiting: list[Any] = [value for owner in owners for value in vars(owner).values()]
    seen = set[int]()
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict | list | tuple):
            # once: a list may hold itself
            waiting += () if id(value) in seen else value.values() if isinstance(value, dict) else value
            seen.add(id(value))
        elif isinstance(value, partial):
            waiting += [value.func, *value.args]
        elif holds_something(value) and id(value) not in memo:
            # empty cells first: functions may have closed over each other, or over themselves
            own = value.__closure__ or ()
            cells.update({id(cell): (CellType(), cell) for cell in own if id(cell) not in cells})
            closure = tuple(cells[id(cell)][0] for cell in own)
            twin = FunctionType(value.__code__, value.__globals__, value.__name__, None, closure)
            memo[id(value)] = twin
            copies.append((twin, value))
            waiting += [content for cell in own for content in contents(cell)]
    # only now, for what one has closed over may hold others
    copied = partial(_copied, memo=memo, own=set(map(id, owners)))
    for new, cell in cells.values():
        for content in contents(cell):
            new.cell_contents = copied(content)
    for twin, value in copies:
        vars(twin).update(vars(value))
        twin.__defaults__ = value.__defaults__ and tuple(map(copied, value.__defaults__))
        twin.__kwdefaults__ = {name: copied(given) for name, given in (value.__kwdefaults__ or {}).items()}


def holds_something(value: Any) -> bool:
    """Whether a value is a function of the user's that has closed over something, or has defaults."""
    return (
        isinstance(value, FunctionType)
        and bool(value.__closure__ or value.__defaults__ or value.__kwdefaults__)
        and is_of_user(value)
    )


def _copied(value: Any, *, memo: dict[int, Any], own: set[int]) -> Any:
    """What a copied function holds: copies of the module's parts and of small things, and all else itself."""
    if isinstance(value, SHARED) or (isinstance(value, nn.Module | Tensor) and id(value) not in own | memo.keys()):
        return value
    try:
        return copy.deepcopy(value, memo)
    except Exception:
        return value


_NOTHING = object()
"""Stands for a Trainer while a module is copied: None would not do, which a memo takes for no entry."""


def make_fake(module: nn.Module, fake: FakeTensorMode) -> None:
    """Replace the tensors that a module has made for itself since it was copied."""
    for child in module.modules():
        for own in (child._parameters, child._buffers):
            for name, tensor in own.items():
                if tensor is not None and not isinstance(tensor, FakeTensor):
                    cast(dict[str, Any], own)[name] = fake_tensor(tensor, fake)


@contextmanager
def without_values() -> Iterator[None]:
    """Let code copy tensors, and take numbers out of them, while a fake mode is on.

    torch's own way of copying takes the bytes of a storage, which has none then: it writes where no memory was given
    to it. Numbers are those of `known_values.py`.
    """
    before = Tensor.__deepcopy__
    Tensor.__deepcopy__ = _copy_of_tensor  # type: ignore[method-assign]
    try:
        with numbers_may_be_taken():
            yield
    finally:
        Tensor.__deepcopy__ = before  # type: ignore[method-assign]


def _copy_of_tensor(tensor: Tensor, memo: dict[int, Any]) -> Any:
    if id(tensor) not in memo:
        memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    return memo[id(tensor)]


def fake_tensor(tensor: Tensor, fake: FakeTensorMode) -> Tensor:
    """A fake tensor on the same device; on the CPU where this one is on the device "meta"."""
    if has_no_values(tensor):
        device = "cpu" if tensor.is_meta else tensor.device
        with fake:
            found = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        found.requires_grad_(tensor.requires_grad)
        if isinstance(tensor, nn.Parameter):
            found = nn.Parameter(found, tensor.requires_grad)
    else:
        found = fake.from_tensor(tensor)
        found.grad = None
    if isinstance(tensor, nn.Parameter):
        # marks that libraries put on parameters
        vars(found).update(vars(tensor))
    return found


def length_of(batch: Any) -> int | None:
    """The length of the first dimension that more than half of a batch's tensors have; None where there is none."""
    found = [tensor.shape[0] for tensor in tensors_in(batch) if tensor.dim()]
    return next((length for length in set(found) if 2 * found.count(length) > len(found)), None)


def resize(batch: Any, batch_size: int) -> Any:
    """The batch with other tensors in the place of those whose first dimension is the batch's.

    Its rows are repeated, for a step that needs values; `fake_batch` does the same without values.
    """
    length = length_of(batch)

    def longer(tensor: Tensor) -> Tensor:
        if not tensor.dim() or tensor.shape[0] != length or tensor.is_meta:
            return tensor
        return tensor[torch.arange(batch_size, device=tensor.device) % length]

    return _map(batch, longer)


def cloned(batch: Any) -> Any:
    """The batch with copies of its tensors, for a step with values that may write into them."""
    return _map(batch, Tensor.clone)


def fake_batch(batch: Any, fake: FakeTensorMode, batch_size: int | None) -> Any:
    """The batch as fake tensors, of another length if one is given."""
    length = length_of(batch)

    def as_fake(tensor: Tensor) -> Tensor:
        found = fake_tensor(tensor, fake)
        if batch_size is None or not tensor.dim() or tensor.shape[0] != length:
            return found
        with fake:
            return found.new_empty((batch_size, *tensor.shape[1:]))

    return _map(batch, as_fake)


def _map(values: Any, change: Any) -> Any:
    """Any nesting of the containers of a batch, with its tensors changed."""
    if isinstance(values, Tensor):
        return change(values)
    if isinstance(values, Mapping):
        changed = copy.copy(values)
        for key in values:
            changed[key] = _map(values[key], change)  # type: ignore[index]
        return changed
    if isinstance(values, tuple) and hasattr(values, "_fields"):
        return type(values)(*(_map(value, change) for value in values))
    if isinstance(values, list | tuple):
        return type(values)(_map(value, change) for value in values)
    if is_dataclass(values) and not isinstance(values, type):
        return replace(values, **{f.name: _map(getattr(values, f.name), change) for f in fields(values) if f.init})
    return values
