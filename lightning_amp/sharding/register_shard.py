"""Register user handlers of operators, functions or autograd Functions on sharded tensors, and check them."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import lightning_amp.sharding.ops  # noqa: F401  (registers the handlers)
from lightning_amp._torch import OpOverload
from lightning_amp.errors import ShardError
from lightning_amp.footprint.live_bytes import tensors_of
from lightning_amp.sharding._torch import OpOverloadPacket
from lightning_amp.sharding.collectives import reduce_now
from lightning_amp.sharding.dispatch.guards import guarded
from lightning_amp.sharding.owners import Owners
from lightning_amp.sharding.registry import AUTOGRAD_FUNCTIONS, FUNCTIONS, OPERATORS
from lightning_amp.sharding.sharded_tensor import part_in, redistribute
from lightning_amp.sharding.splits import WHOLE, Split, Splits, axis_of

Handler = TypeVar("Handler", bound=Callable[..., Any])


def register_shard(target: Any) -> Callable[[Handler], Handler]:
    """Register how an operator or function is computed on sharded tensors.

    A handler receives the caller's arguments, including sharded tensors: `local` is the shard, with gradients, and
    `splits` is how the tensor is sharded. It returns sharded tensors, `ShardedTensor(shard, splits)`, or plain ones
    that are replicated. `check_shard` compares it with one process.

    Args:
        target: An operator (`torch.ops.mylib.op` or one of its overloads), whose handler is called as
            `handler(operator, *args, **kwargs)`; or a subclass of `torch.autograd.Function`, or a function that
            supports `__torch_function__`, whose handlers are called as `handler(*args, **kwargs)`.

    Raises:
        ShardError: `target` is of another kind, or has a handler already.

    Example:
        @lightning_amp.register_shard(MyScale)
        def my_scale(x, factor):
            return ShardedTensor(MyScale.apply(x.local, factor), x.splits)
    """
    table: dict[Any, Any]
    key: Any
    if isinstance(target, type) and issubclass(target, torch.autograd.Function):
        table, key = AUTOGRAD_FUNCTIONS, target
    elif isinstance(target, OpOverload | OpOverloadPacket):
        packet = target.overloadpacket if isinstance(target, OpOverload) else target
        table, key = OPERATORS, packet._qualified_op_name.removeprefix("aten::")
    elif callable(target) and not isinstance(target, type):
        table, key = FUNCTIONS, target
    else:
        raise ShardError(
            f"register_shard({target!r}) is not supported; allowed are an operator of torch.ops, a subclass of"
            " torch.autograd.Function, and a function of torch"
        )
    if key in table:
        raise ShardError(
            f"register_shard({target!r}): it has a handler, which a second one would hide; register it once"
        )

    def add(handler: Handler) -> Handler:
        table[key] = handler
        return handler

    return add


def check_shard(
    function: Callable[..., Any], *args: Any, mesh: DeviceMesh, dim: int, sizes: Sequence[int] | None = None
) -> None:
    """Compare a function on sharded tensors with the same function on full tensors; all ranks of the mesh must call it.

    Floating-point tensors are computed in float64, and the first tensor is sharded. Results and the gradients of all
    tensors must agree to 1e-10.

    Args:
        function: Function of tensors and other values that returns tensors.
        args: Its arguments, the same on every rank.
        mesh, dim, sizes: How the first tensor is sharded, as in `ShardedTensor.from_local`.

    Raises:
        ShardError: Results or gradients differ.
    """
    axis, first = axis_of(mesh), next(i for i, arg in enumerate(args) if isinstance(arg, Tensor))
    owners = Owners.even(args[first].shape[dim], axis.size) if sizes is None else Owners.contiguous(sizes)
    splits = Splits.of([Split(axis, dim % args[first].dim(), owners)])
    found = list[list[Tensor]]()
    for sharded in (False, True):
        own = [
            arg.detach().double().requires_grad_() if isinstance(arg, Tensor) and arg.is_floating_point() else arg
            for arg in args
        ]
        given = [redistribute(a, splits) if sharded and i == first else a for i, a in enumerate(own)]
        with guarded([axis]) if sharded else nullcontext():
            results = [part_in(t, WHOLE) for t in tensors_of(function(*given))]
        # weights 1, 2, ... give each entry of a result a different weight, so that permuted entries are detected
        total = sum((t.double().square() * torch.arange(1, t.numel() + 1).view(t.shape)).sum() for t in results)
        leaves = [a for a in own if isinstance(a, Tensor) and a.requires_grad]
        if isinstance(total, Tensor) and total.requires_grad:
            total.backward()
        gradients = [torch.zeros_like(a) if a.grad is None else a.grad for a in leaves]
        if sharded:
            # every rank has differentiated its own copy of the result
            gradients = [reduce_now(grad, axis) / axis.size for grad in gradients]
        found.append([*(t.detach().double() for t in results), *gradients])
    for i, (whole, parts) in enumerate(zip(*found, strict=True)):
        worst = float((whole - parts).abs().max() / whole.abs().max().clamp(min=1)) if whole.numel() else 0.0
        if whole.shape != parts.shape or not worst <= 1e-10:
            what = "result" if i < len(found[0]) - len(leaves) else "gradient"
            raise ShardError(
                f"{getattr(function, '__name__', function)!r} on parts differs from one process: {what} {i} by"
                f" {worst:.1e} of its largest value; allowed is 1e-10: correct its handler"
            )
    dist.barrier(group=axis.group)
