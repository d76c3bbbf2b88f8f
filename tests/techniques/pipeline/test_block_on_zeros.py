"""Claim: a block whose operators need values runs once on zeros elsewhere, and no such value or number is ever read."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_amp._torch import has_no_values
from lightning_amp.errors import InstallError
from lightning_amp.techniques.pipeline.run.block_walk import Span
from lightning_amp.techniques.ranks.placeholders import Placeholders
from tests.techniques.pipeline.test_block_walk import CPU, Net, X, in_turn, staged, without


class Routes(nn.Linear):
    """Writes an attribute, and computes of its rows those above 0."""

    kept: Any = None
    numbered = writes = drops = False

    def forward(self, h: Tensor) -> Any:
        self.calls = getattr(self, "calls", torch.zeros(())) + 1
        if self.writes:
            h.add_(1)
        rows = (h.sum(1) > 0).nonzero().flatten()
        out = h.index_add(0, rows, super().forward(h[rows]))
        out = nn.functional.dropout(out, 0.5) if self.drops else out
        self.kept = len(rows) if self.numbered else rows
        return out


def through(**settings: bool) -> tuple[Any, Any, Net]:
    """What the second of two stages gets and returns."""
    net, span, got = Net(lambda net, x: in_turn(net.blocks, net.embed(x))), Span(2, 4, 4), list[Any]()
    first: Any = net.blocks[0]
    first.__class__ = Routes
    vars(first).update(settings)
    walk = staged(net)
    without(net, span)

    def receive(placeholders: Any) -> Any:
        got.append(placeholders)
        return X.clone()

    torch.manual_seed(0)
    return got, walk.run(span, lambda: net(X), receive=receive, device=CPU)[1], net


def test_the_result_is_placeholders_and_the_block_is_as_before() -> None:
    before = {name: id(value) for name, value in Net(lambda net, x: x).blocks[0].named_parameters()}
    (got,), returned, net = through()
    assert has_no_values(got)
    assert got.shape == X.shape
    assert not has_no_values(returned)
    first: Any = net.blocks[0]
    assert all(p.is_meta for p in first.parameters())
    assert {name for name, _ in first.named_parameters()} == before.keys()
    assert first.kept is None
    assert not hasattr(first, "calls")


def test_numbers_and_writes_are_refused() -> None:
    with pytest.raises(InstallError, match="returns or keeps the number 0"):
        through(numbered=True)
    net, span = Net(lambda net, x: in_turn(net.blocks, x)), Span(1, 4, 4)
    first: Any = net.blocks[0]
    first.__class__ = Routes
    first.writes = True
    walk = staged(net)
    without(net, span)
    with pytest.raises(InstallError, match="writes in place into an argument"):
        walk.run(span, lambda: net(X.clone()), receive=lambda made: made, device=CPU)


def test_draws_of_such_a_block_do_not_advance_this_rank() -> None:
    torch.manual_seed(0)
    expected = torch.get_rng_state()
    through(drops=True)
    assert torch.equal(torch.get_rng_state(), expected)


def test_an_operator_that_needs_values_is_named_without_words_of_torch() -> None:
    with (
        Placeholders(CPU) as mode,
        pytest.raises(InstallError, match="on which the shape of its result depends") as error,
    ):
        mode.of(X).nonzero()
    assert "Fake" not in str(error.value)
