"""Claim: a batch for which there was no memory runs again with a leaner plan, on all ranks, and leaves the numbers of
a run in which memory did not end; where that cannot be, the error is raised, or a rescue is refused beforehand.
"""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_amp.errors import PlanError
from lightning_amp.lightning.steps.state_of_batch import StateOfBatch
from lightning_amp.lightning.strategy import install_plan
from lightning_amp.lightning.strategy.install_plan import InstalledPlan
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from tests.any_module import make
from tests.lightning.strategy.strategy_cases import Meter, of_example, same, trainer_of
from tests.optimised import Optimised
from tests.ranks import run_ranks
from tests.techniques.recompute.test_beside_decoder import Run
from tests.techniques.sharded_cases import Case

BATCHES = [torch.randn(24, 8, generator=torch.Generator().manual_seed(k)) for k in range(5)]


class Ends(torch.autograd.Function):
    """Passes values on; memory ends in its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise torch.OutOfMemoryError("tried to allocate 3 GiB")


class Deep(Optimised, by=torch.optim.Adam, lr=0.05):
    """Blocks with everything that a batch changes beside parameters: buffers, metrics, logs, random streams.

    Args:
        ends: "forward", "backward" or "update" of which batch memory ends; None for a run without.
        times: How often it ends there.
    """

    def __init__(self, ends: tuple[str, int] | None = None, *, times: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        block = [nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2)]
        self.blocks = nn.ModuleList(nn.Sequential(*block, nn.Linear(8, 8)) for _ in range(4))
        self.norm = nn.BatchNorm1d(8)
        self.mean = MeanMetric()
        self.register_buffer("usual", torch.zeros(()), persistent=False)
        # an iterator, because a rescue puts attributes back
        self.ends, self.times, self.means = ends, iter(range(times)), list[float]()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.norm(batch + float(np.random.rand()))
        for block in self.blocks:
            x = x + block(x)
        loss = F.mse_loss(x, batch)
        # another tensor in the place of the buffer, and a metric that keeps a value with its graph
        self.usual = 0.9 * self.usual + 0.1 * loss.detach()
        self.mean(loss)
        self.log("epoch", loss, on_epoch=True, on_step=False)
        self.log("mean", self.mean, on_epoch=True, on_step=False)
        if self._ends("forward", batch_idx):
            raise torch.OutOfMemoryError("tried to allocate 3 GiB")
        return Ends.apply(loss) if self._ends("backward", batch_idx) else loss

    def on_train_epoch_end(self) -> None:
        self.means.append(float(self.mean.compute()))

    def _ends(self, where: str, batch_idx: int) -> bool:
        # not in the profile, which runs the step of a copy
        here = isinstance(self.trainer.strategy, AMPStrategy)
        return here and self.ends == (where, batch_idx) and next(self.times, None) is not None

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        if self._ends("update", args[1]):
            raise torch.OutOfMemoryError("tried to allocate 3 GiB")


def fit(module: Deep, strategy: Any, *, rank: int = 0, ranks: int = 1, **options: Any) -> dict[str, Any]:
    """What a run of two epochs leaves."""
    torch.manual_seed(5)
    np.random.seed(5)
    options = {"precision": "64-true", "max_steps": -1, "max_epochs": 2, **options}
    trainer = trainer_of(strategy, rank=rank, ranks=ranks, **options)
    own = BATCHES if ranks == 1 else [batch.chunk(ranks)[rank] for batch in BATCHES]
    trainer.fit(module, DataLoader(own, batch_size=None))
    return {
        "state": {name: value.clone() for name, value in module.state_dict().items()},
        "logged": {name: float(value) for name, value in trainer.logged_metrics.items()},
        "means": [*module.means, float(module.usual)],
        "random": (torch.get_rng_state(), float(np.random.rand())),
        "progress": trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.state_dict(),
        "strategies": trainer.strategy.plan.strategies if isinstance(strategy, AMPStrategy) else (),
        "steps": trainer.global_step,
    }


def on_rank(rank: int, ranks: int, ends_on: tuple[int, ...], where: str) -> dict[str, Any]:
    module = Deep((where, 1) if rank in ends_on else None)
    strategy = AMPStrategy(rescue=True, share_batch_statistics=False)
    return fit(module, strategy, rank=rank, ranks=ranks)


pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore:predicted to run out", "ignore:It is recommended to use .self.log"),
]


@pytest.mark.parametrize(("where", "batch"), [("forward", 0), ("backward", 3)])
def test_a_rescued_run_leaves_what_a_plain_run_leaves(where: str, batch: int) -> None:
    plain = fit(Deep(), "auto")
    with pytest.warns(UserWarning, match=r"which now runs again: .*recompute.*tried to allocate 3 GiB"):
        found = fit(Deep((where, batch)), AMPStrategy(rescue=True))
    assert "recompute" in found["strategies"]
    for name in ("random", "progress", "steps"):
        assert same(found[name], plain[name]), name
    assert found["logged"] == pytest.approx(plain["logged"], rel=1e-12)
    assert found["means"] == pytest.approx(plain["means"], rel=1e-12), "of both epochs, and the buffer"
    torch.testing.assert_close(found["state"], plain["state"], rtol=1e-12, atol=1e-14)


def test_a_budget_on_a_cpu_is_held_by_counting() -> None:
    eager, lean = Meter(), Meter()
    # the third step: in the second a plan may be made, whose fake tensors the meter would count
    lean.at = 2
    plain = of_example("gene_transformer", "auto", eager)
    budget = int(0.75 * eager.live.peak)
    asked = AMPStrategy(strategies="S1", device_memory=budget, on_predicted_oom="warn", rescue=True)
    with pytest.warns(UserWarning, match=r"OverBudget: .* in blocks\.\d.* made a tensor \[.* of activations"):
        found = of_example("gene_transformer", asked, lean)
    assert found["plan"].strategies == ("S1", "recompute")
    assert lean.live.peak <= budget
    assert same(found["random"], plain["random"])
    torch.testing.assert_close(found["parameters"], plain["parameters"], rtol=1e-10, atol=1e-12)


class RunOut(Run):
    """A decoder with blocks outside of it, for which memory ends once."""

    left = iter(range(1))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        # not in the profile, which runs the step of a copy
        here = batch_idx == 1 and isinstance(self.trainer.strategy, AMPStrategy)
        if here and next(self.left, None) is not None:
            raise torch.OutOfMemoryError("tried to allocate 3 GiB")
        return loss


def of_decoder(module: Run, strategy: Any) -> dict[str, torch.Tensor]:
    trainer_of(strategy).fit(module, DataLoader(torch.zeros(6, 1), batch_size=2))  # type: ignore[arg-type]
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def test_a_decoder_is_rescued_by_another_of_the_plans_that_were_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    # of so small a step nearly all is held before it
    monkeypatch.setattr(install_plan, "LEANER", 0.995)
    case = Case(distances=(0, 1))
    plain, strategy = of_decoder(Run(case), "auto"), AMPStrategy(rescue=True)
    with pytest.warns(UserWarning, match="which now runs again: .* are predicted, instead of"):
        found = of_decoder(RunOut(case), strategy)
    assert strategy.plan is not None
    chosen = next(one for one in strategy.plan.candidates if one.verdict == "chosen")
    assert set(strategy.plan.strategies) != set(chosen.strategies)
    assert strategy.plan.predicted_peak_bytes < chosen.peak_bytes
    torch.testing.assert_close(found, plain, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("where", "rescue"), [("update", True), ("forward", False)])
def test_in_the_update_and_without_rescue_the_error_is_raised(where: str, rescue: bool) -> None:
    with pytest.raises(torch.OutOfMemoryError, match="3 GiB"):
        fit(Deep((where, 1)), AMPStrategy(rescue=rescue))


@pytest.mark.parametrize(("leaner", "tried"), [("", 3), ("another plan, which needs as much", 4)])
def test_the_error_is_raised_without_a_leaner_plan_and_after_three(
    leaner: str, tried: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if leaner:
        monkeypatch.setattr(InstalledPlan, "_leaner", lambda self, batch: leaner)
    module = Deep(("forward", 1), times=9)
    with pytest.raises(torch.OutOfMemoryError, match="3 GiB"), pytest.warns(UserWarning, match="runs again"):
        fit(module, AMPStrategy(rescue=True))
    assert len([*module.times]) == 9 - tried


@pytest.mark.full
@pytest.mark.ranks
def test_ranks_run_a_batch_again_together(tmp_path: Path) -> None:
    plain = run_ranks(on_rank, 2, tmp_path, (), "forward")
    for ends_on, where in (((1,), "forward"), ((0, 1), "backward")):
        for one, other in zip(run_ranks(on_rank, 2, tmp_path, ends_on, where), plain, strict=True):
            assert "recompute" in one["strategies"]
            assert "recompute" not in other["strategies"]
            assert same(one["random"], other["random"])
            torch.testing.assert_close(one["state"], other["state"], rtol=1e-12, atol=1e-14)


def refused(**options: Any) -> Any:
    module, _ = make("unet") if options.pop("by_hand", False) else (Deep(), None)
    if options.pop("lbfgs", False):
        module.configure_optimizers = lambda: torch.optim.LBFGS(module.parameters())
    with pytest.raises(PlanError, match=r"rescue=True is not supported: .* cannot run again") as error:
        fit(module, AMPStrategy(rescue=True), **options)
    return str(error.value)


class Copies(pl.Callback):
    """Notes the bytes that are copied for a batch, and those of what is copied."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        state = StateOfBatch(module, trainer.fit_loop.epoch_loop.automatic_optimization, batch, ())
        self.copied = sum(one.nbytes for one in state.copied)
        metrics = [module.mean, *trainer.fit_loop.epoch_loop._results.values()]
        states = [getattr(metric, name) for metric in metrics for name in metric._defaults]
        # the batches are a global of this module's code
        self.kept = sum(one.nbytes for one in [*module.buffers(), *BATCHES, *states] if isinstance(one, Tensor))


def test_the_copies_of_metrics_are_counted_too() -> None:
    copies = Copies()
    fit(Deep(), "auto", callbacks=[copies])
    assert copies.copied == copies.kept


def test_what_cannot_run_again_is_refused() -> None:
    assert "accumulate_grad_batches" in refused(accumulate_grad_batches=2)
    assert "optimises by hand" in refused(by_hand=True)
    assert "LBFGS" in refused(lbfgs=True)
