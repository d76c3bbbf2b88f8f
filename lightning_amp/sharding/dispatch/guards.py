"""Patch autograd during a step: refuse user Functions on sharded tensors, and return full gradients from autograd.grad.

A `torch.autograd.Function` unpacks its tensors in C++, so autograd would record the wrapper and lose the shard's
gradient. `torch.autograd.grad` of a replicated value would return only one rank's share of the gradient. Activation
checkpointing must not stop early, because all ranks have to issue the same collectives.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.checkpoint import set_checkpoint_early_stop

from lightning_amp.derivatives import leaves_behind
from lightning_amp.footprint.live_bytes import tensors_of
from lightning_amp.holding import replacing
from lightning_amp.sharding._torch import functorch_utils
from lightning_amp.sharding.collectives import all_reduce
from lightning_amp.sharding.registry import AUTOGRAD_FUNCTIONS, FUNCTIONS, shard_error
from lightning_amp.sharding.sharded_tensor import ShardedTensor, local_of, part_in, splits_of, true_gradient, wrap
from lightning_amp.sharding.splits import AXES_OF_STEP, WHOLE, MeshAxis

autograd: Any = torch.autograd
OURS = ("torch.", "lightning_amp.")
PASSED_ON = ("RegisterPostBackwardFunction",)
"""Functions that return their inputs unchanged, such as the one with which FSDP2 waits for a block's gradients."""


@contextmanager
def guarded(axes: Sequence[MeshAxis]) -> Iterator[None]:
    """Guard a training step: refuse user Functions on sharded tensors, return full gradients, disable torch.compile.

    Args:
        axes: Mesh axes over which tensors of the step may be sharded.
    """
    apply, engine = torch.autograd.Function.__dict__["apply"], autograd._engine_run_backward
    register_hook: Any = Tensor.register_hook
    retain_grad: Any = Tensor.retain_grad
    unwrap: Any = functorch_utils.unwrap_dead_wrappers
    # Kept after the step: gradients of its tensors are read after the backward pass.
    AXES_OF_STEP[:] = axes

    def checked(cls: Any, *args: Any, **kwargs: Any) -> Any:
        handler = AUTOGRAD_FUNCTIONS.get(cls)
        given = any(type(t) is ShardedTensor for t in tensors_of((args, kwargs)))
        if given and handler is not None:
            return handler(*args, **kwargs)
        if given and cls.__name__ in PASSED_ON:
            found = apply.__get__(None, cls)(*map(local_of, args), **kwargs)
            tensors = [t for t in args if isinstance(t, Tensor)]
            return tuple(wrap(t, splits_of(a)) for t, a in zip(found, tensors, strict=True))
        found = None if given else apply.__get__(None, cls)(*args, **kwargs)
        # a Function may use sharded tensors that are not its arguments, as reentrant checkpointing does
        if given or any(type(t) is ShardedTensor for t in tensors_of(found)):
            remedy = "register what it does with lightning_amp.register_shard"
            if cls.__name__ == "CheckpointFunction":
                remedy = "call checkpoint with use_reentrant=False"
            raise shard_error(cls, [args], "autograd Functions do not see parts", remedy=remedy)
        # module backward hooks (BackwardHookFunction) run code of the user
        of_user = cls.__name__ == "BackwardHookFunction" or not cls.__module__.startswith(OURS)
        if of_user and not _in_handler(checked.__code__):
            for tensor in tensors_of(found):
                if tensor.requires_grad:
                    tensor.register_hook(whole_gradient)
        return found

    def whole_gradient(grad: Tensor) -> Tensor:
        """Full gradient of a replicated tensor, for code that is not linear in the gradient."""
        return true_gradient(grad, WHOLE, axes)

    def hooked(x: Tensor, hook: Any) -> Any:
        """Replace `Tensor.register_hook`: a user's hook receives the full gradient, not one rank's share."""
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if type(x) is ShardedTensor:
            # called directly: torch would dispatch to this replacement, which has no handler
            return FUNCTIONS[register_hook](x, hook)
        if caller.startswith(OURS):
            return register_hook(x, hook)

        def whole(grad: Tensor) -> Tensor | None:
            grad = whole_gradient(grad)
            found = hook(grad)
            return grad if found is None else found

        return register_hook(x, whole)

    def retained(x: Tensor) -> None:
        """Replace `Tensor.retain_grad`: `.grad` is the full gradient."""
        if type(x) is ShardedTensor:
            FUNCTIONS[retain_grad](x)
            return
        if x.requires_grad and not x.is_leaf:
            # retain_grad stores the result of hooks that were registered before it
            register_hook(x, whole_gradient)
        retain_grad(x)

    def run(outputs: Any, seeds: Any, retain: Any, create: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Replace the engine call of `torch.autograd.grad` and of `backward()`.

        Each of R ranks differentiates its copy of a replicated output, so each copy is weighted by 1 / R. The gradient
        of a replicated input is summed over the ranks; the gradient of a sharded input stays on its rank.
        """
        if kwargs.get("accumulate_grad"):
            for leaf in inputs or leaves_behind(outputs):
                # the engine accumulates into `.grad` of such a leaf, where a share and a sum cannot be distinguished;
                # gradients of parameters are averaged after the backward pass
                if not isinstance(leaf, Parameter) and not hasattr(leaf, "is_part"):
                    why = "it would leave one rank's share of a gradient on a tensor that is not a parameter"
                    remedy = "take its gradient with torch.autograd.grad"
                    raise shard_error(Tensor.backward, [leaf], why, remedy=remedy)
            return engine(outputs, seeds, retain, create, inputs, *args, **kwargs)
        parts = list[Any]()
        for out, seed in zip(outputs, seeds, strict=True):
            part = None if seed is None else part_in(seed, splits_of(out))
            for axis in axes:
                part = part if part is None or splits_of(out).on(axis) else part / axis.size
            # the seed of a replicated output is divided by R; shards are counted once
            parts.append(part)
        # the local shards have the autograd graph, the wrappers do not
        outs, ins = (tuple(map(local_of, tensors)) for tensors in (outputs, inputs))
        found = list[Any]()
        values = engine(outs, tuple(parts), retain, create, ins, *args, **kwargs)
        for value, one in zip(values, inputs, strict=True):
            for axis in axes:
                value = value if value is None or splits_of(one).on(axis) else all_reduce(value, axis)
            found.append(None if value is None else wrap(value, splits_of(one)))
        return tuple(found)

    def unwrapped(given: Any) -> Any:
        """Check an `apply` that was bound before the step, as by `scale = Scale.apply`."""
        tensors, cls = tensors_of(given), sys._getframe(1).f_locals.get("cls", torch.autograd.Function)
        if any(type(t) is ShardedTensor for t in tensors):
            remedy = f"call {cls.__name__}.apply itself, and register what it does with lightning_amp.register_shard"
            raise shard_error(cls, [given], "autograd Functions do not see parts", remedy=remedy)
        # the result of such a call is not intercepted, so its gradient cannot be summed over ranks
        trains = torch.is_grad_enabled() and any(t.requires_grad for t in tensors)
        if trains and not (cls.__module__.startswith(OURS) or _in_handler(checked.__code__)):
            why = "its backward pass would get one rank's share of a gradient"
            raise shard_error(cls, [given], why, remedy=f"call {cls.__name__}.apply itself")
        return unwrap(given)

    with (
        replacing(functorch_utils, unwrap_dead_wrappers=unwrapped),
        replacing(Tensor, register_hook=hooked, retain_grad=retained),
        replacing(torch.autograd.Function, apply=classmethod(checked)),
        replacing(autograd, _engine_run_backward=run),
        # ranks have to issue the same collectives when blocks run again
        set_checkpoint_early_stop(False),
        torch.compiler.set_stance("force_eager"),
    ):
        yield


def _in_handler(apply: Any) -> bool:
    """Whether an autograd Function is called from a handler or from the patched `apply`."""
    codes = {apply, *(getattr(ShardedTensor, f"__torch_{kind}__").__code__ for kind in ("function", "dispatch"))}
    frame = sys._getframe(2)
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None
