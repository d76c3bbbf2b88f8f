"""Functions of Python that never reach the dispatcher, or reach it too late: properties, hooks, conversions."""

from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_amp.dist._torch import disable_torch_function
from lightning_amp.dist.registry import FUNCTIONS, function, shard_error
from lightning_amp.dist.sharded_tensor import ShardedTensor, local_of, shape_of, splits_of, wrap
from lightning_amp.dist.splits import WHOLE

METADATA = (
    *("size", "dim", "numel", "stride", "element_size", "is_floating_point", "is_complex", "is_signed"),
    *("ndimension", "nelement", "get_device", "__len__", "storage_offset", "is_contiguous"),
)
"""Methods that read what the wrapper says of itself."""
PROPERTIES = (
    "shape",
    "dtype",
    "device",
    "ndim",
    "is_cuda",
    "is_cpu",
    "is_sparse",
    "is_meta",
    "itemsize",
    "nbytes",
)


def _of_wrapper(method: Any) -> Any:
    def read(*args: Any, **kwargs: Any) -> Any:
        with disable_torch_function():
            return method(*args, **kwargs)

    return read


FUNCTIONS.update({method: _of_wrapper(method) for name in METADATA for method in [getattr(Tensor, name)]})
FUNCTIONS.update({get: _of_wrapper(get) for name in PROPERTIES for get in [getattr(Tensor, name).__get__]})


@function(Tensor.contiguous)
def _contiguous(x: ShardedTensor, **kwargs: Any) -> Tensor:
    return wrap(x.local.contiguous(**kwargs), x.splits, copied=x.copied)


@function(Tensor.requires_grad_)
def _requires_grad_(x: ShardedTensor, requires_grad: bool = True) -> Tensor:
    x.local.requires_grad_(requires_grad)
    return x


@function(Tensor.retain_grad)
def _retain_grad(x: ShardedTensor) -> None:
    x.local.retain_grad()


@function(Tensor.register_hook)
def _register_hook(x: ShardedTensor, hook: Any) -> Any:
    # not the tensor itself: a hook lives as long as the graph, and would keep it
    splits = x.splits

    def on_part(grad: Tensor) -> Tensor | None:
        found = hook(wrap(grad, splits))
        return None if found is None else local_of(found)

    return x.local.register_hook(on_part)


@function(Tensor.backward)
def _backward(x: ShardedTensor, *args: Any, **kwargs: Any) -> NoReturn:
    raise shard_error(
        Tensor.backward, [x], "a loss is a number, which every rank has", remedy="sum or average it"
    )


@function(Tensor.unflatten)
def _unflatten(x: Tensor, dim: int, sizes: Any) -> Tensor:
    # torch's own method calls itself without end on a subclass
    return torch.reshape(x, torch.empty(shape_of(x), device="meta").unflatten(dim, sizes).shape)


@function(Tensor.T.__get__)  # type: ignore[attr-defined]
def _reversed_dims(x: Tensor) -> Tensor:
    return x.permute(*reversed(range(x.dim())))


@function(Tensor.mT.__get__, Tensor.mH.__get__)  # type: ignore[attr-defined]
def _transposed(x: Tensor) -> Tensor:
    found = x.transpose(-1, -2)
    return found.conj() if found.is_complex() else found


@function(Tensor.data.__get__)  # type: ignore[attr-defined]
def _data(x: ShardedTensor) -> Tensor:
    return wrap(x.local.data, x.splits, copied=x.copied)


def _pool_of(n: int) -> Any:
    pool = getattr(torch, f"max_pool{n}d")

    def call(
        x: Tensor,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Tensor:
        if return_indices:
            raise shard_error(pool, [x], "positions of the largest values are asked for")
        return pool(x, kernel_size, kernel_size if stride is None else stride, padding, dilation, ceil_mode)

    return call


FUNCTIONS.update({getattr(F, f"max_pool{n}d"): _pool_of(n) for n in (1, 2, 3)})


def _on_whole(method: Any) -> Any:
    def read(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if splits_of(x) is not WHOLE:
            why = "its values lie on several ranks"
            raise shard_error(method, [x], why, remedy="reduce it first, or take its full_tensor()")
        return method(local_of(x), *args, **kwargs)

    return read


_VALUES = (
    *("tolist", "numpy", "__array__", "item", "__bool__", "__int__", "__float__", "__index__", "__complex__"),
    *("data_ptr", "untyped_storage"),
)
FUNCTIONS.update({method: _on_whole(method) for name in _VALUES for method in [getattr(Tensor, name)]})
