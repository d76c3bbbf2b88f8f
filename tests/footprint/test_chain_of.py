"""Claim: a chain counted once says the peak of every choice of recomputed blocks; the judge is the meter on a real step
of the module with that choice installed."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_amp.footprint.chain.chain import Chain, peak_bytes
from lightning_amp.footprint.chain.chain_of import count_step
from lightning_amp.footprint.module_profile import ModuleProfile
from lightning_amp.footprint.profile_module import profile_module
from tests.footprint.test_profile_module import Small, measured
from tests.techniques.recompute import nasty
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
        return F.cross_entropy(x, batch[1])


def chained(*blocks: nn.Module, order: Sequence[int] = ()) -> Chained:
    torch.manual_seed(0)
    module = Chained(nn.ModuleList(blocks))
    module.order = order
    return module


def batch_of(rows: int = 300, classes: int = nasty.DIM) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, nasty.DIM), torch.randint(classes, (rows,))


class Two(nn.Module):
    """A branch of its own beside the stream, whose result is saved here and by the next block."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(nasty.DIM, nasty.DIM)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.a(x))


def ways() -> dict[str, Chained]:
    p = nasty.Plain
    return {
        "residual": chained(p(), p(), p(), p()),
        "shared with the next": chained(Two(), Two(), nn.Dropout(0.2), Two()),
        "in place": chained(p(), nn.ReLU(inplace=True), p()),
        "called twice": chained(p(), p(), order=(0, 1, 0)),
        "a custom Function": chained(p(), nasty.Custom(), p()),
        "inner memory": chained(nasty.SideLoss(), nasty.BatchNorm(), nasty.SideLoss()),
    }


@pytest.mark.parametrize("name", ways())
def test_the_peak_of_every_choice_in_small_chains(name: str) -> None:
    chain = chain_of(ways()[name], batch_of())
    assert chain.measured == "fake tensors", chain.reason
    for names in choices(chain):
        expected = real_peak(ways()[name], batch_of(), names)
        assert peak_bytes(chain, names) == pytest.approx(expected, rel=0.02), names


class Manual(Small):
    """Two networks, two optimisers, one backward pass after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.ModuleList(nasty.Plain() for _ in range(3))
        self.other = nn.ModuleList(nasty.Plain() for _ in range(4))

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
    """Looks at a value."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * 2 if loss.item() > 0 else loss


def test_a_step_that_needs_values_is_counted_with_values() -> None:
    def make_one() -> Looks:
        return Looks(nn.ModuleList(nasty.Plain() for _ in range(4)))

    chain = chain_of(make_one(), batch_of())
    assert chain.measured == "a real step"
    assert "reads the value of a tensor" in chain.reason
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
            "a real step": lambda: Looks(nn.ModuleList(nasty.Plain() for _ in range(4))),
            "a saved gradient": lambda: chained(nasty.Plain(), Gives(), nasty.Plain()),
        }
        return others[name]() if name in others else ways()[name]

    found = count_step(make_one(), batch_of(), ()).profile
    assert bytes_of(found) == bytes_of(profile_module(make_one(), batch_of()))


def test_what_cannot_run_twice_stays_and_says_why() -> None:
    module = chained(nasty.Plain(), nasty.Remembers(), nasty.Hooked(), nn.ReLU(inplace=True), nasty.Plain())
    chain = chain_of(module, batch_of())
    found = {block.fqn: block.fixed for block in chain.blocks}
    assert found["net.0"] == found["net.4"] == ""
    assert "argument 0 in place" in found["net.3"]
    assert "forward_hooks, which would run twice" in found["net.2"]
    assert chain.names == ("net.0", "net.4")
