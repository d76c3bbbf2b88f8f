"""Claim: a step whose distributions or metrics check values is counted without values, and training still checks."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.distributions import Bernoulli, Categorical, Dirichlet, Distribution, Normal, Poisson, kl_divergence
from torchmetrics import Accuracy, ConfusionMatrix, F1Score

from lightning_amp import AMPStrategy, profile
from lightning_amp.footprint.copies import quick_fakes

GENES = 30
COUNTS = torch.poisson(torch.ones(16, GENES), generator=torch.Generator().manual_seed(0))


class Vae(LightningModule):
    """A variational autoencoder of counts, as those of single cells are written."""

    def __init__(self, likelihood: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(GENES, 8), nn.Linear(4, GENES)
        self.likelihood = likelihood

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        mean, log_scale = self.encoder(batch).chunk(2, -1)
        posterior = Normal(mean, log_scale.exp(), validate_args=True)
        prior = Normal(torch.zeros_like(mean), torch.ones_like(mean), validate_args=True)
        found = self.likelihood(self.decoder(posterior.rsample())).sum(-1)
        return (kl_divergence(posterior, prior).sum(-1) - found).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


def of(made: Callable[[Tensor], Distribution], value: Tensor = COUNTS) -> Callable[[Tensor], Tensor]:
    return lambda x: made(x).log_prob(value)


INSIDE = COUNTS.clamp(0.1, 0.9)
LIKELIHOODS = {
    "poisson": of(lambda x: Poisson(x.exp(), validate_args=True)),
    "bernoulli": of(lambda x: Bernoulli(logits=x, validate_args=True), (COUNTS > 0).float()),
    "categorical": of(lambda x: Categorical(logits=x, validate_args=True), COUNTS[:, 0]),
    "dirichlet": of(lambda x: Dirichlet(x.exp(), validate_args=True), INSIDE / INSIDE.sum(-1, keepdim=True)),
}


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_bytes_are_those_of_a_step_with_values(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Vae(LIKELIHOODS[name])
    counted = profile(module, COUNTS)
    assert counted.reason == ""
    # a step that is not counted without values runs with them
    monkeypatch.setattr(quick_fakes, "IS_ALL_TRUE", None)
    measured = profile(module, COUNTS)
    assert "torch.distributions checks" in measured.reason
    assert counted.peak_bytes == measured.peak_bytes
    assert counted.by_kind == measured.by_kind


def test_a_value_that_is_not_allowed_ends_the_training() -> None:
    module = Vae(LIKELIHOODS["poisson"])
    strategy = AMPStrategy(device_memory="1GiB")
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_steps=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    wrong = [COUNTS, torch.full_like(COUNTS, torch.nan)]
    with pytest.raises(ValueError, match="Expected parameter loc"):
        trainer.fit(module, torch.utils.data.DataLoader(wrong, batch_size=None))  # type: ignore[arg-type]
    assert strategy.plan.fits


class Classifier(LightningModule):
    """Counts classes while it trains."""

    def __init__(self, metric: nn.Module) -> None:
        super().__init__()
        self.layer, self.metric = nn.Linear(GENES, 5), metric

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        scores, types = self.layer(batch), batch[:, 0].long().clamp(max=4)
        self.metric(scores, types)
        self.log("metric", self.metric)
        return nn.functional.cross_entropy(scores, types)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


@pytest.mark.parametrize("kind", [F1Score, ConfusionMatrix, Accuracy])
def test_metrics_with_as_many_bins_as_classes_are_counted(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = Classifier(kind(task="multiclass", num_classes=5))
    module.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
    counted = profile(module, COUNTS)
    assert counted.reason == ""
    monkeypatch.setattr(quick_fakes.QuickFakes, "dispatch", fails)
    measured = profile(module, COUNTS)
    assert measured.reason
    assert counted.peak_bytes == measured.peak_bytes
    assert counted.by_kind == measured.by_kind


def fails(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("no operator runs without values")


def test_weights_and_bins_give_the_type_and_length_of_a_count() -> None:
    for weights in (None, torch.ones(3), torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.int32)):
        real = torch.bincount(torch.tensor([0, 1, 1]), weights, minlength=7)
        with quick_fakes.QuickFakes(valid=True) as fake:
            given = None if weights is None else fake.from_tensor(weights)
            made = torch.bincount(fake.from_tensor(torch.tensor([0, 1, 1])), given, minlength=7)
        assert (made.shape, made.dtype) == (real.shape, real.dtype)
        with quick_fakes.QuickFakes(valid=True) as fake, pytest.raises(Exception, match="bincount"):
            torch.bincount(fake.from_tensor(torch.tensor([0, 1, 1])))


def test_a_captured_graph_does_not_lose_the_check() -> None:
    with quick_fakes.QuickFakes(), pytest.raises(Exception, match="_local_scalar_dense"):
        Poisson(torch.ones(3), validate_args=True)


@pytest.mark.parametrize("columns", [8, 6])
def test_products_of_groups_have_the_layout_of_the_kernels(columns: int) -> None:
    rows, ends = torch.randn(12, 16), torch.tensor([4, 8, 12], dtype=torch.int32)
    # by columns, whose lengths are multiples of 16 bytes
    experts = torch.randn(3, columns, 16).transpose(1, 2)
    found = []
    for fake in (None, quick_fakes.QuickFakes(valid=True)):
        with fake or nullcontext():
            one, other, at = (x if fake is None else fake.from_tensor(x) for x in (rows, experts, ends))
            made = [torch.nn.functional.grouped_mm(one, other, offs=at)]
            if columns == 8:
                # the gradients of both
                made.append(torch.nn.functional.grouped_mm(made[0], other.transpose(1, 2), offs=at))
                made.append(torch.nn.functional.grouped_mm(one.T, made[0], offs=at))
            found.append([(x.shape, x.stride(), x.dtype, x.untyped_storage().nbytes()) for x in made])
    assert found[0] == found[1]
