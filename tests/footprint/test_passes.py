"""Claim: a recorded step is cut at its blocks into segments with their seconds, bytes and parameters, passes of other
lengths lie on a line, and a step that cannot be run as stages says what it reads.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_amp.footprint.chain.chain_of import chain_and_passes
from lightning_amp.footprint.chain.passes import Passes
from tests.footprint.test_profile_module import Small

WIDTH, BLOCKS = 6, 3
NAMES = tuple(f"net.{k}" for k in range(BLOCKS))


class Tied(Small):
    """One weight before and after the blocks, a mask of the batch, an offset of what lies between blocks."""

    def __init__(self) -> None:
        super().__init__(nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))
        self.around = nn.Linear(WIDTH, WIDTH, bias=False)

    def between(self, x: Tensor, first: Tensor, k: int) -> Tensor:
        return torch.tanh(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = first = self.around(batch)
        keep = (batch > 0).to(x.dtype)
        for k, block in enumerate(self.net):
            x = self.between(block(x), first, k) * keep
        return F.mse_loss(self.around(x), batch)


class Skipping(Tied):
    def between(self, x: Tensor, first: Tensor, k: int) -> Tensor:
        return x + first if k == 1 else x


class Backwards(Tied):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch
        for block in reversed(self.net):
            x = block(x)
        return F.mse_loss(x, batch)


class Masking(Tied):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        mask = (torch.rand(len(batch), 1) < 0.5).to(batch.dtype)
        x = batch * mask
        for block in self.net:
            x = block(x)
        return ((x - batch) ** 2 * (1 - mask)).mean()


class Dropping(Tied):
    """Draws before the blocks, and reads none of it after them."""

    def between(self, x: Tensor, first: Tensor, k: int) -> Tensor:
        return F.dropout(x, 0.5)


def passes(kind: type[Small], rows: int = 8) -> Passes | str:
    torch.manual_seed(0)
    return chain_and_passes(kind(), torch.randn(rows, WIDTH), NAMES)[1]


def found(kind: type[Small], rows: int = 8) -> Passes:
    made = passes(kind, rows)
    assert isinstance(made, Passes), made
    return made


def test_segments_have_their_operators_and_parameters() -> None:
    step = found(Tied)
    assert (step.rows, step.names) == (8, NAMES)
    assert list(step.first) == sorted(step.first)
    assert set(step.segment) == {-1, 0, 1, 2, 3}
    # backward passes run from the last segment to the first
    order = step.segment[step.segment >= 0]
    assert list(order) == sorted(order, reverse=True)
    readers = {p.name: p.segments for p in step.parameters}
    assert readers["around.weight"] == (0, BLOCKS)
    assert readers["net.1.weight"] == readers["net.1.bias"] == (1,)
    weight = next(p for p in step.parameters if p.name == "net.1.weight")
    assert (weight.n_bytes, weight.gradient_bytes, weight.block) == (144, 144, 1)
    assert 2 * weight.n_bytes <= weight.state_bytes <= 2 * weight.n_bytes + 8
    assert step.batch_bytes == 4 * 8 * WIDTH
    assert step.sent_bytes == (4 * 8 * WIDTH,) * BLOCKS
    # the mask is of the batch alone, what blocks return is not
    assert not step.computed.all()
    assert all(step.computed[list(places)].all() for places in step.outputs)


def test_other_lengths_lie_on_a_line() -> None:
    small, whole, between = found(Tied, 2), found(Tied, 8), found(Tied, 4)
    drawn = whole.at(small, 4)
    assert drawn is not None
    assert drawn.rows == 4
    np.testing.assert_array_equal(drawn.n_bytes, between.n_bytes)
    assert drawn.sent_bytes == between.sent_bytes
    assert drawn.seconds.sum() == pytest.approx(between.seconds.sum(), rel=0.01)
    assert whole.at(whole, 4) is None
    assert whole.at(found(Dropping, 2), 4) is None


def test_what_cannot_be_stages_is_said() -> None:
    assert isinstance(passes(Dropping), Passes)
    assert "'net.2' reads" in str(passes(Skipping))
    assert "called 3 of 3" in str(passes(Backwards))
    assert "random numbers that the step draws before them" in str(passes(Masking))
