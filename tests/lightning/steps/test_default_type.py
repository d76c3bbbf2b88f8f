"""Claim: what a technique computes again in the backward pass has the type that it had in the step."""

from typing import Any

import torch
from lightning.pytorch import LightningModule, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_amp.lightning.strategy.strategy import AMPStrategy
from tests.lightning.strategy.strategy_cases import trainer_of


class Block(nn.Module):
    """It makes a tensor without a type, which Lightning's precision "64-true" gives one during a step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.layer(x) * torch.linspace(0.1, 1, 4)).tanh()


class Stack(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trained(strategies: str) -> list[Tensor]:
    seed_everything(0)
    module = Stack()
    trainer = trainer_of(AMPStrategy(strategies=strategies), precision="64-true")
    trainer.fit(module, DataLoader(torch.randn(6, 4, dtype=torch.float64), batch_size=2))  # type: ignore[arg-type]
    assert torch.get_default_dtype() == torch.float32
    return list(module.state_dict().values())


def test_a_block_that_is_computed_again_makes_tensors_of_the_same_type() -> None:
    assert all(map(torch.equal, trained("S1,recompute"), trained("S1")))
