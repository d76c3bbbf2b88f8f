"""Claim: a recorded step is cut at its blocks into segments with their seconds, bytes and parameters, passes of other
lengths lie on a line, and a step that cannot be run as stages says what it reads; of blocks in chunks it is known
when a chunk's tensors are there, how often, and until when a node has all of its gradients.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_amp.costs.rule import Rule
from lightning_amp.footprint.chain.chain_of import count_step
from lightning_amp.footprint.chain.passes import Passes
from lightning_amp.footprint.operator_rates import OperatorRates, standing_for, times_now
from lightning_amp.installing.install import install_rules
from lightning_amp.techniques.chunk.row import ChunkBlock
from lightning_amp.techniques.pipeline.schedule.stage_bytes import rest_bytes, stage_bytes
from lightning_amp.techniques.pipeline.stage_forms import computed_again
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
    """What the first block returns, read after the last one."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = first = self.net[0](batch)
        for block in self.net[1:]:
            x = block(x)
        return F.mse_loss(x + first, batch)


class Conditioned(Small):
    """A vector made of the batch by layers of its own, which the last block and the loss read."""

    def __init__(self) -> None:
        super().__init__(nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.time, self.scale = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        when = self.scale(torch.tanh(self.time(batch[:, :WIDTH].cos())))
        x = self.embed(batch)
        for k, block in enumerate(self.net):
            x = block(x + when if k == 2 else x)
        return F.mse_loss(x * when, batch)


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


class Wide(Tied):
    def __init__(self) -> None:
        super().__init__()
        wide = 10 * WIDTH
        self.net = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, wide), nn.Tanh(), nn.Linear(wide, WIDTH)) for _ in range(BLOCKS)
        )


def passes(kind: type[Small], rows: int = 8) -> Passes | str:
    torch.manual_seed(0)
    return count_step(kind(), torch.randn(rows, WIDTH), NAMES).passes


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
    assert drawn.rows == 4
    np.testing.assert_array_equal(drawn.n_bytes, between.n_bytes)
    assert drawn.sent_bytes == between.sent_bytes
    assert drawn.seconds.sum() == pytest.approx(between.seconds.sum(), rel=0.01)
    assert whole.at(whole, 4) is None
    assert whole.at(found(Dropping, 2), 4) is None


def test_what_cannot_be_stages_is_said() -> None:
    assert isinstance(passes(Dropping), Passes)
    assert "what follows the blocks reads addmm of 'net.0'" in str(passes(Skipping))
    assert "called 3 of 3" in str(passes(Backwards))
    assert "random numbers that the step draws before them" in str(passes(Masking))


def test_what_is_made_beside_the_blocks_is_of_every_stage_that_reads_it() -> None:
    step, row = found(Conditioned, 8), 4 * 8 * WIDTH
    readers = {p.name: p.segments for p in step.parameters}
    assert readers["time.weight"] == readers["scale.bias"] == (0, 2, BLOCKS)
    assert readers["embed.weight"] == (0,)
    assert [len(operators) > 0 for operators in step.needs] == [False, False, True, True]
    first, second, third = (stage_bytes(step, i, i + 1, to_the_end=False) for i in range(BLOCKS))
    # the second neither reads nor keeps it; the third has its input, and of the vector the cosine and the hidden layer
    assert second.kept - second.received == row + second.result
    assert third.kept - third.received == row + third.result + row + 4 * row
    of_block, weights = 4 * (WIDTH * WIDTH + WIDTH), 4 * (2 * 4 * WIDTH * WIDTH + 4 * WIDTH + WIDTH)
    assert second.gradients == of_block
    assert third.gradients == of_block + weights
    assert first.gradients == of_block + weights + of_block, "the layer before the blocks is of their size"
    rest = rest_bytes(step)
    assert rest.gradients == weights
    # a second pass of the block does not change what is made beside it
    again = stage_bytes(computed_again(step, [2]), 2, 3, to_the_end=False)
    assert again.gradients == third.gradients
    assert again.kept >= 5 * row


def test_all_chunks_count_where_some_are_run() -> None:
    with standing_for(3), standing_for(2):
        assert times_now() == 6
    assert times_now() == 1
    products = OperatorRates(matmul_flops=1.0, memory_bytes=float("inf"), overhead_seconds=0.0)
    torch.manual_seed(0)
    module, batch = Wide(), torch.randn(64, WIDTH)
    rules = [Rule(fqn="net.*", spec=ChunkBlock(budget_bytes=12_000), strategy="chunk", why="")]
    whole = count_step(module, batch, NAMES, rates=products).passes
    installed = install_rules(module, rules)
    chunked = count_step(module, batch, NAMES, rates=products).passes
    installed.undo()
    # the same products forward; backward once more those of the forward pass
    forward = [one.seconds[one.called[1] : one.first[2]].sum() for one in (whole, chunked)]
    backward = [one.seconds[one.segment == 1].sum() for one in (whole, chunked)]
    assert forward[0] == forward[1] == 2 * 2 * 64 * WIDTH * 10 * WIDTH
    assert backward[0] == 2 * forward[0]
    assert backward[1] == 3 * forward[0]
