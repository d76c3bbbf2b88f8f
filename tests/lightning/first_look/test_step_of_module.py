"""Claim: of a technique that refuses a module its diagnosis says why, and not that it helps."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_amp.footprint.profile_module import Around
from lightning_amp.lightning.first_look.step_of_module import StepOfModule
from lightning_amp.planning.modules.plan_module import diagnose_module
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


@pytest.mark.parametrize("sparse", [False, True])
def test_what_a_technique_refuses_is_said(sparse: bool) -> None:
    step = StepOfModule(Normalised(sparse=sparse), lambda: torch.arange(4), around=Around())
    found = diagnose_module(step.seen(CPU_CORE), ranks=2)
    assert "pipeline" not in found.helps
    assert "statistics of a batch (BatchNorm)" in found.does_not_help["pipeline"]
    assert ("fsdp" in found.helps) is not sparse
    if sparse:
        assert "have sparse gradients" in found.does_not_help["fsdp"]
