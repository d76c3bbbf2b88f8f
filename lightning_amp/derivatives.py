"""Refuse second derivatives through functions whose backward pass is written by hand."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from lightning_amp.errors import ModelError


def refuse_second(what: str) -> None:
    """Raise a ModelError in a backward pass that is differentiated in its turn (`create_graph=True`)."""
    if torch.is_grad_enabled():
        raise ModelError(f"a second derivative is not supported (create_graph=True) through {what}")


def first_only(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate the backward pass of a function that is not linear, so that it is not differentiated in its turn.

    torch's `once_differentiable` says nothing where the gradient that comes in is a constant, as in
    `torch.autograd.grad(y.sum(), x, create_graph=True)`: what depends on saved tensors would be lost in silence.

    Args:
        what: What is computed, and what to do instead, for the message.

    Raises:
        ModelError: By the backward pass, with `create_graph=True`.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(backward)
        def refusing(ctx: Any, *grads: Any) -> Any:
            refuse_second(what)
            return backward(ctx, *grads)

        return refusing

    return decorate
