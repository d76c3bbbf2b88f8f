"""Claim: what a module holds as functions, its classes and its files are after a profile as they were before it."""

from collections.abc import Callable
from functools import cache
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

import lightning_amp

FEATURES: list[Tensor] = []
TABLES: dict[int, Tensor] = {}


@cache
def table(n: int) -> Tensor:
    return torch.linspace(0.0, 1.0, n)


class Closing(pl.LightningModule):
    """Functions of every kind that know the module, or something that it holds."""

    n_steps = 0
    newest: Tensor | None = None

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
        self.scale, self.calls = nn.Parameter(torch.ones(2)), 0
        self.twice = 2 * self.scale
        self.seen: list[Tensor] = []
        hidden: list[Tensor] = []
        count = 0

        def keep(module: nn.Module, given: Any, got: Tensor) -> None:
            nonlocal count
            count += 1
            self.calls += 1
            self.seen.append(got)
            hidden.append(got)
            FEATURES.append(got)

        def taken() -> Tensor:
            parts = [part.square().mean() / count for part in (*hidden, *self.seen)]
            hidden.clear()
            return self.scale.sum() * torch.stack(parts).sum()

        plain = self.net[2].forward
        self.net[0].register_forward_hook(keep)
        self.taken = taken
        self.net[2].forward = lambda x, plain=plain, scale=self.scale: plain(x) * scale  # type: ignore[method-assign]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        kind = type(self)
        kind.n_steps += 1
        TABLES.setdefault(2, torch.ones(2))
        kind.newest = self.net(batch) * table(2) * TABLES[2]
        loss = kind.newest.square().mean() + self.taken() / kind.n_steps
        self.seen.clear()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class NeedsValues(Closing):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if loss.item() > 0 else -loss


def fitted(kind: type[Closing], look: Callable[[Closing, Tensor], Any]) -> list[Any]:
    """Three steps by hand after a look at the module: losses, parameters, and what is kept beside them."""
    torch.manual_seed(0)
    module, batch = kind(), torch.randn(5, 4)
    look(module, batch)
    assert all(p.grad is None for p in module.parameters())
    optimizer, losses = module.configure_optimizers(), []
    for k in range(3):
        optimizer.zero_grad()
        loss = module.training_step(batch, k)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    kept = [kind.n_steps, module.calls, len(FEATURES), len(module.seen), *map(type, [*FEATURES, *TABLES.values()])]
    FEATURES.clear()
    TABLES.clear()
    table.cache_clear()
    kind.n_steps, kind.newest = 0, None
    return [losses, [p.tolist() for p in module.parameters()], kept]


@pytest.mark.parametrize("kind", [Closing, NeedsValues])
def test_a_profile_leaves_no_trace(kind: type[Closing]) -> None:
    assert fitted(kind, lightning_amp.profile) == fitted(kind, lambda *_: None)
