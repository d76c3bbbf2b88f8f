"""Claim: a chain counted once says the peak of every choice of recomputed blocks; the judge is the meter on a real step
of the module with that choice installed."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_amp.costs.choose_forms import choose
from lightning_amp.costs.rule import Rule
from lightning_amp.footprint.chain.chain import Chain, peak_bytes
from lightning_amp.footprint.chain.chain_of import count_step
from lightning_amp.footprint.chain.passes import Passes
from lightning_amp.footprint.module_profile import ModuleProfile
from lightning_amp.footprint.operator_rates import OperatorRates, standing_for, times_now
from lightning_amp.footprint.profile_module import profile_module
from lightning_amp.installing.install import install_rules
from lightning_amp.techniques.chunk.row import ChunkBlock
from lightning_amp.techniques.pipeline.schedule.stage_bytes import rest_bytes, stage_bytes
from lightning_amp.techniques.pipeline.stage_forms import computed_again
from tests.any_module import NAMES, make
from tests.footprint.test_profile_module import Small, measured
from tests.odd_modules.collection.blocks import DIM, Plain
from tests.odd_modules.collection.hooks import Custom, Hooked
from tests.odd_modules.collection.random_numbers import GENERATOR, GlobalGenerator, MakesGenerator, OwnTorchGenerator
from tests.odd_modules.collection.state import BatchNorm, Remembers, SideLoss
from tests.techniques.recompute.test_recompute import recompute


def chain_of(module: Any, batch: Any) -> Chain:
    return count_step(module, batch, ()).chain


def choices(chain: Chain) -> list[tuple[str, ...]]:
    """None, all, every second, and some at random."""
    draw = random.Random(0)
    some = tuple(n for n in chain.names if draw.random() < 0.5)
    return list(dict.fromkeys([(), chain.names, chain.names[::2], some]))


def real_peak(module: Any, batch: Any, names: Sequence[str]) -> int:
    installed = recompute(module, names)
    try:
        return measured(module, batch)
    finally:
        installed.undo()


class Chained(Small):
    """Blocks one after the other, or as `order` says."""

    order: Sequence[int] = ()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        for k in self.order or range(len(self.net)):
            x = self.net[k](x)
        return F.cross_entropy(x, batch[1]) + sum(getattr(block, "side", 0) for block in self.net)


def chained(*blocks: nn.Module, order: Sequence[int] = ()) -> Chained:
    torch.manual_seed(0)
    module = Chained(nn.ModuleList(blocks))
    module.order = order
    return module


def batch_of(rows: int = 300, classes: int = DIM) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, DIM), torch.randint(classes, (rows,))


class Unused(Chained):
    """What blocks leave in attributes is in no loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])


def unused() -> Unused:
    torch.manual_seed(0)
    return Unused(nn.Sequential(SideLoss(), BatchNorm(), Plain(), SideLoss()))


class Two(nn.Module):
    """A branch of its own beside the stream, whose result is saved here and by the next block."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.a(x))


def ways() -> dict[str, Chained]:
    p = Plain
    return {
        "residual": chained(p(), p(), p(), p()),
        "shared with the next": chained(Two(), Two(), nn.Dropout(0.2), Two()),
        "in place": chained(p(), nn.ReLU(inplace=True), p()),
        "called twice": chained(p(), p(), order=(0, 1, 0)),
        "a custom Function": chained(p(), Custom(), p()),
        "inner memory": chained(SideLoss(), BatchNorm(), SideLoss()),
        "inner memory that no loss uses": unused(),
    }


@pytest.mark.parametrize("name", ways())
def test_the_peak_of_every_choice_in_small_chains(name: str) -> None:
    step = count_step(ways()[name], batch_of(), ())
    chain = step.chain
    assert step.profile.measured == "fake tensors", step.profile.reason
    for names in choices(chain):
        expected = real_peak(ways()[name], batch_of(), names)
        assert peak_bytes(chain, names) == pytest.approx(expected, rel=0.02), names


class Halved(Chained):
    """Copies of its weights live until autocast ends, after the blocks and before the backward pass."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().training_step(batch, batch_idx)


def test_copies_of_weights_by_autocast_count_while_they_are_there() -> None:
    def make_one() -> Halved:
        torch.manual_seed(0)
        return Halved(nn.ModuleList(Plain() for _ in range(4)))

    chain = chain_of(make_one(), batch_of(30))
    assert peak_bytes(chain, ()) == measured(make_one(), batch_of(30))
    for names in choices(chain):
        assert peak_bytes(chain, names) == pytest.approx(real_peak(make_one(), batch_of(30), names), rel=0.02), names


class Manual(Small):
    """Two networks, two optimisers, one backward pass after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.ModuleList(Plain() for _ in range(3))
        self.other = nn.ModuleList(Plain() for _ in range(4))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for blocks, optimizer in zip((self.net, self.other), self.optimizers(), strict=True):
            x = batch[0]
            for block in blocks:
                x = block(x)
            optimizer.zero_grad()
            self.manual_backward(F.cross_entropy(x, batch[1]))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(blocks.parameters()) for blocks in (self.net, self.other)]


def test_two_backward_passes_do_not_add_up() -> None:
    chain = chain_of(Manual(), batch_of())
    assert {moment.first for moment in chain.moments} == {0, 3}
    for names in choices(chain):
        assert peak_bytes(chain, names) == pytest.approx(real_peak(Manual(), batch_of(), names), rel=0.02)


class Looks(Chained):
    """Looks at gradients, which no forward pass knows."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None and parameter.grad.sum() > 0:
                parameter.grad.mul_(1)


class LooksIntoMemory(Chained):
    """Reads gradients without an operator, so that no note can tell."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert all(len(p.grad.untyped_storage().tolist()) for p in self.parameters() if p.grad is not None)


class LooksAhead(Chained):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * 2 if loss.item() > 0 else loss


@pytest.mark.parametrize(
    ("kind", "how"), [(Looks, "fake tensors"), (LooksIntoMemory, "a real step"), (LooksAhead, "fake tensors")]
)
def test_a_step_that_needs_values_is_counted_with_values(kind: type[Chained], how: str) -> None:
    def make_one() -> Chained:
        return kind(nn.ModuleList(Plain() for _ in range(4)))

    step = count_step(make_one(), batch_of(), ())
    chain = step.chain
    assert (step.profile.measured, step.profile.noted) == (how, how == "fake tensors")
    assert ("reads the value of a tensor" in step.profile.reason) == (how == "fake tensors")
    for names in choices(chain):
        assert peak_bytes(chain, names) == pytest.approx(real_peak(make_one(), batch_of(), names), rel=0.05)


class Given(torch.autograd.Function):
    """Its gradient is what it has saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x * 2)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return ctx.saved_tensors[0]


class Gives(nn.Module):
    """Its gradient is no tensor of the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(Given.apply(x))


def bytes_of(profile: ModuleProfile) -> ModuleProfile:
    """Without the number of operators, of which some make no tensor."""
    return replace(profile, timeline=tuple(replace(moment, n_operators=1) for moment in profile.timeline))


@pytest.mark.parametrize("name", [*ways(), "two optimisers", "a real step", "a saved gradient"])
def test_a_step_counted_for_its_blocks_tells_all_that_a_profile_does(name: str) -> None:
    def make_one() -> Any:
        others = {
            "two optimisers": Manual,
            "a real step": lambda: LooksIntoMemory(nn.ModuleList(Plain() for _ in range(4))),
            "a saved gradient": lambda: chained(Plain(), Gives(), Plain()),
        }
        return others[name]() if name in others else ways()[name]

    found = count_step(make_one(), batch_of(), ()).profile
    assert bytes_of(found) == bytes_of(profile_module(make_one(), batch_of()))


def test_what_cannot_run_twice_stays_and_says_why() -> None:
    module = chained(Plain(), Remembers(), Hooked(), nn.ReLU(inplace=True), Plain())
    chain = chain_of(module, batch_of())
    found = {block.fqn: block.fixed for block in chain.blocks}
    assert found["net.0"] == found["net.4"] == ""
    assert "argument 0 in place" in found["net.3"]
    assert "forward_hooks, which would run twice" in found["net.2"]
    assert chain.names == ("net.0", "net.4")


def test_a_generator_of_a_block_stays_where_it_was_and_is_seen() -> None:
    GENERATOR.manual_seed(7)
    module = chained(OwnTorchGenerator(), MakesGenerator(), GlobalGenerator(), Plain())
    before = [generator.get_state() for generator in (module.net[0].generator, GENERATOR)]
    chain = chain_of(module, batch_of())
    assert chain.names == ("net.1", "net.2", "net.3")
    assert "'generator' holds, which cannot be put back" in chain.blocks[0].fixed
    after = [generator.get_state() for generator in (module.net[0].generator, GENERATOR)]
    assert all(map(torch.equal, before, after))


WIDTH, BLOCKS = 6, 3
NETS = tuple(f"net.{k}" for k in range(BLOCKS))


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
    return count_step(kind(), torch.randn(rows, WIDTH), NETS).passes


def found(kind: type[Small], rows: int = 8) -> Passes:
    made = passes(kind, rows)
    assert isinstance(made, Passes), made
    return made


def test_segments_have_their_operators_and_parameters() -> None:
    step = found(Tied)
    assert (step.rows, step.names) == (8, NETS)
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
    masking = passes(Masking)
    assert isinstance(masking, Passes)
    assert "random numbers that the step draws before them" in masking.draws


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
    whole = count_step(module, batch, NETS, rates=products).passes
    installed = install_rules(module, rules)
    chunked = count_step(module, batch, NETS, rates=products).passes
    installed.undo()
    # the same products forward; backward once more those of the forward pass
    forward = [one.seconds[one.called[1] : one.first[2]].sum() for one in (whole, chunked)]
    backward = [one.seconds[one.segment == 1].sum() for one in (whole, chunked)]
    assert forward[0] == forward[1] == 2 * 2 * 64 * WIDTH * 10 * WIDTH
    assert backward[0] == 2 * forward[0]
    assert backward[1] == 3 * forward[0]


@pytest.mark.full
@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_peak_of_a_choice_in_eight_modules(name: str) -> None:
    """All blocks are computed again, or those that are chosen for a budget, within which the module trains."""
    step = count_step(*make(name), ())
    chain = step.chain
    assert step.profile.measured == "fake tensors", step.profile.reason
    assert [block.fixed for block in chain.blocks if block.fixed] == []
    budget = peak_bytes(chain, ()) * 3 // 4
    chosen = choose(chain, budget)
    assert (chosen is None) == (name in ("wide_mlp", "gpt2"))
    for names in [chain.names, *([chosen.recomputed] if chosen else [])]:
        module, batch = make(name)
        found, real = peak_bytes(chain, names), real_peak(module, batch, names)
        assert found == pytest.approx(real, rel=0.01), names
        assert not chosen or names != chosen.recomputed or (names and real <= 1.01 * budget)
        recompute(module, names)
        # 2 kB: what batch norm's statistics need to be put back
        assert found == pytest.approx(profile_module(module, batch).peak_bytes, abs=2000), names
