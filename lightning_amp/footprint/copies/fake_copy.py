"""Copy a module and a batch to fake tensors, which have shapes and no values.

The module is copied with its tensors replaced, so its parameters are never held twice. It is built before the fake mode
is entered: a module that is constructed or copied under the mode may keep a reference to the mode.

`copy.deepcopy` shares functions and weak references. A function that a module holds, as a hook, a method or an
attribute, may have closed over the module itself, and would run on the module that trains: it is copied too, with what
it has closed over. So are weak references to modules that are direct attributes of modules.
"""

import copy
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass, replace
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar, cast
from weakref import ReferenceType, ref

import numpy as np
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric, MetricCollection
from torchmetrics.aggregation import BaseAggregator

from lightning_amp._torch import FakeTensor, FakeTensorMode, has_no_values
from lightning_amp.data.batch import tensors_in
from lightning_amp.errors import ModelError
from lightning_amp.footprint.copies.as_before import LONG, apart, contents, is_of_user
from lightning_amp.footprint.copies.known_values import give_values, numbers_may_be_taken

M = TypeVar("M", bound=nn.Module)
DATA = (Dataset, DataLoader, LightningDataModule)
"""Attributes of a module that a copy of it shares."""
SHARED = (*DATA, np.ndarray, ModuleType, type)
"""What a copied function shares with the function that it is a copy of."""
LOOKED_INTO = ("argparse", "threading", "types")
"""Libraries with objects that hold functions of the user's, or locks."""
PLAIN = {type(None), bool, int, float, complex, str, bytes}
LOCKS: dict[type, Any] = {type(make()): make for make in (threading.Lock, threading.RLock)}


def copy_of(module: M, fake: FakeTensorMode | None) -> M:
    """A copy without a Trainer; its tensors are fake if a mode is given.

    Raises:
        ModelError: Something in the module cannot be copied.
    """
    memo: dict[int, Any] = {}
    for child in module.modules():
        # a Trainer holds loaders, loggers and process groups
        attached = (vars(child).get(key) for key in ("_trainer", "_fabric"))
        memo |= {id(value): _NOTHING for value in attached if value is not None}
        # data are not part of a step, and may be larger than the module
        memo |= {id(value): value for value in vars(child).values() if isinstance(value, DATA)}
        if fake is not None:
            for tensor in own_tensors(child):
                memo[id(tensor)] = found = fake_tensor(tensor, fake)
                # not those of parameters: every step changes them, so that nothing may be decided by their values
                if not (isinstance(tensor, nn.Parameter) or has_no_values(tensor)):
                    give_values(found, tensor)
    try:
        _copy_unlike_deepcopy([*module.modules()], memo, fake, whole=True)
        twin = copy.deepcopy(module, memo)
    except Exception as error:
        raise ModelError(
            f"cannot profile {type(module).__name__!r}, which cannot be copied: {error!r}; a profile runs a"
            " step on a copy, so that the module stays as it is; take what cannot be copied out of its"
            " attributes"
        ) from error
    users = {id(child): child for child in module.modules()}
    for child in users.values():
        if child._compiled_call_impl is not None and id(memo.get(id(child), child)) not in users:
            # still known as compiled; a copy has lost it, or, of a LightningModule, would call the original
            memo[id(child)]._compiled_call_impl = memo[id(child)]._call_impl
    for name, own in twin.named_modules():
        if id(own) in users:
            # a __deepcopy__ of the user's shares it
            if fake is None and any(tensor.requires_grad for tensor in own_tensors(own)):
                raise ModelError(
                    f"cannot profile {type(module).__name__!r}: its step needs values, and would train its part"
                    f" {name!r} itself, which a copy shares; let `__deepcopy__` return a copy"
                )
            continue
        for key, value in vars(own).items():
            # Lightning knows logged metrics by their ids, of a module that trains
            if value is _NOTHING or key == "_metric_attributes":
                vars(own)[key] = None
            elif type(value) is ReferenceType and isinstance(value(), nn.Module):
                vars(own)[key] = ref(memo.get(id(value()), value()))
            elif isinstance(value, MethodType) and isinstance(value.__func__, partial):
                # LightningCLI's `configure_optimizers` holds an optimizer of the original's parameters
                vars(own)[key] = MethodType(_copied(value.__func__, memo=memo, own=set()), value.__self__)
            elif isinstance(value, MethodType) and id(value.__func__) in memo:
                vars(own)[key] = MethodType(memo[id(value.__func__)], value.__self__)
        if getattr(fake, "valid", False) and isinstance(own, Metric | MetricCollection):
            # what torchmetrics checks are values; metrics in groups share states once these were found equal
            checks: dict[str, Any] = {"validate_args": False, "_enable_compute_groups": False}
            if isinstance(own, BaseAggregator):
                checks["nan_strategy"] = "disable"
            vars(own).update({key: off for key, off in checks.items() if key in vars(own)})
    return twin


def own_tensors(module: nn.Module) -> list[Tensor]:
    """Parameters and buffers of a module, without its submodules; it may have methods of these names."""
    return [tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None]


def copy_of_data(
    data: LightningDataModule | None, module: nn.Module, twin: nn.Module, fake: FakeTensorMode | None
) -> LightningDataModule | None:
    """The data module that a copied module finds: a copy in what it remembers, with copies of modules; data are shared.

    `twin` is the copy of the module.
    """
    if data is None:
        return None
    found = copy.copy(data)
    memo: dict[int, Any] = {id(module): twin, id(data): found}
    _copy_unlike_deepcopy([data], memo, fake, whole=False)
    for name, value in vars(data).items():
        if isinstance(value, nn.Module) and id(value) not in memo:
            memo[id(value)] = copy_of(value, fake)
        vars(found)[name] = apart(value, memo)
    return found


def _copy_unlike_deepcopy(
    owners: Sequence[Any], memo: dict[int, Any], fake: FakeTensorMode | None, *, whole: bool
) -> None:
    """Put into a memo copies of what some objects hold and deepcopy shares or refuses: functions that hold something
    themselves, locks, sparse tensors, and those that were computed of others, as torch's older weight_norm does.

    Args:
        owners: Modules, or a data module.
        memo, fake: As of `copy.deepcopy`, and of `copy_of`.
        whole: Whether long containers and sparse tensors are copied too, which a copy of a data module shares.
    """
    cells: dict[int, tuple[CellType, CellType]] = {}
    copies: list[tuple[FunctionType, FunctionType]] = []
    waiting: list[Any] = [value for owner in owners for value in vars(owner).values()]
    seen = set[int]()
    while waiting:
        value = waiting.pop()
        # a list may hold itself
        if type(value) in PLAIN or id(value) in seen or id(value) in memo:
            continue
        seen.add(id(value))
        if isinstance(value, dict | list | tuple | set | deque):
            if whole or len(value) <= LONG:
                waiting += value.values() if isinstance(value, dict) else value
        elif isinstance(value, partial):
            waiting += [value.func, *value.args, *value.keywords.values()]
        elif isinstance(value, MethodType):
            waiting.append(value.__func__)
        elif type(value) in LOCKS:
            memo[id(value)] = LOCKS[type(value)]()
        elif type(value) is threading.Condition and type(vars(value)["_lock"]) in LOCKS:
            # its attributes are methods of its lock, which deepcopy shares
            lock = vars(value)["_lock"]
            memo[id(value)] = threading.Condition(memo.setdefault(id(lock), LOCKS[type(lock)]()))
        elif isinstance(value, Tensor):
            if fake is not None and value.grad_fn is not None:
                memo[id(value)] = fake_tensor(value.detach(), fake)
            elif whole and (value.grad_fn is not None or value.layout is not torch.strided):
                memo[id(value)] = value.detach().clone()
        elif holds_something(value):
            # empty cells first: functions may have closed over each other, or over themselves
            own = value.__closure__ or ()
            cells.update({id(cell): (CellType(), cell) for cell in own if id(cell) not in cells})
            closure = tuple(cells[id(cell)][0] for cell in own)
            twin = FunctionType(value.__code__, value.__globals__, value.__name__, None, closure)
            memo[id(value)] = twin
            copies.append((twin, value))
            waiting += [content for cell in own for content in contents(cell)]
        elif not isinstance(value, (nn.Module, *SHARED)) and hasattr(value, "__dict__"):
            looked_into = is_of_user(type(value)) or type(value).__module__ in LOOKED_INTO
            waiting += vars(value).values() if looked_into else ()
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
        # a step of ours says by functools.wraps that it is the user's, and counts on what it has closed over
        and not value.__globals__.get("__name__", "").startswith("lightning_amp.")
    )


def _copied(value: Any, *, memo: dict[int, Any], own: set[int]) -> Any:
    """What a copied function holds: copies of the module's parts and of small things, and all else itself."""
    if isinstance(value, SHARED) or (
        isinstance(value, nn.Module | Tensor) and id(value) not in own and id(value) not in memo
    ):
        return value
    before = set(memo)
    try:
        return copy.deepcopy(value, memo)
    except Exception:
        # what it had begun to copy is half filled
        for key in memo.keys() - before:
            del memo[key]
        return value


_NOTHING = object()
"""Stands for a Trainer while a module is copied: None would not do, which a memo takes for no entry."""


def make_fake(module: nn.Module, fake: FakeTensorMode) -> None:
    """Replace the tensors that a module has made for itself since it was copied."""
    made: dict[int, Tensor] = {}
    for child in module.modules():
        for own in (child._parameters, child._buffers):
            for name, tensor in own.items():
                if tensor is not None and not isinstance(tensor, FakeTensor):
                    # one that is in two places stays one
                    found = made[id(tensor)] if id(tensor) in made else fake_tensor(tensor, fake)
                    made[id(tensor)] = cast(dict[str, Any], own)[name] = found


@contextmanager
def without_values() -> Iterator[None]:
    """Let code copy tensors, join a list of scalars, and take numbers out of them, while a fake mode is on.

    torch's own way of copying takes the bytes of a storage, which has none then: it writes where no memory was given
    to it. Numbers are those of `known_values.py`.
    """
    before, make = Tensor.__deepcopy__, torch.tensor

    def copy_of_tensor(tensor: Tensor, memo: dict[int, Any]) -> Any:
        if id(tensor) not in memo:
            memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return memo[id(tensor)]

    def tensor(data: Any, *args: Any, **options: Any) -> Tensor:
        # as Lightning's grad_norm makes of the norms of parameters; of all else torch's own
        if not (isinstance(data, list | tuple) and data and all(type(x) is FakeTensor and not x.dim() for x in data)):
            return make(data, *args, **options)
        requires_grad, _ = options.pop("requires_grad", False), options.pop("pin_memory", None)
        return torch.stack([*data]).detach().to(**{"device": "cpu", **options}).requires_grad_(requires_grad)

    Tensor.__deepcopy__, torch.tensor = copy_of_tensor, tensor  # type: ignore[method-assign]
    try:
        with numbers_may_be_taken():
            yield
    finally:
        Tensor.__deepcopy__, torch.tensor = before, make  # type: ignore[method-assign]


def fake_tensor(tensor: Tensor, fake: FakeTensorMode) -> Tensor:
    """A fake tensor on the same device; on the CPU where this one is on the device "meta"."""
    if tensor.layout is not torch.strided:
        # torch makes it without entries, whose bytes would not count
        raise NotImplementedError(f"a tensor of layout {tensor.layout} has no entries without values")
    if has_no_values(tensor):
        device = "cpu" if tensor.is_meta else tensor.device
        with fake:
            found = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        learns = tensor.requires_grad
        found = nn.Parameter(found, learns) if isinstance(tensor, nn.Parameter) else found.requires_grad_(learns)
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


def resized(batch: Any, batch_size: int | None) -> Any:
    """A copy of the batch; if a length is given, with the rows repeated of tensors that have the batch's length."""
    length = length_of(batch)

    def copied(_: str, tensor: Tensor) -> Tensor:
        if batch_size is None or not tensor.dim() or tensor.shape[0] != length or tensor.is_meta:
            return tensor.clone()
        return tensor[torch.arange(batch_size, device=tensor.device) % length]

    return map_tensors(batch, copied)


def fake_batch(batch: Any, fake: FakeTensorMode, batch_size: int | None) -> Any:
    """The batch as fake tensors, of another length if one is given."""
    found = map_tensors(batch, lambda _, tensor: fake_tensor(tensor, fake))
    with fake:
        return found if batch_size is None else resized(found, batch_size)


def map_tensors(values: Any, change: Callable[[str, Tensor], Tensor], path: str = "") -> Any:
    """A batch with its tensors changed, by path, in mappings, lists, tuples and dataclasses; other objects stay."""

    def below(key: object, value: Any) -> Any:
        return map_tensors(value, change, f"{path}.{key}" if path else str(key))

    if isinstance(values, Tensor):
        return change(path or "batch", values)
    if isinstance(values, Mapping):
        # the kind of mapping is kept, such as HuggingFace's BatchEncoding, unless it cannot be written to
        changed: Any = copy.copy(values) if hasattr(values, "__setitem__") else dict(values)
        for key in values:
            changed[key] = below(key, values[key])
        return changed
    if isinstance(values, tuple) and hasattr(values, "_fields"):
        return type(values)(*map(below, values._fields, values))
    if isinstance(values, list | tuple):
        return type(values)(below(i, value) for i, value in enumerate(values))
    if is_dataclass(values) and not isinstance(values, type):
        derived = [getattr(values, one.name, None) for one in fields(values) if not one.init]
        new = {one.name: below(one.name, getattr(values, one.name)) for one in fields(values) if one.init}
        if next(tensors_in(derived), None) is None:
            # a ValueError: its __init__ takes what it has no field of
            with suppress(ValueError):
                return replace(values, **new)
        twin: Any = copy.copy(values)
        new |= {one.name: below(one.name, getattr(values, one.name)) for one in fields(values) if not one.init}
        for name, value in new.items():
            # one that is frozen has its own __setattr__
            object.__setattr__(twin, name, value)
        return twin
    return values
