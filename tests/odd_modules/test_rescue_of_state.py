"""Claim: a batch that runs again after running out of memory leaves no trace of its first pass, wherever the step keeps
state; where something cannot be put back, the error names it.
"""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_amp.lightning.strategy.strategy import AMPStrategy
from tests.lightning.strategy.strategy_cases import trainer_of
from tests.optimised import Optimised

SEEN = {"steps": 0}
DATA = [torch.randn(6, 8, generator=torch.Generator().manual_seed(k), dtype=torch.float64) for k in range(4)]


class Tracker:
    def __init__(self) -> None:
        self.steps, self.means = 0, np.zeros(3)


class Remembers(Optimised):
    """A key encoder that follows the blocks, a centre, counters and lists, which every step changes."""

    steps = 0

    def __init__(self, ends: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(4))
        self.double()
        self.key = copy.deepcopy(self.blocks).requires_grad_(False)
        self.hidden = [copy.deepcopy(self.blocks[0])]
        self.ptr, self.queue, self.centre = 0, {"losses": [0.0]}, torch.zeros(8, dtype=torch.float64)
        # an iterator, because a rescue puts attributes back
        self.ends, self.tracker, self.once = ends, Tracker(), iter(range(1))

    def loss(self, batch: Tensor) -> Tensor:
        self.ptr += 1
        self.tracker.steps += 1
        self.tracker.means += self.ptr
        type(self).steps += 1
        SEEN["steps"] += 1
        with torch.no_grad():
            for k, q in zip(self.key.parameters(), self.blocks.parameters(), strict=True):
                k.data = 0.9 * k.data + 0.1 * q.data + 0.01 * self.ptr
            for k, q in zip(self.hidden[0].parameters(), self.blocks[0].parameters(), strict=True):
                k.mul_(0.9).add_(0.1 * q)
            self.blocks[1][0].weight.mul_(0.99)
            self.centre.mul_(0.9).add_(0.1 * batch.mean(0))
        batch -= batch.mean(0)
        self.blocks.eval()
        x = y = batch - self.centre
        for block, key in zip(self.blocks, self.key, strict=True):
            x, y = x + block(x), y + key(y).detach()
        self._end()
        self.blocks.train()
        loss = F.mse_loss(x, y + self.hidden[0](batch).detach())
        self.queue["losses"].append(float(self.ptr))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.blocks.parameters(), lr=0.05)

    def _end(self) -> None:
        # not in the profile, which runs the step of a copy
        here = self._trainer is not None and isinstance(self.trainer.strategy, AMPStrategy)
        if here and self.ends == self.ptr and next(self.once, None) is not None:
            raise torch.OutOfMemoryError("tried to allocate 3 GiB")


def fit(module: Remembers, strategy: Any) -> list[Any]:
    SEEN["steps"] = type(module).steps = 0
    batches = [batch.clone() for batch in DATA]
    trainer_of(strategy, max_steps=4).fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    kept = [*module.parameters(), *module.hidden[0].parameters(), module.centre, *batches]
    counted = [module.ptr, module.tracker.steps, *module.tracker.means, type(module).steps, SEEN["steps"]]
    return [[tensor.detach().clone() for tensor in kept], counted, module.queue, module.blocks[0].training]


@pytest.mark.parametrize("batch", [1, 3])
def test_a_batch_that_runs_again_leaves_no_trace_of_its_first_pass(batch: int) -> None:
    plain = fit(Remembers(), "auto")
    with pytest.warns(UserWarning, match="which now runs again"):
        found = fit(Remembers(batch), AMPStrategy(rescue=True))
    assert found[1:] == plain[1:]
    torch.testing.assert_close(found[0], plain[0], rtol=1e-12, atol=1e-14)


class Late(Remembers):
    """Moves a parameter in a later step only, which the profile of the second step does not see."""

    def loss(self, batch: Tensor) -> Tensor:
        if self.ptr == 2:
            with torch.no_grad():
                self.blocks[2][2].bias.add_(1)
        return super().loss(batch)


def test_what_cannot_be_put_back_is_named() -> None:
    with pytest.raises(
        torch.OutOfMemoryError, match=r"cannot run this batch again: .*changed 'blocks\.2\.2\.bias', which"
    ):
        fit(Late(3), AMPStrategy(rescue=True))
