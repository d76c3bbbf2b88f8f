"""Handle Python functions of sharded tensors that need no operator or bypass dispatch: properties, hooks, values."""

import copy
from collections.abc import Callable
from math import prod
from typing import Any, NoReturn

import torch
from torch import Tensor

from lightning_amp._torch import disable_torch_function
from lightning_amp.footprint.live_bytes import tensors_of
from lightning_amp.sharding._torch import no_modes
from lightning_amp.sharding.registry import FUNCTIONS, function, mapped, shard_error
from lightning_amp.sharding.sharded_tensor import (
    ShardedTensor,
    copy_of,
    local_of,
    part_in,
    shape_of,
    splits_of,
    true_gradient,
    wrap,
)
from lightning_amp.sharding.splits import AXES_OF_STEP

METADATA = (
    *("size", "dim", "numel", "stride", "element_size", "is_floating_point", "is_complex", "is_signed"),
    *("ndimension", "nelement", "get_device", "__len__", "storage_offset", "is_contiguous"),
)
"""Methods that read metadata of the wrapper."""
PROPERTIES = ("dtype", "device", "ndim", "is_cuda", "is_cpu", "is_sparse", "is_meta", "itemsize", "nbytes")
VALUES = (
    *("tolist", "numpy", "__array__", "item", "__bool__", "__int__", "__float__", "__index__", "__complex__"),
    *("data_ptr", "const_data_ptr", "untyped_storage", "apply_", "map_", "map2_", "__dlpack__"),
)
"""Methods that read values or memory."""


def _of_wrapper(method: Any) -> Any:
    def read(*args: Any, **kwargs: Any) -> Any:
        with disable_torch_function():
            return method(*args, **kwargs)

    return read


FUNCTIONS.update({method: _of_wrapper(method) for name in METADATA for method in [getattr(Tensor, name)]})
FUNCTIONS.update({get: _of_wrapper(get) for name in PROPERTIES for get in [getattr(Tensor, name).__get__]})
FUNCTIONS[Tensor.shape.__get__] = shape_of  # type: ignore[attr-defined]


def _on_whole(method: Any) -> Any:
    def read(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if splits_of(x):
            why = "its values lie on several ranks"
            raise shard_error(method, [x], why, remedy="reduce it first, or take its full_tensor()")
        return method(local_of(x), *args, **kwargs)

    return read


# some methods are missing in some versions of torch
FUNCTIONS.update({m: _on_whole(m) for name in VALUES if (m := getattr(Tensor, name, None)) is not None})


def _of_part(method: Any) -> Any:
    def call(x: ShardedTensor, *args: Any, **kwargs: Any) -> Any:
        found = method(x.local, *args, **kwargs)
        return x if found is x.local else found

    return call


@function(Tensor.requires_grad_)
def _requires_grad(x: ShardedTensor, requires_grad: bool = True) -> ShardedTensor:
    x.requires_grad = requires_grad
    return x


NEW = ("new_zeros", "new_ones", "new_full", "new_empty", "new_tensor", "new")
for _name in ("retain_grad", "is_pinned", *NEW):
    FUNCTIONS[getattr(Tensor, _name)] = _of_part(getattr(Tensor, _name))


@function(Tensor.register_hook)
def _register_hook(x: ShardedTensor, hook: Any) -> Any:
    # capture splits and not the tensor: a hook lives as long as the graph, and would keep the tensor alive
    splits, axes = x.splits, tuple(AXES_OF_STEP or [split.axis for split in x.splits])

    def whole(grad: Tensor) -> Tensor | None:
        found = hook(wrap(true_gradient(grad, splits, axes), splits))
        return None if found is None else part_in(found, splits) * prod(axis.size for axis in axes if splits.on(axis))

    return x.local.register_hook(whole)


@function(Tensor.backward, torch.autograd.backward)
def _backward(x: Any, *args: Any, **kwargs: Any) -> None:
    if any(splits_of(t) for t in tensors_of(x)):
        why = "a loss is a number, which every rank has"
        raise shard_error(Tensor.backward, [x], why, remedy="sum or average it")
    for t in tensors_of((args, kwargs)):
        if type(t) is ShardedTensor:
            # one of `inputs`, whose gradient is read as that of a sharded tensor
            t.held.is_part = True  # type: ignore[attr-defined]
    torch.autograd.backward(*mapped((x, *args), local_of), **mapped(kwargs, local_of))


@function(Tensor.unflatten)
def _unflatten(x: Tensor, dim: int, sizes: Any) -> Tensor:
    # torch's own method recurses endlessly for a subclass
    with no_modes():
        shape = torch.empty(shape_of(x), device="meta").unflatten(dim, sizes).shape
    return torch.reshape(x, shape)


# torch's own properties run two operators, whose call has no cached plan: they take fifteen times as long
TRANSPOSED: dict[Any, Callable[[Tensor], Tensor]] = {
    Tensor.T: lambda x: x.permute(*reversed(range(x.dim()))),
    Tensor.mT: lambda x: x.transpose(-1, -2),
    Tensor.mH: lambda x: x.transpose(-1, -2).conj(),
    Tensor.H: lambda x: x.transpose(-1, -2).conj(),
}
FUNCTIONS.update({name.__get__: call for name, call in TRANSPOSED.items()})


@function(Tensor.data.__get__)  # type: ignore[attr-defined]
def _data(x: ShardedTensor) -> Tensor:
    return copy_of(x, wrap(x.local.data, x.splits, x.copied, x.strides))


@function(Tensor.__deepcopy__)
def _deepcopy(x: ShardedTensor, memo: dict[int, Any]) -> Tensor:
    if not x.is_made_when_read:
        return wrap(copy.deepcopy(x.local, memo), x.splits, strides=x.strides)
    # a copy of a parameter is a leaf
    made = ShardedTensor(x.local.detach().clone(), x.splits)
    made.requires_grad = x.requires_grad
    return made


@function(Tensor.__eq__, Tensor.eq)
def _equal(x: Any, other: Any) -> Any:
    # as keys of dictionaries, a parameter and the wrapper that replaces it are equal
    for one, key in ((x, other), (other, x)):
        if type(one) is ShardedTensor and one.is_made_when_read and one.held is key:
            return True
    return torch.eq(x, other)


@function(Tensor.__reduce_ex__)
def _pickle(x: ShardedTensor, protocol: int) -> NoReturn:
    raise shard_error(Tensor.__reduce_ex__, [x], "a file would hold one rank's part", remedy="save its full_tensor()")
