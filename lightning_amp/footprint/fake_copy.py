"""A copy of a module and of a batch whose tensors have shapes and no values.

The module is copied with its tensors replaced, so its parameters are never held twice. It is built before the fake mode
is entered: a module that is constructed or copied under the mode may keep a reference to the mode.
"""

import copy
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, cast

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, Dataset

from lightning_amp._torch import FakeTensor, FakeTensorMode
from lightning_amp.data.batch_parts import tensors_in
from lightning_amp.errors import ModelError

M = TypeVar("M", bound=nn.Module)
DATA = (Dataset, DataLoader, LightningDataModule)
"""Attributes of a module that a copy of it shares."""


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
        if fake is not None:
            for tensor in _own_tensors(child):
                memo[id(tensor)] = fake_tensor(tensor, fake)
    try:
        twin = copy.deepcopy(module, memo)
    except Exception as error:
        raise ModelError(
            f"a profile was asked for of {type(module).__name__!r}, which cannot be copied: {error!r}; a profile runs"
            " a step on a copy, so that the module stays as it is; take what cannot be copied out of its attributes"
        ) from error
    for child in twin.modules():
        for key in ("_trainer", "_fabric"):
            if vars(child).get(key) is _NOTHING:
                vars(child)[key] = None
        if vars(child).get("_metric_attributes") is not None:
            # Lightning knows logged metrics by their ids, of a module that trains
            vars(child)["_metric_attributes"] = None
    return twin


class _Nothing:
    """Stands for a Trainer while a module is copied: None would not do, which a memo takes for no entry."""


_NOTHING = _Nothing()


def make_fake(module: nn.Module, fake: FakeTensorMode) -> None:
    """Replace the tensors that a module has made for itself since it was copied."""
    for child in module.modules():
        for own in (child._parameters, child._buffers):
            for name, tensor in own.items():
                if tensor is not None and not isinstance(tensor, FakeTensor):
                    cast(dict[str, Any], own)[name] = fake_tensor(tensor, fake)


class CopyFakes(TorchFunctionMode):
    """Lets `copy.deepcopy` copy tensors while a fake mode is on.

    torch's own way copies the bytes of a storage, which has none then: it writes where no memory was given to it.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        if id(tensor) not in memo:
            memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return memo[id(tensor)]


def fake_tensor(tensor: Tensor, fake: FakeTensorMode) -> Tensor:
    """A fake tensor on the same device; on the CPU where this one is on the device "meta"."""
    if isinstance(tensor, FakeTensor) or tensor.is_meta:
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
    """The length of the first dimension that most tensors of a batch have; None where no tensor has a dimension."""
    found = [tensor.shape[0] for tensor in tensors_in(batch) if tensor.dim()]
    return max(sorted(set(found)), key=found.count) if found else None


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
        return replace(
            values, **{f.name: _map(getattr(values, f.name), change) for f in fields(values) if f.init}
        )
    return values


def _own_tensors(module: nn.Module) -> list[Tensor]:
    own = [*module._parameters.values(), *module._buffers.values()]
    return [tensor for tensor in own if tensor is not None]
