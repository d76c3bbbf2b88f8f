"""Detect reads of a parameter outside its module, which would read this rank's shard or old values, and raise an error.

memory       another tensor shares the memory of a parameter, which moves; checked before a fit
in a step    a reference to the parameter object itself; checked in the first step of each kind
in hooks     operators that are not elementwise, such as a norm; checked in the module's hooks between steps
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial, wraps
from math import prod
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_amp._torch import TorchDispatchMode
from lightning_amp.errors import InstallError, ModelError
from lightning_amp.footprint.live_bytes import tensors_of
from lightning_amp.sharding.registry import name_of
from lightning_amp.sharding.sharded_tensor import ShardedTensor
from lightning_amp.techniques.put_methods import put_methods
from lightning_amp.techniques.tensor3d.parameters import GridParameter

HOOKS = (
    *("on_fit_start", "on_train_start", "on_train_end", "on_train_epoch_start", "on_train_epoch_end"),
    *("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "on_before_backward"),
    *("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping", "lr_scheduler_step"),
    *("on_validation_start", "on_validation_end", "on_validation_epoch_start", "on_validation_epoch_end"),
    *("on_validation_batch_start", "on_validation_batch_end"),
)
"""Hooks of a LightningModule that are called while its parameters are shards."""
READ_ELSEWHERE = (
    "under tensor3d a parameter has this rank's part, and a function or object has read {name} by a reference to the"
    " parameter; read it through its module, as self.layer.weight, in the step, or train with strategies='S1'"
)
IN_HOOK = (
    "tensor3d: {hook!r} calls {op!r} on the parameter {name!r} or its gradient, of which this rank has a"
    " part between steps; allowed are operators that compute value by value, with parameters that are split"
    " in the same way. Compute it in training_step, where parameters are whole, take"
    " trainer.strategy.gradient_norm(), or train with strategies='S1'"
)
FAILS = (
    "tensor3d: {hook!r} fails with {error!r}, and between steps parameters have this rank's part, flat. If it reads"
    " their shapes or values, do so in training_step, where they are whole, or train with strategies='S1'"
)
COPIED = (
    "tensor3d: {hook!r} copies the parameter {name!r}, of which this rank has a part between steps; make the copy in"
    " setup, where parameters are whole, or train with strategies='S1'"
)
_ABOUT = ("data", "shape", "ndim", "T", "mT", "H", "mH", "real", "imag")
"""Attributes of a tensor that differ for a shard."""
_ASKED = (
    "register_hook",
    "is_inference",
    "is_floating_point",
    "is_complex",
    "untyped_storage",
    "__hash__",
    "__eq__",
    "eq",
)
_BY_VALUE = ("detach", "alias", "clone", "copy_", "zero_", "fill_", "zeros_like", "ones_like", "empty_like", "_to_copy")


def refuse_aliases(module: nn.Module) -> None:
    """Raise an InstallError for tensors that share memory with a parameter and are not the same object."""
    places: dict[int, list[tuple[str, nn.Parameter, range]]] = {}
    for name, parameter in module.named_parameters():
        mine = _places(parameter)
        for other, _, theirs in places.setdefault(parameter.untyped_storage()._cdata, []):
            if _overlap(mine, theirs):
                raise InstallError(
                    f"tensor3d: the parameters {other!r} and {name!r} are two with one memory, of which each rank would"
                    f" hold two parts; tie them as one parameter: {name} = {other}"
                )
        places[parameter.untyped_storage()._cdata].append((name, parameter, mine))
    for where, child in module.named_modules():
        own = {**vars(child), **child._buffers}
        for key, value in own.items():
            for tensor in _tensors(value) if key not in ("_parameters", "_buffers", "_modules") else ():
                for name, parameter, theirs in places.get(tensor.untyped_storage()._cdata, ()):
                    if tensor is not parameter and _overlap(_places(tensor), theirs):
                        raise InstallError(
                            f"tensor3d: {f'{where}.{key}'.lstrip('.')!r} is a view of the parameter {name!r}, whose"
                            " values move; take the view in the step"
                        )


def _tensors(value: Any) -> Iterator[Tensor]:
    values = value if isinstance(value, list | tuple) else value.values() if type(value) is dict else [value]
    # a sparse tensor has no storage
    return (t for t in values if isinstance(t, Tensor) and t.layout is torch.strided and not t.is_meta)


def _places(x: Tensor) -> range:
    last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return range(x.storage_offset(), x.storage_offset() + (last + 1 if x.numel() else 0))


def _overlap(a: range, b: range) -> bool:
    return max(a.start, b.start) < min(a.stop, b.stop)


class ReadsElsewhere(TorchFunctionMode):
    """Raise an error for reads of a parameter object in a step, where sharded tensors replace all parameters."""

    def __init__(self, parameters: Iterable[GridParameter]) -> None:
        super().__init__()
        self._names = {id(one.parameter): one.name for one in parameters}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch."""
        for tensor in tensors_of((args, kwargs or {})):
            name, called = self._names.get(id(tensor)), getattr(func, "__name__", "")
            attribute = getattr(func.__self__, "__name__", "") if called in ("__get__", "__set__") else None
            reads = called not in _ASKED if attribute is None else attribute in _ABOUT
            if name is not None and reads and not _is_ours():
                raise ModelError(READ_ELSEWHERE.format(name=repr(name)))
        return func(*args, **(kwargs or {}))


def _is_ours() -> bool:
    """Whether the library or an optimiser has called a function of torch, and not the user."""
    frame = sys._getframe(2)
    while frame.f_back:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("torch.optim."):
            # in a step with manual optimisation, which updates this rank's shards
            return True
        # skip frames of torch, and of the library's modes, which pass on calls of others
        if name.partition(".")[0] != "torch" and not frame.f_code.co_name.startswith("__torch_"):
            break
        frame = frame.f_back
    # Lightning's gradient clipping, which a run replaces by full norms, runs unchanged when a step is counted
    return bool(
        frame.f_globals.get("__name__", "").startswith(("lightning_amp.", "lightning.pytorch.plugins.precision"))
    )


class _ByValue(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raise an error for operators on shards in a hook, unless they are elementwise."""

    def __init__(self, hook: str, parameters: Iterable[GridParameter]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._hook, self._kept = hook, list[Tensor]()
        self._parts: dict[int, GridParameter] = {}
        for one in parameters:
            for tensor in (one.parameter, one.parameter.grad):
                if tensor is not None:
                    self._parts[tensor.untyped_storage()._cdata] = one

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Check and compute an operator; its results from shards count as shards."""
        kwargs = kwargs or {}
        if func.namespace == "prim":
            # queries of a fake tensor, such as its device
            return func(*args, **kwargs)
        given = [t for t in tensors_of((args, kwargs)) if type(t) is not ShardedTensor]
        of = [self._parts.get(t.untyped_storage()._cdata) for t in given]
        # a full norm, computed by the library, is no shard
        ours = _is_ours()
        parts = [one for one in of if one is not None and not ours]
        if parts and not self._allowed(func, given, of):
            raise ModelError(IN_HOOK.format(hook=self._hook, op=name_of(func), name=parts[0].name))
        found = func(*args, **kwargs)
        for tensor in tensors_of(found) if parts else ():
            # kept alive, so that its address is not used again
            self._kept.append(tensor)
            self._parts[tensor.untyped_storage()._cdata] = parts[0]
        return found

    def _allowed(self, func: Any, given: list[Tensor], of: list[GridParameter | None]) -> bool:
        by_value = torch.Tag.pointwise in func.tags and torch.Tag.nondeterministic_seeded not in func.tags
        if not by_value and name_of(func) not in _BY_VALUE:
            return False
        parts = [one for one in of if one is not None]
        if any(one.shape != parts[0].shape or one.splits != parts[0].splits for one in parts):
            return False
        if func._schema.is_mutable:
            # a shard must not be written into a replicated tensor
            return of[0] is not None and all(one or t.numel() == 1 for t, one in zip(given, of, strict=True))
        # a scalar parameter has padding on other ranks
        return prod(parts[0].shape) > 1 and all(one or t.numel() == 1 for t, one in zip(given, of, strict=True))


def watch_hooks(module: nn.Module, parameters: list[GridParameter]) -> Callable[[], None]:
    """Check what the module's hooks compute from shards; returns a function that stops the check."""
    kind = type(module)
    own = [n for n in HOOKS if n in vars(module) or getattr(kind, n, None) is not getattr(LightningModule, n)]
    return put_methods(module, {name: _watched(name, getattr(module, name), parameters) for name in own})


def _watched(name: str, hook: Callable[..., Any], parameters: list[GridParameter]) -> Callable[..., Any]:
    @wraps(hook)
    def call(*args: Any, **kwargs: Any) -> Any:
        for one in parameters:
            vars(one.parameter)["__deepcopy__"] = partial(_refuse_copy, name, one.name)
        try:
            with _ByValue(name, parameters):
                return hook(*args, **kwargs)
        except (ValueError, RuntimeError, IndexError) as error:
            # subclasses are signals, such as that a step needs values
            if type(error) not in (ValueError, RuntimeError, IndexError):
                raise
            raise ModelError(FAILS.format(hook=name, error=error)) from error
        finally:
            for one in parameters:
                vars(one.parameter).pop("__deepcopy__", None)

    return call


def _refuse_copy(hook: str, name: str, memo: object) -> None:
    raise ModelError(COPIED.format(hook=hook, name=name))
