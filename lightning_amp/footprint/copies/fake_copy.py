"""Copy a module and a batch to fake tensors, which have shapes and no values.

Tensors are replaced during the copy, so parameters are never in memory twice. The copy is made before the fake mode is
entered: a module that is constructed or copied under the mode may keep a reference to the mode.

`copy.deepcopy` shares functions and weak references. A function in a module (a hook, a method or an attribute) may have
the module itself in its closure, and would then change the module that trains. Such a function is copied together with
its closure. Weak references to modules are copied if they are direct attributes of modules.
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

from lightning_amp._torch import FakeTensor, FakeTensorMode, fake_tensors, has_no_values
from lightning_amp.data.batch import tensors_in
from lightning_amp.errors import ModelError
from lightning_amp.footprint.copies.batch_values import AskedFakeTensor
from lightning_amp.footprint.copies.known_values import give_values, numbers_may_be_taken
from lightning_amp.footprint.copies.restore_state import LONG, contents, copied_state, is_of_user
from lightning_amp.holding import replacing

M = TypeVar("M", bound=nn.Module)
DATA = (Dataset, DataLoader, LightningDataModule)
"""Types of attributes that a module and its copy share."""
SHARED = (*DATA, np.ndarray, ModuleType, type)
"""Types of objects that a function and its copy share."""
LOOKED_INTO = ("argparse", "threading", "types")
"""Libraries with objects that may hold locks or functions of the user."""
PLAIN = {type(None), bool, int, float, complex, str, bytes}
LOCKS: dict[type, Any] = {type(make()): make for make in (threading.Lock, threading.RLock)}


def copy_of(module: M, fake: FakeTensorMode | None, *, shares: bool = False) -> M:
    """Copy a module without its Trainer; its tensors are fake if a mode is given, or parameters share their memory.

    Raises:
        ModelError: A part of the module cannot be copied.
    """
    memo: dict[int, Any] = {}
    for child in module.modules():
        # a Trainer holds loaders, loggers and process groups
        attached = (vars(child).get(key) for key in ("_trainer", "_fabric"))
        memo |= {id(value): _NOTHING for value in attached if value is not None}
        # data do not belong to the step, and may be larger than the module
        memo |= {id(value): value for value in vars(child).values() if isinstance(value, DATA)}
        if fake is not None:
            for tensor in own_tensors(child):
                memo[id(tensor)] = found = fake_tensor(tensor, fake)
                # not of parameters: every step changes them, so that no branch may depend on their values
                if not (isinstance(tensor, nn.Parameter) or has_no_values(tensor)):
                    give_values(found, tensor)
        elif shares:
            for tensor in own_tensors(child):
                if type(tensor) is nn.Parameter:
                    memo[id(tensor)] = found = nn.Parameter(tensor.data, tensor.requires_grad)
                    vars(found).update(vars(tensor))
    try:
        _copy_unlike_deepcopy([*module.modules()], memo, fake, whole=True)
        # deepcopy calls `__new__` without the arguments that a class of a user may require
        made = [child for child in module.modules() if _is_made_with_arguments(type(child))]
        memo |= {id(child): object.__new__(type(child)) for child in made}
        for child in made:
            vars(memo[id(child)]).update(copy.deepcopy(vars(child), memo))
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
            # keep it marked as compiled; a copy has lost the mark, or, for a LightningModule, would call the original
            memo[id(child)]._compiled_call_impl = memo[id(child)]._call_impl
    for name, own in twin.named_modules():
        if id(own) in users:
            # a user's __deepcopy__ shares it
            if fake is None and not shares and any(tensor.requires_grad for tensor in own_tensors(own)):
                raise ModelError(
                    f"cannot profile {type(module).__name__!r}: its step needs values, and would train its part"
                    f" {name!r} itself, which a copy shares; let `__deepcopy__` return a copy"
                )
            continue
        for key, value in vars(own).items():
            # Lightning finds logged metrics by ids, which are those of the original
            if value is _NOTHING or key == "_metric_attributes":
                vars(own)[key] = None
            elif type(value) is ReferenceType and isinstance(value(), nn.Module):
                vars(own)[key] = ref(memo.get(id(value()), value()))
            elif isinstance(value, MethodType) and isinstance(value.__func__, partial):
                # LightningCLI's `configure_optimizers` holds an optimizer of the original's parameters
                # without a copy of its function, which may be a method of a CLI with the data
                args, named = _copied((value.__func__.args, value.__func__.keywords), memo=memo, own=set())
                vars(own)[key] = MethodType(partial(value.__func__.func, *args, **named), value.__self__)
            elif isinstance(value, MethodType) and id(value.__func__) in memo:
                vars(own)[key] = MethodType(memo[id(value.__func__)], value.__self__)
        if getattr(fake, "valid", False) and isinstance(own, Metric | MetricCollection):
            # torchmetrics' checks read values; metrics in compute groups share states once these were equal
            checks: dict[str, Any] = {"validate_args": False, "_enable_compute_groups": False}
            if isinstance(own, BaseAggregator):
                checks["nan_strategy"] = "disable"
            vars(own).update({key: off for key, off in checks.items() if key in vars(own)})
    return twin


def tensors_of_all(module: nn.Module) -> list[Tensor]:
    """Return the parameters and buffers of a module and its submodules, by `own_tensors`."""
    return [tensor for child in module.modules() for tensor in own_tensors(child)]


def own_tensors(module: nn.Module) -> list[Tensor]:
    """Return a module's own parameters and buffers, from its dicts: a class may override `parameters` or `buffers`."""
    return [tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None]


def _is_made_with_arguments(kind: type[nn.Module]) -> bool:
    """Whether a class has a `__new__` of its own, and does not say how its objects are copied."""
    copied = ("__deepcopy__", "__getnewargs__", "__getnewargs_ex__", "__getstate__", "__reduce__", "__reduce_ex__")
    own = any(getattr(kind, name, None) is not getattr(nn.Module, name, None) for name in copied)
    return kind.__new__ is not nn.Module.__new__ and not own


def copy_of_data(
    data: LightningDataModule | None, module: nn.Module, twin: nn.Module, fake: FakeTensorMode | None
) -> LightningDataModule | None:
    """Copy the data module for a copied module: its mutable state and its modules are copied, its data are shared.

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
        vars(found)[name] = copied_state(value, memo)
    return found


def _copy_unlike_deepcopy(
    owners: Sequence[Any], memo: dict[int, Any], fake: FakeTensorMode | None, *, whole: bool
) -> None:
    """Add copies of objects that deepcopy shares or rejects to a memo: functions with state, locks, sparse tensors, and
    non-leaf tensors, which torch's older weight_norm has.

    Args:
        owners: Modules, or a data module.
        memo, fake: As in `copy.deepcopy`, and in `copy_of`.
        whole: Whether long containers and sparse tensors are copied too; a copy of a data module shares them.
    """
    cells: dict[int, tuple[CellType, CellType]] = {}
    copies: list[tuple[FunctionType, FunctionType]] = []
    waiting: list[Any] = [value for owner in owners for value in vars(owner).values()]
    seen = set[int]()
    while waiting:
        value = waiting.pop()
        # a list may contain itself
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
            # its attributes are methods of its lock, which deepcopy would share
            lock = vars(value)["_lock"]
            memo[id(value)] = threading.Condition(memo.setdefault(id(lock), LOCKS[type(lock)]()))
        elif isinstance(value, Tensor):
            if fake is not None and value.grad_fn is not None:
                memo[id(value)] = fake_tensor(value.detach(), fake)
            elif whole and (value.grad_fn is not None or value.layout is not torch.strided):
                memo[id(value)] = value.detach().clone()
        elif holds_something(value):
            # create empty cells first: functions may have each other, or themselves, in their closures
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
    # only now: a closure may contain other copied functions
    copied = partial(_copied, memo=memo, own=set(map(id, owners)))
    for new, cell in cells.values():
        for content in contents(cell):
            new.cell_contents = copied(content)
    for twin, value in copies:
        vars(twin).update(vars(value))
        twin.__defaults__ = value.__defaults__ and tuple(map(copied, value.__defaults__))
        twin.__kwdefaults__ = {name: copied(given) for name, given in (value.__kwdefaults__ or {}).items()}


def holds_something(value: Any) -> bool:
    """Whether a value is a user function with a closure or defaults."""
    return (
        isinstance(value, FunctionType)
        and bool(value.__closure__ or value.__defaults__ or value.__kwdefaults__)
        and is_of_user(value)
        # wrappers of this library have the user's __module__ (functools.wraps), and need their own closure
        and not value.__globals__.get("__name__", "").startswith("lightning_amp.")
    )


def _copied(value: Any, *, memo: dict[int, Any], own: set[int]) -> Any:
    """Copy an object that a copied function holds if it is a part of the module or small; else return the object."""
    if isinstance(value, SHARED) or (
        isinstance(value, nn.Module | Tensor) and id(value) not in own and id(value) not in memo
    ):
        return value
    before = len(memo)
    try:
        return copy.deepcopy(value, memo)
    except Exception:
        # remove incomplete copies from the memo
        while len(memo) > before:
            memo.popitem()
        return value


_NOTHING = object()
"""Placeholder of a Trainer while a module is copied; a memo treats None as a missing entry."""


def make_fake(module: nn.Module, fake: FakeTensorMode) -> None:
    """Make the parameters and buffers fake that a module has created since it was copied."""
    made: dict[int, Tensor] = {}
    for child in module.modules():
        for own in (child._parameters, child._buffers):
            for name, tensor in own.items():
                if tensor is not None and not isinstance(tensor, FakeTensor):
                    # a shared tensor stays shared
                    found = made[id(tensor)] if id(tensor) in made else fake_tensor(tensor, fake)
                    made[id(tensor)] = cast(dict[str, Any], own)[name] = found


@contextmanager
def without_values() -> Iterator[None]:
    """Support deepcopy of tensors, torch.tensor of a list of scalars, `item()`, and `Module.to` of another type, while
    a fake mode is active.

    torch's own deepcopy of a tensor copies the bytes of its storage. A fake tensor has none, so it would write to
    memory that was never allocated. Numbers from `item()` are those of `known_values.py`. `Module.to` swaps fake
    parameters even for themselves, which torch refuses once a step has used them; here it replaces their `.data`, as it
    does with values.
    """
    make, apply = torch.tensor, cast(Any, nn.Module._apply)

    def copy_of_tensor(tensor: Tensor, memo: dict[int, Any]) -> Any:
        if id(tensor) not in memo:
            memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return memo[id(tensor)]

    def tensor(data: Any, *args: Any, **options: Any) -> Tensor:
        # as Lightning's grad_norm does with the norms of parameters; torch's own function for all other data
        if not (isinstance(data, list | tuple) and data and all(type(x) is FakeTensor and not x.dim() for x in data)):
            return make(data, *args, **options)
        requires_grad, _ = options.pop("requires_grad", False), options.pop("pin_memory", None)
        return torch.stack([*data]).detach().to(**{"device": "cpu", **options}).requires_grad_(requires_grad)

    def apply_changes(module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        with torch.no_grad():
            if all(change(tensor) is tensor for tensor in (*module.parameters(recurse), *module.buffers(recurse))):
                return module
            for child in module.children() if recurse else ():
                cast(Any, child)._apply(change)
            own: list[Tensor] = [tensor for tensor in module._parameters.values() if tensor is not None]
            own += [tensor.grad for tensor in own if tensor.grad is not None]
            changed = [(tensor, change(tensor)) for tensor in own]
        if not all(isinstance(new, FakeTensor) and new.device == tensor.device for tensor, new in changed):
            return cast(nn.Module, apply(module, change, False))
        for tensor, new in changed:
            tensor.data = new
        module._buffers.update({name: change(buffer) for name, buffer in module._buffers.items() if buffer is not None})
        return module

    with (
        replacing(nn.Module, _apply=apply_changes),
        replacing(Tensor, __deepcopy__=copy_of_tensor),
        replacing(torch, tensor=tensor),
        replacing(fake_tensors, FakeTensor=AskedFakeTensor),
        numbers_may_be_taken(),
    ):
        yield


def fake_tensor(tensor: Tensor, fake: FakeTensorMode) -> Tensor:
    """Return a fake tensor on the same device; on the CPU for a meta tensor."""
    if tensor.layout is not torch.strided:
        # torch makes it without entries, so their bytes would not count
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
        # attributes that libraries set on parameters
        vars(found).update(vars(tensor))
    return found


def map_tensors(values: Any, change: Callable[[str, Tensor], Tensor], path: str = "") -> Any:
    """Map the tensors of a batch by (path, tensor) in mappings, lists, tuples and dataclasses; share other objects."""

    def below(key: object, value: Any) -> Any:
        return map_tensors(value, change, f"{path}.{key}" if path else str(key))

    if isinstance(values, Tensor):
        return change(path or "batch", values)
    if isinstance(values, Mapping):
        # keep the type of the mapping, such as HuggingFace's BatchEncoding, unless it is read-only
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
            # ValueError: its __init__ has parameters that are not fields
            with suppress(ValueError):
                return replace(values, **new)
        twin: Any = copy.copy(values)
        new |= {one.name: below(one.name, getattr(values, one.name)) for one in fields(values) if not one.init}
        for name, value in new.items():
            # a frozen dataclass overrides __setattr__
            object.__setattr__(twin, name, value)
        return twin
    return values
