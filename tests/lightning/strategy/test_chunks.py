"""Claim: under strategy amp blocks of any module train in chunks to the numbers of a plain Trainer, with the peak that
was predicted and never above the budget; evaluation runs by the same rules; what cannot be is said.
"""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_amp import chunk
from lightning_amp.errors import PlanError
from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.reports.plan_report import plan_report
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.chunk.row import ChunkBlock
from tests.any_module import Meter
from tests.lightning.strategy.strategy_cases import fitted, of_example, same, trainer_of
from tests.ranks import run_ranks
from tests.techniques.chunk.small_blocks import Attention
from tests.techniques.chunk.words import Words

pytestmark = pytest.mark.ranks
BUDGET = 700_000


class Stack(pl.LightningModule):
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

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def rows(n: int = 4, *, batch_size: int = 2) -> DataLoader[Any]:
    x = torch.randn(n, 128, 16, generator=torch.Generator().manual_seed(1))
    return DataLoader(x, batch_size=batch_size)  # type: ignore[arg-type]


def refused(rank: int, ranks: int, name: str) -> str:
    with pytest.raises(PlanError) as found:
        of_example(name, AMPStrategy(strategies="chunk"))
    return str(found.value)


def test_examples_of_single_layers_say_that_chunks_are_of_no_use(tmp_path: Path) -> None:
    (text,) = run_ranks(refused, 1, tmp_path, "wide_mlp", timeout=200)
    assert "takes less in chunks: its largest tensors are its arguments and results" in text


def stack(rank: int, ranks: int) -> dict[str, Any]:
    """A stack of attention as it is, and under several requests."""
    meter = Meter()
    plain = fitted(Stack().double(), rows(), "auto", callbacks=[meter], precision="64-true", max_epochs=3)
    found = {"plain": meter.live.peak}
    for name, options in {
        "least": {"strategies": "chunk"},
        "half": {"device_memory": meter.live.peak // 2},
        "third": {"device_memory": meter.live.peak // 3, "unfit": "train"},
    }.items():
        own = Meter()
        run = fitted(
            Stack().double(),
            rows(),
            AMPStrategy(**options),  # type: ignore[arg-type]
            callbacks=[own],
            precision="64-true",
            max_epochs=3,
        )
        errors = [(run["parameters"][key] - value).abs().max() for key, value in plain["parameters"].items()]
        found[name] = {
            "error": float(max(errors)), "random": same(run["random"], plain["random"]),
            "measured": own.live.peak, "json": run["plan"].to_json(),
        }  # fmt: skip
    return found


def test_a_stack_of_attention_trains_within_its_budget(tmp_path: Path) -> None:
    """Dropout is on: its numbers are those of a plain run, in the same order."""
    (found,) = run_ranks(stack, 1, tmp_path, timeout=200)
    for name in ("least", "half", "third"):
        run, plan = found[name], Plan.from_json(found[name]["json"])
        assert run["error"] <= 1e-10
        assert run["random"]
        assert "chunk" in plan.strategies
        assert all(rule.spec.budget_bytes > 0 for rule in plan.rules if isinstance(rule.spec, ChunkBlock))
        assert plan.predicted_peak_bytes == pytest.approx(run["measured"], rel=0.05)
        if plan.fits and name != "least":
            assert run["measured"] <= plan.budget_bytes
    least = Plan.from_json(found["least"]["json"])
    assert least.predicted_peak_bytes < found["plain"] / 2


def evaluated(rank: int, ranks: int) -> dict[str, int]:
    """Most bytes of a forward pass in every kind of evaluation, plain and under amp, of batches twice as large."""
    found = {}
    for name in ("plain", "amp"):
        module, own = Stack(), AMPStrategy(strategies="chunk")
        trainer = trainer_of(own if name == "amp" else "auto", limit_val_batches=1)
        trainer.fit(module, rows(), rows(batch_size=4))
        found[f"{name} fit"], module.most = module.most, 0
        for kind in ("validate", "test", "predict"):
            getattr(trainer, kind)(module, rows(batch_size=4))
            found[f"{name} {kind}"], module.most = module.most, 0
    return found


def test_evaluation_runs_by_the_plan_of_the_fit(tmp_path: Path) -> None:
    (found,) = run_ranks(evaluated, 1, tmp_path, timeout=200)
    for kind in ("fit", "validate", "test", "predict"):
        assert found[f"amp {kind}"] < 0.7 * found[f"plain {kind}"]


class Reader(pl.LightningModule):
    """A language model that learns what its forward returns; its head is most of what a step takes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = Words()
        self.model.dropout.p = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(batch, labels=batch)[0]

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def texts(n: int = 16) -> DataLoader[Any]:
    return DataLoader(torch.randint(300, (n, 64)), batch_size=4)  # type: ignore[arg-type]


def reading(rank: int, ranks: int) -> dict[str, Any]:
    """A model with a large head as it is, and with half of that memory."""
    found: dict[str, Any] = {}
    data, budget, plain = texts(8 * ranks), 0, {}
    for name in ("plain", "half", "by name"):
        options: dict[str, Any] = {"strategies": "S1"}
        if name == "half":
            options = {"device_memory": budget}
        elif name == "by name":
            options = {"strategies": "fsdp,recompute,chunk" if ranks > 1 else "recompute,chunk"}
        meter, module = Meter(), Reader().double()
        strategy = AMPStrategy(**options)
        run = fitted(module, data, strategy, rank=rank, ranks=ranks, callbacks=[meter], precision="64-true")
        if name == "plain":
            plain, budget = run["parameters"], meter.live.peak // 2
            continue
        errors = [float((run["parameters"][key] - value).abs().max()) for key, value in plain.items()]
        found[name] = {"error": max(errors), "measured": meter.live.peak, "json": run["plan"].to_json()}
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_head_and_its_loss_train_within_half_of_the_memory(ranks: int, tmp_path: Path) -> None:
    for found in run_ranks(reading, ranks, tmp_path, timeout=200):
        for name, run in found.items():
            plan = Plan.from_json(run["json"])
            (head,) = [rule for rule in plan.rules if rule.fqn == "model"]
            assert isinstance(head.spec, ChunkBlock)
            assert head.spec.after == 3
            assert "what follows its 3 blocks runs in chunks" in head.why
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


def never_fitted(rank: int, ranks: int) -> tuple[str, list[tuple[int, Any]]]:
    """A refusal; and bytes and predictions of a module as it is and in chunks by itself."""
    with pytest.raises(PlanError) as refused:
        trainer_of(AMPStrategy(strategies="chunk")).predict(Stack(), rows())
    module = Predicting().double().eval()
    batches: DataLoader[Any] = DataLoader(torch.randn(8, 128, 16).double(), batch_size=4)  # type: ignore[arg-type]
    found = []
    for each in (module, chunk(module, next(iter(batches)), budget=BUDGET)):
        each.most = 0
        values = trainer_of(AMPStrategy()).predict(each, batches)
        found.append((each.most, values))
    return str(refused.value), found


def test_a_module_that_was_never_fitted_predicts_in_chunks_of_its_own(tmp_path: Path) -> None:
    """A rule of chunks is refused; the same bytes are held by the module that `lightning_amp.chunk` returns."""
    ((text, (plain, chunked)),) = run_ranks(never_fitted, 1, tmp_path, timeout=100)
    assert "chunk requires, in a run that does not train, a budget" in text
    assert "plan=" in text
    assert "lightning_amp.chunk" in text
    assert chunked[0] <= BUDGET < plain[0] / 3
    torch.testing.assert_close(chunked[1], plain[1], rtol=1e-10, atol=1e-10)


EVALUATED = {"validate": "validation_step", "test": "test_step", "predict": "predict_step"}


def of_a_budget(rank: int, ranks: int) -> dict[str, Any]:
    """Evaluation without a fit before it: what is held, what a plan says, what comes out, and what is refused."""
    batches: DataLoader[Any] = DataLoader(torch.randn(8, 128, 16).double(), batch_size=4)  # type: ignore[arg-type]
    module = Predicting().double().eval()
    there = sum(p.nbytes for p in module.parameters()) + 4 * 128 * 16 * 8

    def run(kind: str, strategy: Any) -> tuple[int, Any]:
        module.most = 0
        values = getattr(trainer_of(strategy), kind)(module, batches)
        return there + module.most, values

    found: dict[str, Any] = {}
    for kind in EVALUATED:
        most, plain = run(kind, "auto")
        for share in (2, 0.5, 0.2):
            own = AMPStrategy(device_memory=int(share * most))
            held, values = run(kind, own)
            found[kind, share] = held / most, own.plan, values if kind == "predict" else None
        found[kind] = plain
    own = AMPStrategy(device_memory="100KiB", strategies="chunk")
    with pytest.raises(PlanError) as refused:
        run("predict", own)
    assert own.plan is not None
    least = own.plan.predicted_peak_bytes
    held, _ = run("predict", AMPStrategy(device_memory=least))
    return found | {"refused": str(refused.value), "least": least, "held": held}


@pytest.mark.full
def test_evaluation_is_planned_by_itself_within_a_budget(tmp_path: Path) -> None:
    """Without a fit before it, and for no more bytes than a budget; a refusal names the least that can be had."""
    (found,) = run_ranks(of_a_budget, 1, tmp_path, timeout=200)
    for kind, step in EVALUATED.items():
        for share in (2, 0.5, 0.2):
            held, plan, values = found[kind, share]
            assert plan.evaluates == step
            assert held <= share
            assert ("chunk" in plan.strategies) == (share < 1)
            assert plan.predicted_peak_bytes <= plan.budget_bytes
            assert f"peak of {step}" in plan_report(plan)
            assert Plan.from_json(plan.to_json()) == plan
            if kind == "predict":
                torch.testing.assert_close(values, found[kind], rtol=1e-10, atol=1e-10)
    assert f"predict_step is predicted to need {format_bytes(found['least'])} at least, in chunks" in found["refused"]
    assert "Nothing was run" in found["refused"]
    assert 100 * 2**10 < found["held"] <= found["least"]


def larger_than_trained(rank: int, ranks: int) -> tuple[tuple[str, ...], tuple[str, ...], int]:
    """A fit that needs no chunks, and predictions of batches that do."""
    own, module = AMPStrategy(device_memory=BUDGET * 6), Predicting()
    trainer = trainer_of(own, limit_val_batches=0)
    trainer.fit(module, rows(batch_size=1))
    assert own.plan is not None
    fitted_by, module.most = own.plan.strategies, 0
    trainer.predict(module, rows(24, batch_size=24), return_predictions=False)
    return fitted_by, own.plan.strategies, module.most


def test_larger_batches_than_those_of_a_fit_without_chunks_are_planned_too(tmp_path: Path) -> None:
    ((fitted_by, predicted_by, most),) = run_ranks(larger_than_trained, 1, tmp_path, timeout=100)
    assert "chunk" not in fitted_by
    assert "chunk" in predicted_by
    assert most <= BUDGET * 6
