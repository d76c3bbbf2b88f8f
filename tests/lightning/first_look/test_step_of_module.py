"""Claim: of a technique that refuses a module the diagnosis says why, not that it helps; how a stream gives a batch."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_amp.errors import DataError
from lightning_amp.footprint.inner_run import Around
from lightning_amp.footprint.profile_module import profile_module
from lightning_amp.lightning.first_look import step_of_module
from lightning_amp.lightning.first_look.example_batch import example_batch
from lightning_amp.lightning.first_look.step_of_module import StepOfModule
from lightning_amp.planning.modules.plan_module import diagnose_module
from lightning_amp.planning.plan.plan import Rule
from lightning_amp.planning.plan.specs import ChunkBlock, RecomputeBlock
from lightning_amp.planning.time.device_rates import CPU_CORE
from tests.lightning.strategy.any_module_cases import Small


class Normalised(Small):
    """Blocks that normalise by the batch."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(40, 40), nn.BatchNorm1d(40)) for _ in range(6))
        self.net = nn.Sequential(nn.Embedding(50, 40, sparse=sparse), *blocks)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Blocks(Normalised):
    """Blocks of which some can run again, or in chunks."""

    def __init__(self) -> None:
        super().__init__(sparse=False)
        blocks = (nn.Sequential(nn.Linear(40, 160), nn.Tanh(), nn.Linear(160, 40)) for _ in range(3))
        self.net = nn.Sequential(*blocks)


STRATEGY_OF: dict[type, str] = {RecomputeBlock: "recompute", ChunkBlock: "chunk"}


@pytest.mark.parametrize("sparse", [False, True])
def test_what_a_technique_refuses_is_said(sparse: bool) -> None:
    step = StepOfModule(Normalised(sparse=sparse), lambda: torch.arange(4), around=Around())
    found = diagnose_module(step.seen(CPU_CORE), ranks=2)
    assert "pipeline" not in found.helps
    assert "statistics of a batch (BatchNorm)" in found.does_not_help["pipeline"]
    assert ("fsdp" in found.helps) is not sparse
    if sparse:
        assert "have sparse gradients" in found.does_not_help["fsdp"]


def test_the_same_rules_are_counted_once_for_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []
    monkeypatch.setattr(
        step_of_module, "profile_module", lambda *a, **k: counted.append(1) or profile_module(*a, **k)
    )

    def count(wanted: RecomputeBlock | ChunkBlock) -> int:
        own = {"spec": wanted, "strategy": STRATEGY_OF[type(wanted)], "why": ""}
        return step.count([Rule(fqn=f"net.{n}", **own) for n in range(3)]).peak_bytes

    step = StepOfModule(Blocks(), lambda: torch.randn(2048, 40), around=Around())
    step.take()
    wanted = RecomputeBlock(), ChunkBlock(budget_bytes=3 * 2**20), ChunkBlock(budget_bytes=2**20)
    found = [count(spec) for spec in wanted]
    assert len(set(found)) == 3, "each of them takes other bytes"
    assert [count(spec) for spec in wanted] == found
    assert len(counted) == 3
    step.take()
    assert count(wanted[0]) == found[0]
    assert len(counted) == 4, "another batch"


def test_a_stream_is_profiled_by_a_batch_that_its_loader_gives() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            raise AssertionError("training would miss what is read here")

    loader: Any = DataLoader(Stream(), batch_size=4)
    with pytest.raises(
        DataError, match=r"a stream \('Stream'\).* give the loader a method amp_example_batch"
    ):
        example_batch(loader)
    loader.amp_example_batch = lambda: torch.ones(4, 3)
    assert torch.equal(example_batch(loader), torch.ones(4, 3))
