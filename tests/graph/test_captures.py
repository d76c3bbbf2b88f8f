"""Claim: blocks that differ by a number alone share a capture where they call the same functions, and do nothing for
which a capture of their own is refused.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_amp.graph import captures
from lightning_amp.graph.captures import Captures


class Layer(nn.Module):
    """A layer whose number may decide something."""

    def __init__(self, number: int, beside: Callable[["Layer", Tensor, list[Tensor]], Any] = lambda *_: None) -> None:
        super().__init__()
        self.number, self.linear = number, nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))
        Layer.beside = staticmethod(beside)

    def forward(self, x: Tensor, states: list[Tensor]) -> Tensor:
        if self.number == 1:
            Layer.beside(self, x, states)
        return self.linear(x).relu() + x


def found(
    beside: Callable[[Layer, Tensor, list[Tensor]], Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[Any], int]:
    made, capture, known = list[Any](), captures.capture, Captures(follows=True)
    monkeypatch.setattr(captures, "capture", lambda *args, **kwargs: made.append(capture(*args, **kwargs)) or made[-1])
    layers, x = [Layer(number, beside) for number in range(3)], torch.randn(2, 4)
    return [known.of(layer, (x, [x]), {}) for layer in layers], len(made)


def test_layers_with_numbers_share_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    all_of, n_made = found(lambda *_: None, monkeypatch)
    assert n_made == 1
    assert len({id(one.graph) for one in all_of}) == 1
    # each has the key of its own block
    assert len({one.key for one in all_of}) == 3
    known = Captures()
    assert len({id(known.of(Layer(number), (torch.randn(2, 4), []), {}).graph) for number in range(3)}) == 3


OTHERS: dict[str, tuple[Callable[[Layer, Tensor, list[Tensor]], Any], str]] = {
    "calls another function": (lambda layer, x, states: x.sin(), ""),
    "draws": (lambda layer, x, states: random.random(), "random numbers"),
    "fills a list": (lambda layer, x, states: states.append(x), "changes a list"),
    "replaces a buffer": (lambda layer, x, states: setattr(layer, "seen", x), "replaces its parameter or buffer"),
    "counts": (lambda layer, x, states: vars(layer).update(number=9), "changes the attribute 'number'"),
    "seeds": (lambda layer, x, states: torch.manual_seed(3), "seed"),
    "keeps": (lambda layer, x, states: KEPT.append(1), "changes a variable of a file"),
    "raises": (lambda layer, x, states: 1 / 0, "ZeroDivisionError"),
}
KEPT: list[int] = []


@pytest.mark.parametrize("name", OTHERS)
def test_a_layer_that_does_something_else_has_its_own_capture(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    beside, why = OTHERS[name]
    (first, second, third), n_made = found(beside, monkeypatch)
    assert n_made == 2
    assert first.graph is third.graph is not None
    assert second.graph is not first.graph
    assert why in second.reason
    assert bool(second.reason) == bool(why)
    KEPT.clear()
