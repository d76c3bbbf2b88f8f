"""One row of the table of operators: a call, the shapes of what it is given, and which dim of which is split."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Case(NamedTuple):
    """A call on tensors.

    Attributes:
        name: Of the row; unique.
        call: Takes the tensors.
        inputs: Shapes of float64 tensors, or what makes one.
        at: Number of an input -> its dim that is split, or two of them that are split on a grid of ranks.
        refused: Words of the ShardError that is the right outcome; "" where results and gradients are to be exact.
        tolerance: Of differences; larger where a shorter type rounds sums over ranks.
    """

    name: str
    call: Callable[..., Any]
    inputs: tuple[Any, ...]
    at: dict[int, int | tuple[int, int]]
    refused: str = ""
    tolerance: float = 1e-10

    def dims(self, i: int) -> tuple[int, ...]:
        dims = self.at.get(i, ())
        return (dims,) if isinstance(dims, int) else dims


def case(
    name: str, call: Callable[..., Any], *inputs: Any, at: Any = 1, refused: str = "", tolerance: float = 1e-10
) -> Case:
    return Case(name, call, inputs, at if isinstance(at, dict) else {0: at}, refused, tolerance)


def ints(high: int, *shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(high, shape)


def bools(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.rand(shape) > 0.4


def made(inputs: tuple[Any, ...]) -> list[Tensor]:
    return [one() if callable(one) else torch.randn(one, dtype=torch.float64) for one in inputs]
