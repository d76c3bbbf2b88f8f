"""Claim: where the user's code checkpoints its blocks, a step that does not fit says so, and what may take less."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import lightning_amp
from tests.optimised import Optimised


class Stack(Optimised, by=torch.optim.SGD, lr=0.1):
    def __init__(self, own: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(4))
        self.own = own

    def loss(self, batch: Tensor) -> Tensor:
        x: Any = batch
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.own else block(x)
        return x.square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("own", [True, False])
def test_what_does_not_fit_is_told_of_its_own_checkpoints(own: bool) -> None:
    plan = lightning_amp.plan(Stack(own), batch=torch.randn(256, 16), device_memory="40 KiB").plan
    assert plan.fits is False
    assert any("with the checkpoints of its own code" in note for note in plan.notes) == own
