"""Chunks are chosen with the rates of the device that a plan is for, and the shown code is the code that runs."""

import warnings
from dataclasses import replace
from functools import cache

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

import lightning_amp
from lightning_amp.costs.device_rates import rates_for
from lightning_amp.errors import InstallError
from lightning_amp.lightning.profiling.module_plan import ModulePlan
from lightning_amp.techniques.chunk.row import ChunkBlock
from lightning_amp.techniques.chunk.run import in_chunks
from lightning_amp.techniques.chunk.run.chunk_module import chunk_block
from tests.each import BEFORE_A_RELEASE

DIM, SIDE = 8, 24


class Triangle(nn.Module):
    """A product over pairs between two sets of gates: several regions compete, and launches count on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.left, self.right = nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(DIM, 2 * DIM)
        self.gate, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        """Pairs [batch, i, j, DIM]."""
        y = self.norm(x)
        (a, b), (c, d) = self.left(y).chunk(2, -1), self.right(y).chunk(2, -1)
        one, two = a * b.sigmoid(), c * d.sigmoid()
        x = x + self.out(torch.einsum("bikd,bjkd->bijd", one, two)) * self.gate(y).sigmoid()
        return x + nn.functional.gelu(self.left(x)).square().sum(-1, keepdim=True)


class Pairs(pl.LightningModule):
    """Two such blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Triangle() for _ in range(2))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Mean square of the last block's result."""
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


@cache
def planned(rates: str, share: float = 0.6) -> ModulePlan:
    torch.manual_seed(0)
    module, batch = Pairs(), torch.randn(2, SIDE, SIDE, DIM)
    # the context of a GPU alone is larger than this step
    of_tensors = replace(rates_for(rates), memory=None)
    whole = lightning_amp.plan(module, batch, rates=of_tensors).plan.predicted_peak_bytes
    return lightning_amp.plan(module, batch, device_memory=int(share * whole), strategies="chunk", rates=of_tensors)


def specs(made: ModulePlan) -> list[ChunkBlock]:
    return [rule.spec for rule in made.plan.rules if isinstance(rule.spec, ChunkBlock)]


def codes_that_run(made: ModulePlan) -> set[str]:
    """The code of all blocks in chunks, as the module's own step runs it on a CPU."""
    module = made.step.module
    run = made.step.run_with(made.plan.rules[1:], lambda module, batch, **_: module.training_step(batch.clone(), 0))
    run.backward()
    assert all(p.grad is not None for p in module.parameters())
    wanted = {spec.budget_bytes for spec in specs(made)}
    return {plan.chunks.code[""] for key, plan in made.step._chunk_plans.items() if key[0] in wanted}


@pytest.mark.parametrize("runs_on", ["H100", pytest.param("cpu", marks=BEFORE_A_RELEASE)])
def test_the_regions_are_those_of_the_device_that_the_plan_is_for(
    runs_on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the machine that carries out the plan has other rates in one of the two cases
    monkeypatch.setattr(in_chunks, "rates_of", lambda device: (rates_for(runs_on), ""))
    shown: dict[str, str] = {}
    for rates in ("cpu", "H100"):
        made = planned(rates)
        found = {spec.speed for spec in specs(made)}
        assert {one.matmul_flops for one in found if one} == {rates_for(rates).matmul_flops}
        with made.counting():
            shown[rates] = made.code()
            ran = codes_that_run(made)
        assert ran
        assert all(code in shown[rates] for code in ran)
    # for other rates other regions are best
    assert shown["cpu"] != shown["H100"]


def test_what_a_plan_says_of_a_device_is_what_the_counted_step_takes_there() -> None:
    made = planned("H100")
    with made.counting():
        plain, step = made.step.step(), made.step.step_with(made.plan.rules[1:])
    said = made.plan.predicted_step_seconds / plain.chain.seconds
    assert said == pytest.approx(step.chain.seconds / plain.chain.seconds, rel=0.15)


def test_a_spec_without_rates_takes_those_of_the_device_that_runs() -> None:
    assert ChunkBlock(budget_bytes=9).speed is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chunk_block(Triangle(), ChunkBlock(budget_bytes=9), None)
    for wrong in ({"policy": "cheap"}, {"matmul_flops": 1.0}, {"matmul_flops": -1.0, "memory_bytes": 1.0}):
        with pytest.raises(InstallError, match="allowed are"):
            chunk_block(Triangle(), ChunkBlock(budget_bytes=9, **wrong), None)  # type: ignore[arg-type]
