"""Gradients of the last step are freed before `training_step` where nothing reads them, in the plan as in the run."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_amp
from lightning_amp.errors import ModelError
from tests.any_module import QUIET, Meter

WIDTH, ROWS, BATCHES = 64, 48, 4


class Plain(pl.LightningModule):
    """Three layers, and a metric whose temporaries make the end of the forward pass the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))).double()
        self.seen: list[Any] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        predicted = self.net(batch)
        self.log("spread", (predicted.detach().repeat(1, 4) ** 2).mean())
        return predicted.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 1e-2)


class Converts(Plain):
    """Converts its layers in the step, for which torch itself looks at gradients."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.net = self.net.to(batch.dtype)
        return super().training_step(batch, batch_idx)


class ReadsInStep(Plain):
    """Reads a gradient of the last step in every training step."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        found = self.net[0].weight.grad
        self.seen.append(None if found is None else found.norm().item())
        return super().training_step(batch, batch_idx)


class ReadsNorm(Plain):
    """Lets Lightning read the gradients of the last step."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen.append({name: float(norm) for name, norm in grad_norm(self, 2).items()})
        return super().training_step(batch, batch_idx)


class ReadsNormOfStrategy(Plain):
    """Asks the strategy for the norm of the last step's gradients."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        read = getattr(self.trainer.strategy, "gradient_norm", None)
        grads = [p.grad for p in self.parameters() if p.grad is not None] if read is None else []
        norm = nn.utils.get_total_norm(grads) if read is None else read()
        self.seen.append(float(norm))
        return super().training_step(batch, batch_idx)


class ReadsLate(Plain):
    """Reads a gradient in the third step for the first time."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 2:
            self.seen.append(self.net[0].weight.grad)
        return super().training_step(batch, batch_idx)


class BeforeZeroGrad(Plain):
    """Reads gradients in the hook that Lightning calls after `training_step`."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        found = self.net[0].weight.grad
        self.seen.append(None if found is None else found.norm().item())


class Adds(Plain):
    """Adds gradients up over batches by a hook of its own."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad()


class Looks(pl.Callback):
    """Reads gradients in the hook of a callback."""

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        found = pl_module.net[0].weight.grad
        pl_module.seen.append(None if found is None else found.norm().item())


def fitted(kind: type[Plain], strategy: str, *callbacks: pl.Callback, **options: Any) -> tuple[Plain, Trainer]:
    seed_everything(0, verbose=False)
    module, rows = kind(), torch.randn(BATCHES * ROWS, WIDTH, dtype=torch.float64)
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", devices=1, max_epochs=1, callbacks=list(callbacks), **QUIET | options
    )
    trainer.fit(module, DataLoader(rows, ROWS))
    return module, trainer


def state_of(module: Plain) -> list[Tensor]:
    return [parameter.detach() for parameter in module.parameters()]


@pytest.mark.parametrize("kind", [Plain, Converts])
def test_a_step_holds_no_gradients_of_the_last_one_and_trains_as_a_plain_one(kind: type[Plain]) -> None:
    plain_meter, meter = Meter(), Meter()
    plain, _ = fitted(Plain, "auto", plain_meter)
    module, trainer = fitted(kind, "amp", meter)
    torch.testing.assert_close(state_of(module), state_of(plain), rtol=0, atol=0)
    gradients = sum(parameter.nbytes for parameter in module.parameters())
    assert meter.live.peak == trainer.strategy.plan.predicted_peak_bytes  # type: ignore[attr-defined]
    assert plain_meter.live.peak - meter.live.peak == gradients
    assert lightning_amp.profile(Plain(), torch.zeros(ROWS, WIDTH, dtype=torch.float64)).peak_bytes == (
        plain_meter.live.peak
    )
    planned = lightning_amp.plan(kind(), torch.zeros(ROWS, WIDTH, dtype=torch.float64))
    assert planned.plan.predicted_peak_bytes == meter.live.peak


@pytest.mark.parametrize(
    ("kind", "callbacks", "options"),
    [
        (ReadsInStep, (), {}),
        (ReadsNorm, (), {}),
        (ReadsNormOfStrategy, (), {}),
        (BeforeZeroGrad, (), {}),
        (Plain, (Looks,), {}),
        (Adds, (), {}),
        (Plain, (), {"accumulate_grad_batches": 2}),
    ],
)
def test_gradients_that_something_reads_or_adds_to_stay(
    kind: type[Plain], callbacks: tuple[type[pl.Callback], ...], options: dict[str, Any]
) -> None:
    meter = Meter(options.get("accumulate_grad_batches", 1))
    plain, _ = fitted(kind, "auto", *(one() for one in callbacks), **options)
    module, trainer = fitted(kind, "amp", meter, *(one() for one in callbacks), **options)
    torch.testing.assert_close(state_of(module), state_of(plain), rtol=0, atol=0)
    assert module.seen == plain.seen
    assert meter.live.peak == trainer.strategy.plan.predicted_peak_bytes  # type: ignore[attr-defined]


def test_a_later_step_that_reads_a_freed_gradient_is_refused() -> None:
    with pytest.raises(ModelError, match=r"training_step reads the gradient of 'net\.0\.weight'.*on_before_zero_grad"):
        fitted(ReadsLate, "amp")
    # the class is as it was
    assert "grad" not in vars(nn.Parameter)
