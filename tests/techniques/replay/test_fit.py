"""Modules without lists of blocks train under a budget, at the predicted peak, with the numbers of a plain run."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_amp import AMPStrategy
from lightning_amp.errors import AmpError
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.techniques.replay.row import ONE_BY_ONE, ReplayOperators, written
from tests.lightning.strategy.strategy_cases import RunningRanks
from tests.ranks import run_ranks
from tests.techniques.replay.models import MODELS, Points, difference, fit


def test_any_module_trains_within_a_budget_at_the_predicted_peak() -> None:
    for name, share in (("U-Net", 0.7), ("WaveNet", 0.5), ("points", 0.5)):
        before, meter, _ = fit(name, "auto", steps=3)
        budget = int(share * meter.live.peak)
        after, metered, plan = fit(name, AMPStrategy(device_memory=budget), steps=3)
        assert [rule.strategy for rule in plan.rules] == ["replay"], name
        assert metered.live.peak <= budget, name
        assert metered.live.peak == pytest.approx(plan.predicted_peak_bytes, rel=0.01), name
        # the same operators on the same values
        assert difference(before, after) == 0.0, name


def test_a_tight_budget_runs_stretches_again_for_one_tensor_after_the_other() -> None:
    before, meter, _ = fit("ResNet", "auto", steps=3)
    budget = int(0.52 * meter.live.peak)
    after, metered, plan = fit("ResNet", AMPStrategy(device_memory=budget), steps=3)
    (spec,) = (rule.spec for rule in plan.rules)
    assert ONE_BY_ONE in {kind for _, kind in spec.segments}
    assert metered.live.peak == plan.predicted_peak_bytes <= budget
    assert difference(before, after) == 0.0
    # without a budget nothing asks for the time that this takes
    free = fit("ResNet", AMPStrategy(strategies="replay"), steps=1)[2]
    assert ONE_BY_ONE not in {
        kind for rule in free.rules if rule.strategy == "replay" for _, kind in rule.spec.segments
    }


def test_a_plan_is_kept_as_json_and_carried_out_again(tmp_path: Path) -> None:
    before, _, plan = fit("points", AMPStrategy(strategies="replay"), steps=3)
    (tmp_path / "plan.json").write_text(plan.to_json())
    again, _, given = fit("points", AMPStrategy(plan=tmp_path / "plan.json"), steps=3)
    assert [rule.spec for rule in given.rules] == [rule.spec for rule in plan.rules]
    assert given.predicted_peak_bytes == plan.predicted_peak_bytes
    assert difference(before, again) == 0.0
    assert isinstance(copy.deepcopy(given), Plan)
    assert written(ReplayOperators(ends="12,30-,47+").segments) == "12,30-,47+"


def on_ranks(
    rank: int, ranks: int, model: str, strategies: str, double: bool = False
) -> tuple[dict[str, Tensor], int, list[str]]:
    # each rank has half of the batches
    options: dict[str, Any] = {"devices": ranks, "plugins": [RunningRanks(rank, ranks)], "double": double}
    module, meter, plan = fit(model, AMPStrategy(strategies=strategies), steps=4, **options)
    return module.state_dict(), meter.live.peak, [rule.strategy for rule in plan.rules]


@pytest.mark.ranks
def test_ranks_average_gradients_of_replayed_steps(tmp_path: Path) -> None:
    plain, replayed = (run_ranks(on_ranks, 2, tmp_path, "U-Net", names) for names in ("S1", "S1,replay"))
    for (right, whole, _), (state, peak, rules) in zip(plain, replayed, strict=True):
        assert "replay" in rules
        assert peak < 0.75 * whole
        torch.testing.assert_close(state, right, rtol=0, atol=0)


def by_hand(kind: Any) -> Any:
    """With two backward passes and two updates in a step."""

    class Manual(kind):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            optimizer: Any = self.optimizers()
            for _ in range(2):
                optimizer.zero_grad(set_to_none=False)
                loss: Tensor = self.loss(batch)
                self.manual_backward(loss)
                self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
                optimizer.step()
            return loss

    return Manual


def test_manual_optimisation_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "points", (by_hand(Points), MODELS["points"][1]))
    before, meter, _ = fit("points", "auto", steps=3)
    after, metered, plan = fit("points", AMPStrategy(strategies="replay"), steps=3)
    assert metered.live.peak < 0.5 * meter.live.peak
    assert metered.live.peak <= plan.predicted_peak_bytes
    assert difference(before, after) == 0.0


class Compiled(Points):
    def __init__(self) -> None:
        super().__init__()
        self.enter = torch.compile(self.enter)


class Transformed(Points):
    def loss(self, batch: Tensor) -> Tensor:
        grad = torch.func.grad(lambda x: self.enter(x).sin().sum())(batch)
        return super().loss(batch) + grad.square().mean()  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")
def test_what_is_not_supported_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = MODELS["points"][1]
    for kind, why in ((Compiled, "torch.compile"), (Transformed, "torch.func")):
        monkeypatch.setitem(MODELS, "points", (kind, batches))
        with pytest.raises(AmpError, match=why):
            fit("points", AMPStrategy(strategies="replay"), steps=2)
