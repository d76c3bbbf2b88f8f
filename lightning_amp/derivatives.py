"""Find leaves of backward passes, and raise an error on second derivatives through hand-written ones."""

from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from lightning_amp.errors import ModelError


def refuse_second(what: str) -> None:
    """Raise a ModelError if the backward pass is being differentiated (`create_graph=True`)."""
    if torch.is_grad_enabled():
        raise ModelError(f"a second derivative is not supported (create_graph=True) through {what}")


def first_only(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate the backward pass of a function that is not linear, so that differentiating it raises an error.

    `once_differentiable` does not raise if the incoming gradient is a constant, as in
    `torch.autograd.grad(y.sum(), x, create_graph=True)`: the terms of saved tensors would be silently lost.

    Args:
        what: The computation and the alternative, for the message.

    Raises:
        ModelError: In the backward pass, with `create_graph=True`.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(backward)
        def refusing(ctx: Any, *grads: Any) -> Any:
            refuse_second(what)
            return backward(ctx, *grads)

        return refusing

    return decorate


def leaves_behind(outputs: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the leaf tensors that receive a gradient in a backward pass."""
    nodes, seen = [output.grad_fn for output in outputs], set[Any]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [other for other, _ in node.next_functions]
        # only the AccumulateGrad node of a leaf has this attribute
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            yield leaf
