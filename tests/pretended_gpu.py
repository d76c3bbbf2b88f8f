"""Tensors that say that they are on a GPU, on a machine without one, for a group that could send nothing else."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

TO_HOST = ("cpu", "tolist", "item", "numpy")
COLLECTIVES = ("send", "isend", "recv", "broadcast", "all_reduce", "all_gather")


class PretendedGpu(TorchFunctionMode):
    """Follows which tensors would be on a GPU; these must not meet others, except scalars."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch on the CPU, and mark its results."""
        kwargs, name = dict(kwargs or {}), getattr(function, "__name__", "")
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        if function == Tensor.device.__get__:
            return torch.device("cuda", 0) if is_on_gpu(args[0]) else function(*args)
        on_gpu = any(is_on_gpu(value) for value in given)
        met = [value for value in given if value.dim() or name in ("cat", "stack")]
        if on_gpu and name not in ("copy_", "__set__") and not all(map(is_on_gpu, met)):
            raise RuntimeError(f"{name}: expected all tensors to be on the same device")
        moves = name == "to" and len(args) > 1 and isinstance(args[1], str | torch.device)
        if (asked := args[1] if moves else kwargs.get("device")) is not None:
            on_gpu = torch.device(asked).type == "cuda"
            if on_gpu and moves:
                args = (args[0], "cpu", *args[2:])
            elif on_gpu:
                kwargs["device"] = "cpu"
        if name == "copy_":
            on_gpu = is_on_gpu(args[0])
        result = function(*args, **kwargs)
        if name == "to" and result is args[0] and on_gpu != is_on_gpu(result):
            result = result.clone()
        for value in tree_leaves(result):
            if isinstance(value, Tensor):
                value.on_gpu = on_gpu and name not in TO_HOST
        return result


def is_on_gpu(tensor: Tensor) -> bool:
    """Whether a tensor would be on a GPU."""
    return getattr(tensor, "on_gpu", False)


def moved(tensors: Any) -> None:
    """Mark tensors as being on a GPU."""
    for tensor in tensors:
        tensor.on_gpu = True


@contextmanager
def pretended_gpu(mesh: DeviceMesh, backends: str = "cuda:nccl") -> Iterator[None]:
    """Pretend that the ranks of a mesh have a GPU each, connected by these backends."""

    def checked(collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            sent = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
            kinds = {"cuda" if is_on_gpu(value) else "cpu" for value in sent}
            assert kinds == {"cuda" if "nccl" in backends else "cpu"}, f"{collective.__name__} got {kinds}"
            with torch._C.DisableTorchFunction():
                return collective(*args, **kwargs)

        return call

    with ExitStack() as stack:
        stack.enter_context(patch.object(mesh, "_device_type", "cuda"))
        stack.enter_context(patch.object(dist, "get_backend_config", lambda group=None: backends))
        for name in COLLECTIVES:
            stack.enter_context(patch.object(dist, name, checked(getattr(dist, name))))
        stack.enter_context(PretendedGpu())
        yield
