"""Claim: a budget that was named is held, or the run is refused, or the plan says that the peak is not known: for steps
of torch.func, for streams, where a step needs values, where parameters are unfrozen and where batches grow.

Claim: a plan that is predicted to fit never ends in a step with OverBudget: with exactly the bytes that it predicts
three batches are trained, on every rank, and what it predicts is close to what the second of them takes. With one byte
less there is another plan, of which the same is true, or a refusal before anything is trained.
"""

import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from lightning.pytorch.profilers.pytorch import RegisterRecordFunction
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from lightning_amp.errors import PlanError
from lightning_amp.footprint.bounded_step import StepOverBudget
from lightning_amp.lightning.strategy.install_plan import InstalledPlan
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from tests.any_module import Meter, MeterOfAll, make
from tests.each import BEFORE_A_RELEASE
from tests.lightning.strategy.strategy_cases import Batches, fitted, same
from tests.optimised import Optimised
from tests.ranks import run_ranks

WIDTH, ROWS = 32, 64
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers", "ignore:predicted to run out", "ignore:.torch.jit.script. is deprecated"
)


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        self.backbone, self.head = nn.Sequential(*blocks), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.backbone(x))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=1e-3)


class Equation(Net):
    """As a physics-informed network: derivatives of the output by the input, for every row."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        def value(parameters: Any, x: Tensor) -> Tensor:
            return functional_call(self, parameters, (x[None],)).sum()

        slopes = vmap(grad(value, argnums=1), (None, 0))(dict(self.named_parameters()), batch)
        return slopes.square().mean() + self(batch).square().mean()


class Checked(Net):
    """A distribution whose own check branches on values."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        made = torch.distributions.Geometric(self(batch).sigmoid(), validate_args=True)
        return -made.log_prob(torch.ones_like(batch[:, :1])).mean()


class ByGradients(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None and parameter.grad.sum() > 0:
                parameter.grad.mul_(1)


class Depth(Net):
    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Any:
        for block in self.backbone:
            x = x if self.draw() < 0.2 else block(x)
        return self.head(x)


class Dropping(Net):
    def forward(self, x: Tensor) -> Any:
        return self.head(F.dropout(self.backbone(x)))


class Unfreezing(Net):
    """Unfreezes its blocks by itself, in the fourth batch."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone.requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 3:
            self.backbone.requires_grad_(True)
            self.optimizers().add_param_group({"params": list(self.backbone.parameters())})  # type: ignore[union-attr]


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(batches(4))


def batches(n: int, rows: int = ROWS) -> list[Tensor]:
    return [torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(k)) for k in range(n)]


class MeterOfStep(Meter):
    """Of any epoch's."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(trainer, module, batch, trainer.global_step)

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, module, outputs, batch, trainer.global_step - 1)


def run(module: Net, strategy: Any = "auto", data: Any = None, **options: Any) -> tuple[dict[str, Any], int]:
    """What a run leaves, and the most bytes of its last batch."""
    meter = MeterOfStep()
    meter.at = options.get("max_steps", 3) - 1
    loader = DataLoader(Batches(batches(1)[0]), batch_size=None) if data is None else data
    options["callbacks"] = [*options.get("callbacks", ()), meter]
    return fitted(module, loader, strategy, **options), meter.live.peak


def within(n_bytes: int, **options: Any) -> AMPStrategy:
    return AMPStrategy(device_memory=f"{n_bytes}B", **options)


def test_steps_of_torch_func_are_profiled_and_their_budget_is_held() -> None:
    plain, more = run(Equation())
    _, peak = run(Equation(), AMPStrategy())
    assert peak < more, "without gradients of the last step"
    found, measured = run(Equation(), within(peak))
    assert found["plan"].predicted_peak_bytes == measured == peak
    assert found["plan"].fits is True
    assert same(found["parameters"], plain["parameters"])
    assert "torch.func.grad" in found["plan"].diagnosis.does_not_help["recompute"]
    with pytest.raises(PlanError, match="predicted to run out of memory in the step"):
        run(Equation(), within(int(0.9 * peak), strategies="S1"))


def test_a_generator_is_counted_while_it_runs_and_refused_where_it_is_not(monkeypatch: Any) -> None:
    def stream() -> Any:
        return (batch for batch in batches(4))

    _, peak = run(Net(), AMPStrategy(), stream())
    found, measured = run(Net(), within(peak), stream())
    assert measured == peak
    assert found["plan"].fits is None
    assert "'generator'" in found["plan"].uncounted
    with pytest.raises(StepOverBudget, match=r"made a tensor .* the training loader is a 'generator'") as error:
        run(Net(), within(int(0.8 * peak)), stream())
    assert "at least was predicted" in str(error.value)
    # as on a device whose batches are not counted
    monkeypatch.setattr(InstalledPlan, "_counts", False)
    with pytest.raises(PlanError, match=r"whether a step fits is not known: .*'generator'.* Nothing was"):
        run(Net(), within(peak), stream())
    assert run(Net(), within(peak, on_predicted_oom="warn"), stream())[0]["steps"] == 3
    found, measured = run(Net(), within(peak), DataLoader(Stream(), batch_size=None))
    assert (found["plan"].fits, found["plan"].predicted_peak_bytes, measured) == (True, peak, peak)


def test_a_step_that_needs_values_says_so_in_words_and_runs_within_the_budget() -> None:
    _, peak = run(Checked())
    found, _ = run(Checked(), AMPStrategy())
    said = next(note for note in found["plan"].notes if "counted for the first batch" in note)
    assert "torch.distributions checks the values of its arguments (test_budgets.py:" in said
    assert "validate_args=False leaves the check out" in said
    found, measured = run(Checked(), within(int(0.9 * peak)))
    assert found["steps"] == 3
    assert found["plan"].predicted_peak_bytes == measured <= 0.9 * peak
    # what gradients decide is noted in whole steps of a copy, which may take more than the budget
    _, peak = run(ByGradients())
    found, measured = run(ByGradients(), within(int(0.9 * peak)))
    assert found["steps"] == 3
    assert found["plan"].strategies
    assert found["plan"].predicted_peak_bytes == measured <= 0.9 * peak
    with pytest.raises(PlanError, match=r"predicted to run out of memory .* requires at least"):
        run(ByGradients(), within(peak // 2))


def test_parameters_that_a_callback_unfreezes_are_counted_from_the_beginning() -> None:
    def later() -> dict[str, Any]:
        tune = BackboneFinetuning(unfreeze_backbone_at_epoch=3, verbose=False)
        return {"callbacks": [tune], "max_epochs": 8, "max_steps": 5}

    one = DataLoader(batches(1), batch_size=None)  # type: ignore[arg-type]
    _, peak = run(Net(), AMPStrategy(), one, **later())
    found, measured = run(Net(), within(peak), one, **later())
    assert found["plan"].predicted_peak_bytes == measured == peak
    assert any("a callback unfreezes some" in note for note in found["plan"].notes)
    with pytest.raises(PlanError, match="predicted to run out of memory in the step"):
        run(Net(), within(peak - 1, strategies="S1"), one, **later())


def test_a_budget_is_held_where_parameters_are_unfrozen_unasked() -> None:
    options = {"max_epochs": 2, "max_steps": 5}
    _, peak = run(Unfreezing(), AMPStrategy(), **options)
    found, _ = run(Unfreezing(), within(peak), **options)
    assert found["plan"].predicted_peak_bytes < 0.7 * peak
    assert any("of parameters are frozen, and counted so" in note for note in found["plan"].notes)
    with pytest.raises(StepOverBudget, match=r"; it trains other parameters than those before.* was predicted"):
        run(Unfreezing(), within(peak - 1), **options)


def test_a_step_that_draws_which_blocks_run_is_the_largest_of_several_draws() -> None:
    for module in (Depth(random.random), Depth(lambda: torch.rand(()))):
        found, _ = run(module, AMPStrategy())
        assert any("the peak of the largest of several draws" in note for note in found["plan"].notes)
    found, _ = run(Dropping(), AMPStrategy())
    assert not found["plan"].notes or "several draws" not in "".join(found["plan"].notes)


@pytest.mark.parametrize("draw", [random.random, lambda: float(np.random.rand())])
def test_no_draw_exceeds_the_budget(draw: Any) -> None:
    def trained(strategy: Any) -> tuple[dict[str, Any], int]:
        random.seed(1)
        np.random.seed(1)
        meter, module = MeterOfAll(), Depth(draw).double()
        data = DataLoader([batch.double() for batch in batches(12)], batch_size=None)  # type: ignore[arg-type]
        return fitted(module, data, strategy, callbacks=[meter], max_steps=12), meter.peak

    plain, peak = trained("auto")
    # blocks that no batch has skipped
    found, measured = trained(within(peak))
    assert measured <= found["plan"].predicted_peak_bytes <= peak
    found, measured = trained(within(int(0.85 * peak)))
    assert measured <= 0.85 * peak
    assert found["plan"].strategies
    torch.testing.assert_close(found["parameters"], plain["parameters"], rtol=1e-11, atol=1e-12)
    assert same(found["random"], plain["random"])


def test_the_profiler_whose_hooks_stand_in_the_way_is_named() -> None:
    module = Net()
    _, peak = run(module, AMPStrategy())
    # as of PyTorchProfiler() while it is on
    named = r"has PyTorchProfiler's hooks \(PyTorchProfiler\(record_module_names=False\) has none\)"
    with RegisterRecordFunction(module), pytest.raises(PlanError, match=named):
        run(module, within(peak // 3))
    with pytest.raises(PlanError, match="predicted to run out") as error:
        run(module, within(peak // 3))
    assert "PyTorchProfiler" not in str(error.value)


PLENTY = 10**13
TIGHT = 1e-3
SIZES: dict[str, dict[str, int]] = {"gene_transformer": {"cells": 4, "length": 24}}


class Chain(Optimised, by=torch.optim.SGD, lr=0.1):
    """Of layers with small gradients, which are copied into one buffer to be averaged; nothing else takes as much."""

    def __init__(self, *, by_hand: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = not by_hand
        self.first, self.last = nn.Linear(300, 300), nn.Linear(300, 300)
        self.blocks = nn.Sequential(*(nn.Linear(300, 300) for _ in range(3)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        loss = F.mse_loss(self.last(F.relu(self.blocks(F.relu(self.first(batch))))), batch)
        self.log("loss", loss)
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None


def module_of(name: str) -> tuple[pl.LightningModule, Any]:
    if name.startswith("chain"):
        return Chain(by_hand=name == "chain by hand"), torch.rand(4, 300)
    return make(name, **SIZES.get(name, {}))


def kept(rank: int, ranks: int, name: str, sets: tuple[str, ...], options: dict[str, Any]) -> dict[str, Any]:
    """What became of the plan of each set of strategies with the bytes that it predicts, and with one less."""

    def trained(strategies: str, budget: int) -> tuple[int, int]:
        module, batch = module_of(name)
        meter, data = Meter(options.get("accumulate_grad_batches", 1)), Batches(batch, 4 if options else 3)
        run = fitted(
            module,
            DataLoader(data, batch_size=None),
            AMPStrategy(device_memory=budget, strategies=strategies),
            rank=rank,
            ranks=ranks,
            max_steps=-1,
            use_distributed_sampler=False,
            callbacks=[meter],
            **options,
        )
        return run["plan"].predicted_peak_bytes, meter.live.peak

    found = {}
    for strategies in sets:
        predicted, _ = trained(strategies, PLENTY)
        exactly = trained(strategies, predicted)
        less = None
        with suppress(PlanError):
            less = trained(strategies, exactly[0] - 1)
        found[strategies] = exactly, less
    return found


BY_RANKS = {1: ("S1", "S1,recompute"), 2: ("S1", "S1,recompute", "S1,fsdp", "S1,fsdp,recompute")}


# each of these has failed
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "ranks", "options"),
    [
        ("cnn", 1, {}),
        ("wide_mlp", 1, {}),
        ("chain by hand", 2, {}),
        pytest.param("chain", 2, {"accumulate_grad_batches": 2}, marks=BEFORE_A_RELEASE),
        pytest.param("gene_transformer", 1, {}, marks=BEFORE_A_RELEASE),
    ],
)
def test_what_is_predicted_to_fit_is_trained(name: str, ranks: int, options: dict[str, Any], tmp_path: Path) -> None:
    sets = ("S1,chunk",) if name == "gene_transformer" else BY_RANKS[ranks]
    found = run_ranks(kept, ranks, tmp_path, name, sets, options, timeout=400)
    for strategies in sets:
        rows = [one[strategies] for one in found]
        for k in (0, 1):
            if rows[0][k] is None:
                continue
            predicted, measured = rows[0][k][0], max(row[k][1] for row in rows)
            assert measured <= predicted, (strategies, k)
            # the walk of fsdp holds the first block until the end, for its inputs may have no gradient
            near = 0.05 if "fsdp" in strategies else TIGHT
            assert predicted <= (1 + near) * measured, (strategies, k)
