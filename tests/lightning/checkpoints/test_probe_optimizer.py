"""Claim: an optimiser whose update of an element depends on others is known before it trains a part of a parameter."""

from typing import Any

import torch
from torch import nn

from lightning_amp.lightning.checkpoints.probe_optimizer import mixes_elements


class ByNorm(torch.optim.Optimizer):
    """As LAMB: the step of a parameter is as long as the parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * p.grad * p.norm() / p.grad.norm())


class Plain(torch.optim.AdamW):
    pass


class Fails(Plain):
    def step(self, closure: Any = None) -> None:
        raise RuntimeError("only as it was made")


def test_an_optimiser_that_mixes_elements_is_known() -> None:
    for kind, right in ((ByNorm, True), (Plain, False), (Fails, None)):
        optimizer: Any = kind([nn.Parameter(torch.randn(3))])
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
        before = torch.random.get_rng_state()
        assert [mixes_elements(optimizer, flat=flat) for flat in (True, False)] == [right, right], kind
        assert torch.equal(torch.random.get_rng_state(), before)
        assert not optimizer.state
