"""Claim: under strategy amp blocks of any module train in chunks to the numbers of a plain Trainer, with the peak that
was predicted and never above the budget; evaluation runs by the same rules; what cannot be is said.
"""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_amp.errors import PlanError
from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.reports.plan_report import plan_report
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.chunk.row import ChunkBlock
from tests.any_module import Meter
from tests.each import BEFORE_A_RELEASE
from tests.lightning.strategy.strategy_cases import fitted, of_example, same, trainer_of
from tests.optimised import Optimised
from tests.ranks import run_ranks
from tests.techniques.chunk.small_blocks import Attention

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]
BUDGET = 700_000


class Stack(Optimised, by=torch.optim.Adam, lr=0.01):
    """Blocks of attention over a long sequence, with dropout between them."""

    def __init__(self, *, dropout: float = 0.1, layers: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Attention(16) for _ in range(layers))
        self.dropout, self.most = nn.Dropout(dropout), 0

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + self.dropout(block(x))
        return x

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        with LiveBytes() as live:
            self(batch)
        self.most = max(self.most, live.peak)

    test_step = predict_step = validation_step


def rows(n: int = 4, *, batch_size: int = 2) -> DataLoader[Any]:
    x = torch.randn(n, 128, 16, generator=torch.Generator().manual_seed(1))
    return DataLoader(x, batch_size=batch_size)  # type: ignore[arg-type]


def test_examples_of_single_layers_say_that_chunks_are_of_no_use() -> None:
    with pytest.raises(PlanError, match="takes less in chunks: its largest tensors are its arguments and results"):
        of_example("wide_mlp", AMPStrategy(strategies="chunk"))


@pytest.mark.full
def test_a_stack_of_attention_trains_within_its_budget() -> None:
    """Dropout is on: its numbers are those of a plain run, in the same order."""
    meter, doubles = Meter(), {"precision": "64-true", "max_epochs": 3}
    plain = fitted(Stack().double(), rows(), "auto", callbacks=[meter], **doubles)
    full, predicted = meter.live.peak, {}
    for name, options in {
        "least": {"strategies": "chunk"},
        "half": {"device_memory": full // 2},
        "third": {"device_memory": full // 3, "on_predicted_oom": "warn"},
    }.items():
        own = Meter()
        run = fitted(Stack().double(), rows(), AMPStrategy(**options), callbacks=[own], **doubles)
        plan, measured = run["plan"], own.live.peak
        for key, value in plain["parameters"].items():
            assert (run["parameters"][key] - value).abs().max() <= 1e-10, (name, key)
        assert same(run["random"], plain["random"]), name
        assert Plan.from_json(plan.to_json()) == plan
        assert "chunk" in plan.strategies
        assert all(rule.spec.budget_bytes > 0 for rule in plan.rules if isinstance(rule.spec, ChunkBlock))
        assert plan.predicted_peak_bytes == pytest.approx(measured, rel=0.05)
        assert name == "least" or not plan.fits or measured <= plan.budget_bytes
        predicted[name] = plan.predicted_peak_bytes
    assert predicted["least"] < full / 2


def test_evaluation_runs_by_the_plan_of_the_fit() -> None:
    """Most bytes of a forward pass in every kind of evaluation, of batches twice as large as those of the fit."""
    most: dict[str, list[int]] = {"plain": [], "amp": []}
    for name, found in most.items():
        module = Stack()
        trainer = trainer_of(AMPStrategy(strategies="chunk") if name == "amp" else "auto", limit_val_batches=1)
        for kind in ("fit", "validate", "test", "predict"):
            module.most = 0
            getattr(trainer, kind)(module, *([rows()] if kind == "fit" else []), rows(batch_size=4))
            found.append(module.most)
    assert all(amp < 0.7 * plain for amp, plain in zip(most["amp"], most["plain"], strict=True))


WORDS = 300


class Reader(Stack):
    """A language model: its head and its blocks of attention are most of what a step takes."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.embed = nn.Embedding(WORDS, 16)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        logits = F.linear(self(self.embed(batch)), self.embed.weight)
        return F.cross_entropy(logits.view(-1, WORDS), batch.reshape(-1))


def texts(n: int = 16) -> DataLoader[Any]:
    return DataLoader(torch.randint(WORDS, (n, 64)), batch_size=4)  # type: ignore[arg-type]


def reading(rank: int, ranks: int) -> dict[str, Any]:
    """A model with a large head as it is, and with a third of that memory."""
    found: dict[str, Any] = {}
    data, budget, plain = texts(8 * ranks), 0, {}
    for name in ("plain", "third", "by name"):
        options: dict[str, Any] = {"strategies": "S1"}
        if name == "third":
            options = {"device_memory": budget}
        elif name == "by name":
            options = {"strategies": "logits,chunk"}
        meter, module = Meter(), Reader().double()
        strategy = AMPStrategy(**options)
        run = fitted(module, data, strategy, rank=rank, ranks=ranks, callbacks=[meter], precision="64-true")
        if name == "plain":
            plain, budget = run["parameters"], meter.live.peak // 3
            continue
        errors = [float((run["parameters"][key] - value).abs().max()) for key, value in plain.items()]
        found[name] = {"error": max(errors), "measured": meter.live.peak, "json": run["plan"].to_json()}
    return found


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=BEFORE_A_RELEASE), 2])
def test_blocks_and_the_loss_of_a_head_are_in_chunks_together(ranks: int, tmp_path: Path) -> None:
    for found in run_ranks(reading, ranks, tmp_path, timeout=200):
        for name, run in found.items():
            plan = Plan.from_json(run["json"])
            assert {"logits", "chunk"} <= {*plan.strategies}
            assert run["error"] <= 1e-10
            assert plan.predicted_peak_bytes == pytest.approx(run["measured"], rel=0.05)
            assert name == "by name" or run["measured"] <= plan.budget_bytes


class Predicting(Stack):
    """Its predictions are what its forward returns."""

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:  # type: ignore[override]
        with LiveBytes() as live:
            found = self(batch)
        self.most = max(self.most, live.peak)
        return found


def eight() -> DataLoader[Any]:
    return DataLoader(torch.randn(8, 128, 16).double(), batch_size=4)  # type: ignore[arg-type]


def test_chunks_of_a_module_that_was_never_fitted_require_a_budget() -> None:
    """`lightning_amp.chunk`, which is named, is tested in tests/techniques/chunk."""
    words = "chunk requires, in a run that does not train, a budget.*plan=.*lightning_amp.chunk"
    with pytest.raises(PlanError, match=words):
        trainer_of(AMPStrategy(strategies="chunk")).predict(Stack(), rows())


EVALUATED = {"validate": "validation_step", "test": "test_step", "predict": "predict_step"}


@pytest.mark.full
def test_evaluation_is_planned_by_itself_within_a_budget() -> None:
    """Without a fit before it, and for no more bytes than a budget; a refusal names the least that can be had."""
    batches, module = eight(), Predicting().double().eval()
    there = sum(p.nbytes for p in module.parameters()) + 4 * 128 * 16 * 8

    def run(kind: str, strategy: Any) -> tuple[int, Any]:
        module.most = 0
        values = getattr(trainer_of(strategy), kind)(module, batches)
        return there + module.most, values

    for kind, step in EVALUATED.items():
        most, plain = run(kind, "auto")
        for share in (2, 0.5, 0.2):
            own = AMPStrategy(device_memory=int(share * most))
            held, values = run(kind, own)
            plan: Any = own.plan
            assert plan.evaluates == step
            assert held <= share * most
            assert ("chunk" in plan.strategies) == (share < 1)
            assert plan.predicted_peak_bytes <= plan.budget_bytes
            assert f"peak of {step}" in plan_report(plan)
            assert Plan.from_json(plan.to_json()) == plan
            if kind == "predict":
                torch.testing.assert_close(values, plain, rtol=1e-10, atol=1e-10)
    own = AMPStrategy(device_memory="100KiB", strategies="chunk")
    with pytest.raises(PlanError, match="Nothing was run") as refused:
        run("predict", own)
    assert own.plan is not None
    least = own.plan.predicted_peak_bytes
    assert f"predict_step is predicted to need {format_bytes(least)} at least, in chunks" in str(refused.value)
    assert 100 * 2**10 < run("predict", AMPStrategy(device_memory=least))[0] <= least


def test_larger_batches_than_those_of_a_fit_without_chunks_are_planned_too() -> None:
    own, module = AMPStrategy(device_memory=BUDGET * 6), Predicting()
    trainer = trainer_of(own, limit_val_batches=0)
    trainer.fit(module, rows(batch_size=1))
    assert own.plan is not None
    assert "chunk" not in own.plan.strategies
    module.most = 0
    trainer.predict(module, rows(24, batch_size=24), return_predictions=False)
    assert "chunk" in own.plan.strategies
    assert module.most <= BUDGET * 6


class Other(pl.LightningModule):
    """Has none of the blocks of `Stack`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch)


@pytest.mark.full
@pytest.mark.parametrize("other", [Other, lambda: Stack(layers=1)])
def test_another_module_than_that_of_the_fit_is_evaluated(other: Any) -> None:
    own = AMPStrategy(device_memory=BUDGET)
    trainer = trainer_of(own)
    trainer.fit(Stack(), rows())
    assert own.plan is not None
    assert "chunk" in own.plan.strategies
    trainer.predict(other(), rows())
