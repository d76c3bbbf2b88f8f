"""Define a scalar whose gradients are computed together with it, so that only they are kept for the backward pass.

    forward     total, and d total / d input for every input that needs it
    backward    these gradients, times the gradient of the total

The gradients are handed out once and scaled in place: a second backward pass is refused, and so is a second derivative.
So is the backward pass of anything else that was made of what is computed inside (`leaf`).

Known limits: torch.autograd.grad does not run that check, and omits what such a term adds to the gradients; where the
term starts from something in between, not from a leaf, torch refuses it ("a second time").

`call_with` calls a module with other tensors in place of its parameters and buffers. A tied tensor is replaced under
each of its names; a module that is a child in two places counts once. torch.func.functional_call goes
by all names of such a child, and leaves the other tensors in it when it is done.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.func import functional_call

from lightning_amp._torch import add_each, copy_each, scale_each
from lightning_amp.derivatives import first_only
from lightning_amp.errors import InstallError
from lightning_amp.shapes import Scalar

Gradients = list[Tensor | None]
Compute = Callable[[Sequence[bool]], tuple[Tensor, Gradients]]


def with_gradients(compute: Compute, inputs: Sequence[Tensor], *, home: Iterable[Tensor] = ()) -> Scalar:
    """The total that `compute` returns, as a function of the inputs.

    Args:
        compute: Which inputs need gradients -> the total, detached, and the gradients of all inputs, None for those
            that need none or are not used. Called once, with gradients enabled.
        inputs: What the gradients are of.
        home: Inputs that are used on their own side of a region that ranks share; ranks/sharded_region.py reads this.

    Raises:
        InstallError: In the backward pass, when it is run twice.
        ModelError: In the backward pass, for a second derivative.
    """
    return cast(Tensor, _Ready.apply(compute, frozenset(map(id, home)), *inputs))  # type: ignore[no-untyped-call]


def wants_gradients(inputs: Iterable[Tensor]) -> bool:
    """Whether autograd would record what is computed from the inputs."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)


def leaf(tensor: Tensor, needed: bool) -> Tensor:
    """The same values as an input of a new graph, whose gradients only `gradients` takes."""
    own = tensor.detach().requires_grad_(needed)
    if needed:
        # torch.autograd.grad does not accumulate into leaves: the hook runs only if a term outside reaches a kept one
        own.register_post_accumulate_grad_hook(_refuse)  # type: ignore[no-untyped-call]
    return own


def gradients(outputs: Sequence[Tensor], inputs: Sequence[Tensor], grad_outputs: Sequence[Tensor | None]) -> Gradients:
    """Gradients that share no memory, so that they can be added to and scaled in place; frees the graph.

    Args:
        inputs: Leaves of the graph; of those that need no gradient it is None.
        grad_outputs: Gradients of the outputs, None for a scalar's 1.
    """
    # by identity: tensors compare by value
    known = {id(tensor) for tensor in inputs}
    strangers = [found for output in outputs for found in _leaves(output) if id(found) not in known]
    if strangers:
        shapes = sorted({tuple(found.shape) for found in strangers})
        raise InstallError(
            f"strata cannot be streamed: they read tensors of the shapes {shapes!r} that need "
            "gradients and are neither their parameters nor their arguments (u, v, log_weights, "
            "library); their gradients would be lost. Make them parameters of the stratum, detach "
            "them, or leave 'stream' out"
        )
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    # the pass of a loss under autocast runs outside of it too; the meta device has no autocast itself
    device = outputs[0].device.type
    with torch.autocast(device if torch.amp.is_autocast_available(device) else "cpu", enabled=False):
        found = iter(torch.autograd.grad(outputs, wanted, grad_outputs, allow_unused=True) if wanted else ())
    # autograd may hand out one tensor for two inputs (u + v), or a gradient that it was given (nll + p): who adds to
    # one in place would change the other
    seen = {id(grad.untyped_storage()) for grad in grad_outputs if grad is not None}
    return [_apart(next(found), seen) if tensor.requires_grad else None for tensor in inputs]


def add(so_far: Tensor | None, more: Tensor | None) -> Tensor | None:
    """The sum of two gradients in the memory of the first."""
    if so_far is None or more is None:
        return more if so_far is None else so_far
    return so_far.add_(more)


class GradientSum:
    """Sum of gradients in memory that is there before the first of them; None as long as there is none.

    Args:
        of: What the gradients are of; there is no memory if it needs none.
        later: Take the memory of the first gradient instead.
    """

    def __init__(self, of: Tensor, *, later: bool = False) -> None:
        needed = of.requires_grad and not later
        self._room = torch.empty_like(of, requires_grad=False) if needed else None
        self.value: Tensor | None = None

    def add(self, grad: Tensor | None, columns: slice | Tensor | None = None) -> None:
        """Add a gradient, if it is one: of everything, or of some columns, where there was memory from the start."""
        if grad is None or columns is None:
            add_up([(self, grad)])
            return
        assert self._room is not None, "what is added to in parts has its memory from the start"
        # the other columns may get no gradient at all, and count as zero
        self.value = self._room.zero_() if self.value is None else self.value
        if isinstance(columns, Tensor):
            self.value.index_add_(1, columns, grad)
        else:
            self.value[:, columns].add_(grad)

    def take(self, grad: Tensor) -> Tensor | None:
        """The memory to copy a first gradient to; None if `grad` itself becomes the sum."""
        assert self.value is None, "a first gradient comes once"
        self.value = grad if self._room is None else self._room
        return self._room


def add_up(found: Iterable[tuple[GradientSum, Tensor | None]]) -> None:
    """Add the gradients that are not None to their sums, in two operators; a sum may occur once."""
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
    """The gradient, as a copy if it shares its memory: with another one, or with itself where it was expanded."""
    if grad is None:
        return None
    storage = grad.untyped_storage()
    # an expanded gradient (that of a sum) has less storage than numbers, a view of a larger tensor has more
    shared = id(storage) in seen or storage.nbytes() != grad.nbytes
    seen.add(id(storage))
    return grad.clone(memory_format=torch.contiguous_format) if shared else grad


def _leaves(output: Tensor) -> Iterator[Tensor]:
    seen: set[Node] = set()
    found: list[Node | None] = [output.grad_fn]
    while found:
        node = found.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        # only the node that adds up a leaf's gradient has it
        tensor = getattr(node, "variable", None)
        if isinstance(tensor, Tensor):
            yield tensor
        found += [before for before, _ in node.next_functions]


class _Ready(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, compute: Compute, home: frozenset[int], *inputs: Tensor) -> Tensor:
        ctx.home = home
        # autograd runs a Function's forward without gradients, and the strata's graphs live in this one
        with torch.enable_grad():
            total, ctx.ready = compute(ctx.needs_input_grad[2:])
        return total

    @staticmethod
    @first_only("a loss whose strata are streamed; leave 'stream' out, for example for 'recompute'")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # taken out, not copied: they are scaled in place, and a second pass would scale them again
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
        # one operator for each type, where there may be hundreds of tensors
        for dtype, same in by_type.items():
            scale_each(same, grad.to(dtype))
        return None, None, *ready


Result = TypeVar("Result")


def places(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name: one name for every place that can hold another tensor."""
    found: dict[str, Tensor] = {}
    for prefix, part in module.named_modules():
        found |= part.named_parameters(prefix, recurse=False, remove_duplicate=False)
        found |= part.named_buffers(prefix, recurse=False, remove_duplicate=False)
    return found


def call_with(tensors: Mapping[str, Tensor], module: nn.Module, call: Callable[[], Result]) -> Result:
    """What a call returns while a module holds other tensors.

    Args:
        tensors: By their names in `places`; the other places keep theirs.
        module: Holds its own tensors again afterwards.
        call: Calls the module, or methods of it.
    """
    named = {f"module.{name}": tensor for name, tensor in tensors.items()}
    return cast(Result, functional_call(_FunctionalCall(module, call), named, tie_weights=False))


class _FunctionalCall(nn.Module):
    """A call of a module, as a module that is called."""

    def __init__(self, module: nn.Module, call: Callable[[], Any]) -> None:
        super().__init__()
        self.module = module
        self.call = call

    def forward(self) -> Any:
        return self.call()
