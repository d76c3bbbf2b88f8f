"""Compute a scalar together with its gradients in the forward pass, and keep only the gradients for the backward pass.

    forward     total, and d total / d input for every input that needs it
    backward    these gradients, times the gradient of the total

The backward pass scales the gradients in place and returns them once. A second backward pass and a second derivative
raise an error. So does a backward pass that starts from another result of the inner computation (`leaf`).

Known limits: torch.autograd.grad does not run the check of `leaf`, so the gradient of such a term is omitted. Where the
term depends on an intermediate result instead of a leaf, torch raises its error about a "second time".

`call_with` calls a module with other tensors in place of its parameters and buffers. A tied tensor is replaced under
each of its names; a module that is a child in two places counts once. torch.func.functional_call replaces the tensors
of such a child under all its names, and does not restore them.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_amp._torch import add_each, copy_each, scale_each
from lightning_amp.derivatives import first_only, leaves_behind
from lightning_amp.errors import InstallError
from lightning_amp.shapes import Scalar

Gradients = list[Tensor | None]
Compute = Callable[[Sequence[bool]], tuple[Tensor, Gradients]]


def with_gradients(compute: Compute, inputs: Sequence[Tensor], *, home: Iterable[Tensor] = ()) -> Scalar:
    """Return the total that `compute` returns, as a function of the inputs.

    Args:
        compute: Function from one bool per input (whether it needs a gradient) to the detached total and the gradients
            of all inputs: None for inputs that need none or are not used. Called once, with gradients enabled.
        inputs: Tensors to differentiate with respect to.
        home: Inputs that are used on their own side of a region that ranks share; ranks/sharded_region.py reads this.

    Raises:
        InstallError: In the backward pass, when it is run twice.
        ModelError: In the backward pass, for a second derivative.
    """
    return cast(Tensor, _Ready.apply(compute, frozenset(map(id, home)), *inputs))  # type: ignore[no-untyped-call]


def wants_gradients(inputs: Iterable[Tensor]) -> bool:
    """Whether autograd would record operators on the inputs."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)


def leaf(tensor: Tensor, needed: bool) -> Tensor:
    """Return a detached alias of a tensor, as a leaf of a new graph; only `gradients` computes its gradient."""
    own = tensor.detach().requires_grad_(needed)
    if needed:
        # torch.autograd.grad does not accumulate into leaves: the hook runs only if a later backward pass reaches it
        own.register_post_accumulate_grad_hook(_refuse)  # type: ignore[no-untyped-call]
    return own


def gradients(outputs: Sequence[Tensor], inputs: Sequence[Tensor], grad_outputs: Sequence[Tensor | None]) -> Gradients:
    """Compute gradients that share no memory, so that they can be scaled and added in place; frees the graph.

    Args:
        outputs: Results of the graph.
        inputs: Leaves of the graph; the gradient of a leaf that needs none is None.
        grad_outputs: Gradients of the outputs; None for 1, if the output is a scalar.
    """
    # by identity: tensors compare by value
    known = {id(tensor) for tensor in inputs}
    strangers = [found for found in leaves_behind(outputs) if id(found) not in known]
    if strangers:
        shapes = sorted({tuple(found.shape) for found in strangers})
        raise InstallError(
            f"strata cannot be streamed: they read tensors of the shapes {shapes!r} that need "
            "gradients and are neither their parameters nor their arguments (u, v, log_weights, "
            "library); their gradients would be lost. Make them parameters of the stratum, detach "
            "them, or leave 'stream' out"
        )
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    # the backward pass of a loss under autocast runs without autocast, and so must this one; meta has no autocast
    device = outputs[0].device.type
    with torch.autocast(device if torch.amp.is_autocast_available(device) else "cpu", enabled=False):
        found = iter(torch.autograd.grad(outputs, wanted, grad_outputs, allow_unused=True) if wanted else ())
    # autograd may return one tensor for two inputs (u + v), or one of `grad_outputs` (nll + p): adding to one in place
    # would change the other
    seen = {id(grad.untyped_storage()) for grad in grad_outputs if grad is not None}
    return [_apart(next(found), seen) if tensor.requires_grad else None for tensor in inputs]


def add(so_far: Tensor | None, more: Tensor | None) -> Tensor | None:
    """Add two gradients in the memory of the first; None counts as zero."""
    if so_far is None or more is None:
        return more if so_far is None else so_far
    return so_far.add_(more)


class GradientSum:
    """Sum of gradients in memory that is allocated before the first one; `value` is None until a gradient is added.

    Args:
        of: Tensor to which the gradients belong; nothing is allocated if it needs no gradient.
        later: Allocate nothing, and use the memory of the first gradient.
    """

    def __init__(self, of: Tensor, *, later: bool = False) -> None:
        needed = of.requires_grad and not later
        self._room = torch.empty_like(of, requires_grad=False) if needed else None
        self.value: Tensor | None = None

    def add(self, grad: Tensor | None, columns: slice | Tensor | None = None) -> None:
        """Add a gradient unless it is None; adding to some columns requires memory that was allocated at first."""
        if grad is None or columns is None:
            add_up([(self, grad)])
            return
        assert self._room is not None, "what is added to in parts has its memory from the start"
        # other columns may never get a gradient, and count as zero
        self.value = self._room.zero_() if self.value is None else self.value
        if isinstance(columns, Tensor):
            self.value.index_add_(1, columns, grad)
        else:
            self.value[:, columns].add_(grad)

    def take(self, grad: Tensor) -> Tensor | None:
        """Return the memory to copy a first gradient to; None if `grad` itself becomes the sum."""
        assert self.value is None, "a first gradient comes once"
        self.value = grad if self._room is None else self._room
        return self._room


def add_up(found: Iterable[tuple[GradientSum, Tensor | None]]) -> None:
    """Add the gradients that are not None to their sums, with two multi-tensor operators; a sum may occur only once."""
    copied: list[tuple[Tensor, Tensor]] = []
    added: list[tuple[Tensor, Tensor]] = []
    for total, grad in found:
        if grad is None:
            continue
        if total.value is not None:
            added.append((total.value, grad))
        elif (room := total.take(grad)) is not None:
            copied.append((room, grad))
    for operator, pairs in ((copy_each, copied), (add_each, added)):
        if pairs:
            operator([own for own, _ in pairs], [grad for _, grad in pairs])


def _refuse(own: Tensor) -> None:
    raise InstallError(
        f"a backward pass reached a tensor of shape {tuple(own.shape)!r} that a streamed "
        "stratum has read, from something that a hook or the stratum has kept instead of from "
        "the stratum's loss; its gradient would be lost. Compute the term from the decoder's "
        "inputs or the parameter itself, detach what is kept, or leave 'stream' out"
    )


def _apart(grad: Tensor | None, seen: set[int]) -> Tensor | None:
    """Return the gradient, cloned if it shares memory with another gradient, or is expanded or a view."""
    if grad is None:
        return None
    storage = grad.untyped_storage()
    # an expanded gradient (that of a sum) has a smaller storage than its elements need, a view has a larger one
    shared = id(storage) in seen or storage.nbytes() != grad.nbytes
    seen.add(id(storage))
    return grad.clone(memory_format=torch.contiguous_format) if shared else grad


class _Ready(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: Compute, home: frozenset[int], *inputs: Tensor) -> Tensor:
        ctx.home = home
        # autograd disables gradients in a Function's forward, but the strata build their graphs in it
        with torch.enable_grad():
            total, ctx.ready = compute(ctx.needs_input_grad[2:])
        return total

    @staticmethod
    @first_only("a loss whose strata are streamed; leave 'stream' out, for example for 'recompute'")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # removed, not copied: they are scaled in place, and a second pass would scale them again
        ready, ctx.ready = ctx.ready, None
        if ready is None:
            raise InstallError(
                "a second backward pass through a loss is not supported if its strata are streamed; "
                "compute the loss again, or leave 'stream' out"
            )
        by_type: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        for own in ready:
            if own is not None:
                by_type[own.dtype].append(own)
        # one operator per dtype, because there may be hundreds of tensors
        for dtype, same in by_type.items():
            scale_each(same, grad.to(dtype))
        return None, None, *ready


Result = TypeVar("Result")


def places(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name, with one name for every place that can hold another tensor."""
    found: dict[str, Tensor] = {}
    for prefix, part in module.named_modules():
        found |= part.named_parameters(prefix, recurse=False, remove_duplicate=False)
        found |= part.named_buffers(prefix, recurse=False, remove_duplicate=False)
    return found


def call_with(tensors: Mapping[str, Tensor], module: nn.Module, call: Callable[[], Result]) -> Result:
    """Call a function while a module holds other tensors, and return the result.

    Args:
        tensors: Replacements, by their names in `places`; other places keep their tensors.
        module: Module that holds the replacements during the call, and its own tensors afterwards.
        call: Function that calls the module or its methods.
    """
    named = {f"module.{name}": tensor for name, tensor in tensors.items()}
    return cast(Result, functional_call(_FunctionalCall(module, call), named, tie_weights=False))


class _FunctionalCall(nn.Module):
    """Module whose forward pass runs `call`, as torch.func.functional_call requires a module."""

    def __init__(self, module: nn.Module, call: Callable[[], Any]) -> None:
        super().__init__()
        self.module = module
        self.call = call

    def forward(self) -> Any:
        return self.call()
