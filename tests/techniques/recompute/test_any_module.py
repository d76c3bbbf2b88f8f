"""Claim: the eight unedited modules train to the same numbers with their blocks recomputed, in Lightning's own loop."""

import random
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from lightning_amp.footprint.find_blocks import find_blocks
from tests.any_module import NAMES, QUIET, make
from tests.techniques.recompute.test_recompute import recompute

STEPS = 3


class Seen(pl.Callback):
    """Gradients of every step, and what was logged."""

    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.found += [p.grad.clone() for p in module.parameters() if p.grad is not None]

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.found.append(trainer.callback_metrics["loss"].clone())


def as_double(batch: Any) -> Any:
    return torch.utils._pytree.tree_map(
        lambda t: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t, batch
    )


def trained(name: str, names: Any) -> list[Tensor]:
    module, batch = make(name)
    module.double()
    recompute(module, [fqn for fqn in find_blocks(module) if names(fqn)])
    seen = Seen()
    trainer = pl.Trainer(accelerator="cpu", max_epochs=1, **QUIET, callbacks=[seen])
    pl.seed_everything(3)
    trainer.fit(module, torch.utils.data.DataLoader([as_double(batch)] * STEPS, batch_size=None))
    return [*seen.found, *module.state_dict().values()]


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_eight_modules_train_to_the_same_numbers(name: str) -> None:
    draw = random.Random(0)
    expected = trained(name, lambda fqn: False)
    for chosen in (lambda fqn: True, lambda fqn: draw.random() < 0.5):
        found = trained(name, chosen)
        assert len(found) == len(expected) > 3 * STEPS
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)
