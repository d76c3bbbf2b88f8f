"""Claim: a plan with a pipeline runs exactly, or planning refuses it by name, with the same words in every process."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lightning_amp
from lightning_amp.errors import PlanError
from lightning_amp.footprint.chain.chain_of import CountedStep, count_step
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.techniques.fsdp.look import refusal as refusal_of_fsdp
from tests.odd_modules.collection.row import Row
from tests.odd_modules.collection.run import trained
from tests.odd_modules.collection.stages import BLOCKS, Batch, Net, batches
from tests.ranks import run_ranks

NAMES = tuple(f"blocks.{i}" for i in range(BLOCKS))


class ReadBefore(Net):
    """Norms of all weights, as one logs them."""

    def loss(self, batch: Batch) -> Tensor:
        with torch.no_grad():
            self.log("norm", torch.stack([p.norm() for p in self.parameters()]).norm())
        return super().loss(batch)


class ReadBetween(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = F.linear(block(h), self.blocks[0].linear.weight)
        return self.head(h)


class Copies(Net):
    """A target network, made in the first step."""

    target: Any = None

    def loss(self, batch: Batch) -> Tensor:
        if self.target is None:
            vars(self)["target"] = copy.deepcopy(self.blocks)
        h = aim = self.embed(batch["x"])
        for block, other in zip(self.blocks, self.target, strict=True):
            h = block(h)
            with torch.no_grad():
                aim = other(aim)
        return F.cross_entropy(self.head(h), batch["y"]) + F.mse_loss(h, aim)


class CopiesLater(Copies):
    """The same again in every step."""

    def loss(self, batch: Batch) -> Tensor:
        vars(self)["target"] = None
        return super().loss(batch)


class Functional(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = torch.func.functional_call(block, {n: 0.9 * p for n, p in block.named_parameters()}, (h,))
        return self.head(h)


class CallsTwice(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            super().forward(x)
        return super().forward(x)


class DrawsMask(Net):
    def loss(self, batch: Batch) -> Tensor:
        generator = torch.Generator().manual_seed(self.global_step)
        keep = (torch.rand(len(batch["x"]), 1, generator=generator) < 0.5).double()
        losses = F.cross_entropy(self(batch["x"] * keep), batch["y"], reduction="none")
        return (losses * (1 - keep[:, 0])).mean()


REFUSED: dict[type[Net], str] = {
    ReadBefore: "'blocks.0', or what precedes it, reads the parameter 'blocks.1.linear.weight' of block 'blocks.1'",
    ReadBetween: "'blocks.1', or what precedes it, reads the parameter 'blocks.0.linear.weight' of block 'blocks.0'",
    Copies: "makes a copy of the block 'blocks.0'",
    CopiesLater: "makes a copy of the block 'blocks.0'",
    CallsTwice: "called 8 of 4",
}


def counted(kind: type[Net]) -> CountedStep:
    return count_step(kind(), batches()[0], NAMES)


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_what_cannot_be_stages_is_refused_by_the_count(kind: type[Net]) -> None:
    assert REFUSED[kind] in counted(kind).no_stages


def planned(kind: type[Net], **options: Any) -> Plan:
    return lightning_amp.plan(kind(), batch=batches()[0], **options).plan


def test_draws_that_are_read_after_the_blocks_rule_out_micro_batches_only() -> None:
    found = counted(DrawsMask)
    assert not found.no_stages
    assert not isinstance(found.passes, str)
    assert "random numbers that the step draws before them" in found.passes.draws
    # four micro-batches are the default
    with pytest.raises(PlanError, match=r"draws before them, .* set micro_batches=1; or leave 'pipeline' out"):
        planned(DrawsMask, devices=2, strategies="pipeline", model_parallel_size=2)


def on_ranks(rank: int, ranks: int, kind: Callable[[], Net], micro_batches: int) -> dict[str, Tensor]:
    strategy = AMPStrategy(strategies="pipeline", micro_batches=micro_batches)
    return trained(Row(kind, batches), strategy, rank=rank, ranks=ranks)


@pytest.mark.ranks
def test_a_batch_with_such_draws_trains_exactly_as_one_micro_batch(tmp_path: Path) -> None:
    expected = {key: value for key, value in trained(Row(DrawsMask, batches)).items() if key.startswith("state")}
    for run in run_ranks(on_ranks, 2, tmp_path, DrawsMask, 1):
        for key, value in expected.items():
            torch.testing.assert_close(run[key], value, rtol=0, atol=1e-10)


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("of our own")


def test_an_unexpected_error_of_a_search_ends_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    told = "an unexpected error occurred while it was searched, RuntimeError: of our own; please report it"
    with monkeypatch.context() as patch:
        patch.setattr("lightning_amp.techniques.pipeline.stages.stages_of", broken)
        assert told in planned(Net, devices=2, strategies="pipeline", model_parallel_size=2).uncounted
    for name, look in (("replay", "replay.install"), ("chunk", "chunk.look")):
        with monkeypatch.context() as patch:
            patch.setattr(f"lightning_amp.techniques.{look}.look", broken)
            assert name not in planned(Net).strategies
            with pytest.raises(PlanError, match=f"{name} is not possible: {told}"):
                planned(Net, strategies=name)


class HeadReads(Net):
    """What follows the blocks calls a layer of the first one, as diffusers' DiT does."""

    def forward(self, x: Tensor) -> Tensor:
        h = first = self.embed(x)
        for block in self.blocks:
            h = block(h)
        return self.head(h * self.blocks[0].linear(first).sigmoid())


def test_parameters_that_are_read_after_the_blocks_are_of_two_segments() -> None:
    found = counted(HeadReads)
    assert not found.no_stages
    assert not isinstance(found.passes, str)
    places = {p.name: (p.block, p.segments) for p in found.passes.parameters}
    assert places["blocks.0.linear.weight"] == (None, (0, BLOCKS))
    assert places["blocks.1.linear.weight"] == (1, (1,))


class WithoutGradients(Net):
    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        with torch.no_grad():
            for block in self.blocks:
                h = block(h)
        return self.head(h)


def test_blocks_without_gradients_are_not_counted_and_not_refused() -> None:
    found = counted(WithoutGradients)
    assert not found.no_stages
    assert "0 were called with gradients" in str(found.passes)


def test_a_copy_is_told_from_a_functional_call() -> None:
    for kind in (Copies, CopiesLater):
        assert "makes a copy of the block" in refusal_of_fsdp(kind(), counted(kind), values=True)
    assert "torch.func.functional_call" in refusal_of_fsdp(Functional(), counted(Functional), values=True)


class Pairs(Net):
    """Layers in pairs, as in vit_pytorch."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]) for _ in range(4)).double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for pair in self.blocks:
            assert isinstance(pair, nn.ModuleList)
            h = h + pair[1](pair[0](h).tanh())
        return self.head(h)


def test_a_list_of_lists_is_refused_in_planning() -> None:
    with pytest.raises(PlanError, match="'blocks' is a list of lists \\('0' is a 'ModuleList'\\)"):
        lightning_amp.plan(Pairs(), batch=batches()[0], devices=2, strategies="pipeline", model_parallel_size=2)


class Masked(Net):
    """Its loss is no mean over samples, which both ranks say."""

    def loss(self, batch: Batch) -> Tensor:
        return F.cross_entropy(self(batch["x"]), batch["y"].masked_fill(torch.arange(len(batch["y"])) == 0, -100))


class WritesAfter(Net):
    """Adds to the last block's result in place, as vit_pytorch's SimpleViT does."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = block(h)
        h += 1
        return self.head(h)


SAID: dict[type[Net], str] = {
    Masked: "it is no mean over samples",
    WritesAfter: "writes in place into the result of the last one",
}


def ended(rank: int, ranks: int, kind: type[Net]) -> tuple[str, dict[str, Tensor]]:
    module, said = kind(), ""
    try:
        on_ranks(rank, ranks, lambda: module, 3)
    except Exception as error:
        said = str(error)
    return said, dict(module.state_dict())


@pytest.mark.ranks
@pytest.mark.parametrize("kind", SAID, ids=lambda kind: kind.__name__)
def test_after_an_error_of_all_ranks_a_module_is_whole(kind: type[Net], tmp_path: Path) -> None:
    before = kind().state_dict()
    for said, state in run_ranks(ended, 2, tmp_path, kind):
        assert SAID[kind] in said
        for name, value in before.items():
            assert torch.equal(state[name], value), name


def refused(rank: int, ranks: int) -> list[str]:
    said = []
    for kind in (Copies, CallsTwice, DrawsMask):
        with pytest.raises(PlanError) as error:
            on_ranks(rank, ranks, kind, 3)
        said.append(str(error.value))
    return said


@pytest.mark.ranks
def test_the_refusal_is_in_planning_and_the_same_on_all_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(refused, 2, tmp_path)
    assert first == second
    assert all("pipeline cannot run this step" in text for text in first)
