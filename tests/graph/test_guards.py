"""Claim: what a graph depends on besides tensors is a part of its key, or a reason for none."""

import random
import re
import weakref
from collections import deque
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.graph.calls import Captures
from tests.graph.nasty_blocks import Base, Settings, x_of


class Slotted:
    """An object without a dictionary."""

    __slots__ = ("scale",)

    def __init__(self, scale: float = 2.0) -> None:
        self.scale = scale


class Private(Base):
    """Multiplies by a number that it reads of something that it holds under a private name."""

    def __init__(self, held: Any, read: Any) -> None:
        super().__init__()
        self._held, self._read = held, read

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self._read(self._held)


def closed(numbers: list[float]) -> Any:
    return lambda: numbers[0]


LATER = Settings()


@pytest.mark.parametrize(("held", "read", "change"), [
    (Settings(), lambda o: o.scale, lambda o: setattr(o, "scale", 3.0)),
    (Slotted(), lambda o: o.scale, lambda o: setattr(o, "scale", 3.0)),
    ([nn.Dropout(0.2)], lambda o: o[0].p, lambda o: setattr(o[0], "p", 0.4)),
    ([nn.Sequential(nn.Dropout(0.2))], lambda o: 2 + o[0][0].training, lambda o: o[0].eval()),
    (deque([2.0]), lambda o: o[0], lambda o: o.append(o.popleft() + 1)),
    (bytearray([2]), lambda o: o[0], lambda o: o.append(o.pop() + 1)),
    (partial(max, Slotted()), lambda o: o.args[0].scale, lambda o: setattr(o.args[0], "scale", 3.0)),
    (LATER.__eq__, lambda o: o.__self__.scale, lambda o: setattr(LATER, "scale", 3.0)),
    (weakref.ref(LATER), lambda o: o().scale, lambda o: setattr(LATER, "scale", 5.0)),
    (closed(later := [2.0]), lambda o: o(), lambda o: later.append(later.pop() + 1)),
    ({1: 2.0}, lambda o: 3.0 if "1" in o else 2.0, lambda o: o.update({"1": o.pop(1)})),
])  # fmt: skip
def test_what_a_block_holds_under_a_private_name_is_a_guard(held: Any, read: Any, change: Any) -> None:
    """Changed in place, or replaced by another one."""
    captures, block = Captures(), Private(held, read)

    def as_it_is() -> bool:
        return torch.equal(captures.run(block, x_of()), block(x_of()))

    assert as_it_is()
    assert as_it_is()
    assert len(captures.all) == 1
    change(held)
    assert as_it_is()
    block._held, block._read = [7.0], lambda o: o[0]
    assert as_it_is()
    assert [found.reason for found in captures.all] == [""] * 3


def caught(read: Any, of: Any) -> float:
    try:
        return float(read(of))
    except Exception:
        return 3.0


@pytest.mark.parametrize(("held", "read", "reason"), [
    ([torch.tensor(2.0)], lambda o: o[0].item(), "reads a number of a tensor that is no argument"),
    (torch.tensor(2.0), float, "reads a number of a tensor that is no argument"),
    ([torch.ones(2), torch.ones(2)], lambda o: 2.0 if torch.equal(*o) else 3.0, "reads a number of a tensor"),
    (torch.tensor(2.0), lambda o: caught(float, o), "reads a number of a tensor that is no argument"),
    (torch.tensor(2), lambda o: torch.ones(4, 4)[1, :o].sum(), "reads a number of a tensor that is no argument"),
    (torch.tensor(2), lambda o: torch.ones(4, 4).select(1, o).sum(), "reads a number of a tensor that is no argument"),
    (torch.tensor(2.0), lambda o: torch.full((4,), o), "reads a number of a tensor that is no argument"),
    (torch.tensor(2.0), lambda o: torch.add(torch.ones(4), 1.0, alpha=o), "reads a number of a tensor"),
    (random.Random(0), lambda o: o.random(), "changes the attribute '_held'"),
    (np.random.default_rng(0), lambda o: o.random(), "changes the attribute '_held'"),
    (np.random.RandomState(0), lambda o: o.rand(), "changes the attribute '_held'"),
    ([1.0], lambda o: o.append(2.0) or 2.0, "changes the attribute '_held'"),
])  # fmt: skip
def test_what_it_holds_that_may_change_unseen_is_a_reason(held: Any, read: Any, reason: str) -> None:
    found = Captures().of(Private(held, read), (x_of(),), {})
    assert found.graph is None
    assert re.search(reason, found.reason), found.reason


@pytest.mark.parametrize("held", [np.random.default_rng(0), random.choice, np.random.uniform, random.SystemRandom()])
def test_what_is_drawn_elsewhere_is_no_guard(held: Any) -> None:
    captures, block = Captures(), Private(held, lambda o: 2.0)
    for _ in range(3):
        assert torch.equal(captures.run(block, x_of()), block(x_of()))
        random.random(), np.random.rand(), getattr(held, "random", random.random)()
    assert len(captures.all) == 1


def test_a_list_may_hold_itself() -> None:
    held: list[Any] = [2.0, {}]
    held[1]["all"] = held
    blocks, captures = [Private(held, lambda o: o[1]["all"][0]) for _ in range(2)], Captures()
    for block in blocks:
        assert torch.equal(captures.run(block, x_of()), block(x_of()))
    held[0] = 3.0
    assert torch.equal(captures.run(blocks[0], x_of()), blocks[0](x_of()))


def test_blocks_that_hold_their_own_parts_in_lists_share_a_graph() -> None:
    class Listed(Base):
        def __init__(self) -> None:
            super().__init__()
            self._parts = [self.layer, self.layer.weight]
            self.rnn = nn.LSTM(4, 4)

        def forward(self, x: Tensor) -> Any:
            return self.rnn(self._parts[0](x))[0]  # type: ignore[operator]

    captures = Captures()
    for block in (Listed(), Listed()):
        assert torch.equal(captures.run(block, x_of()), block(x_of()))
    assert len(captures.all) == 1
