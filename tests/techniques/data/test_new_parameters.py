"""Claim: parameters that an optimizer gets after the plan is installed, or that no module has, are refused on several
ranks by name; no rank trains them by itself.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_amp.errors import PlanError
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from tests.lightning.strategy.strategy_cases import trainer_of
from tests.optimised import Optimised
from tests.ranks import run_ranks

pytestmark = [pytest.mark.ranks, pytest.mark.filterwarnings("ignore::UserWarning")]


class Grows(Optimised, by=torch.optim.SGD, lr=0.1):
    """Gets another layer at the start of the second epoch, or has one that is not registered."""

    def __init__(self, *, hidden: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))
        self.hidden = [nn.Linear(4, 4)] if hidden else []

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.more = nn.Linear(4, 4)
            self.optimizers().add_param_group({"params": [*self.more.parameters()]})  # type: ignore[union-attr]

    def loss(self, batch: Tensor) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        for layer in (*self.hidden, *([self.more] if self.current_epoch else [])):
            batch = layer(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), *(p for one in self.hidden for p in one.parameters())], lr=0.1)


def refused(rank: int, ranks: int, strategies: str, *, hidden: bool) -> str:
    module, options = Grows(hidden=hidden), {"max_epochs": 2, "max_steps": -1}
    data = [torch.randn(4, 4, generator=torch.Generator().manual_seed(k)) for k in range(2)]
    strategy = AMPStrategy(strategies=strategies, model_parallel_size=2 if strategies == "pipeline" else "auto")
    try:
        trainer_of(strategy, rank=rank, ranks=ranks, **options).fit(module, DataLoader(data, batch_size=None))  # type: ignore[arg-type]
    except PlanError as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize("strategies", ["S1", "fsdp", "pipeline"])
def test_a_layer_that_is_added_between_epochs_is_refused(strategies: str, tmp_path: Path) -> None:
    for said in run_ranks(partial(refused, hidden=False), 2, tmp_path, strategies):
        assert "trains 'more.weight', 'more.bias', which the module did not have" in said


def test_a_parameter_outside_of_the_module_is_refused(tmp_path: Path) -> None:
    for said in run_ranks(partial(refused, hidden=True), 2, tmp_path, "S1"):
        assert "trains one of shape (4, 4) outside the module, one of shape (4,) outside the module" in said
