"""Claim: chunk is planned under autocast with masks made outside of blocks, and refused by name where it cannot run."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F

import lightning_amp
from lightning_amp.errors import PlanError
from lightning_amp.techniques.chunk import look
from lightning_amp.techniques.technique import result_or_reason


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, mask))


class Model(LightningModule):
    """Blocks of attention with one mask, in the dtype of autocast; with a penalty on gradients where that is asked."""

    def __init__(self, *, penalty: bool = False) -> None:
        super().__init__()
        self.blocks, self.penalty = nn.ModuleList([Masked() for _ in range(3)]), penalty

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        x = x.detach().requires_grad_(self.penalty)
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
        mask, y = torch.zeros(x.shape[1], x.shape[1], dtype=dtype), x
        for block in self.blocks:
            y = block(y, mask)
        loss = y.float().pow(2).mean()
        if self.penalty:
            (grad,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = loss + grad.pow(2).sum()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def planned(model: LightningModule, share: float, **options: Any) -> Any:
    batch = torch.randn(2, 128, 32)
    peak = lightning_amp.plan(model, batch, precision=options.get("precision")).profile.peak_bytes
    return lightning_amp.plan(model, batch, device_memory=int(share * peak), **options)


def test_a_mask_in_the_dtype_of_autocast_is_planned() -> None:
    found = planned(Model(), 0.6, precision="bf16-mixed", strategies="chunk")
    assert found.plan.strategies == ("S1", "chunk")


def test_a_penalty_on_gradients_is_refused_in_planning() -> None:
    with pytest.raises(PlanError, match=r"chunk is not possible: .*a second derivative is not supported"):
        planned(Model(penalty=True), 0.6, strategies="chunk")


def test_an_error_in_a_search_is_a_reason_and_ends_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Any) -> None:
        raise RuntimeError("of our own")

    monkeypatch.setattr(look, "table_of", broken)
    found = planned(Model(), 0.6)
    assert "chunk" not in found.plan.strategies
    assert "unexpected error occurred while it was searched, RuntimeError: of our own" in "".join(found.plan.notes)
    with pytest.raises(PlanError, match="RuntimeError: of our own"):
        planned(Model(), 0.6, strategies="chunk")


def test_a_refusal_stays_a_refusal() -> None:
    def refuse() -> None:
        raise PlanError("no")

    with pytest.raises(PlanError, match="no"):
        result_or_reason(refuse)


class Counts(Masked):
    """Reads the number of the step of the module that owns it, through a list."""

    def __init__(self) -> None:
        super().__init__()
        self.owner: list[Any] = []

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x, mask) * (1 + self.owner[0].global_step)


def test_a_block_that_reads_the_number_of_the_step_is_refused_in_planning() -> None:
    model = Model()
    model.blocks = nn.ModuleList([Counts() for _ in range(3)])
    for block in model.blocks:
        block.owner.append(model)
    with pytest.raises(PlanError, match="reads 'global_step' of the Trainer, which changes from step to step"):
        planned(model, 0.6, strategies="chunk")
    assert "chunk" not in planned(model, 0.6).plan.strategies
