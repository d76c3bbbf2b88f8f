"""Claim: a step whose operators were measured is predicted as it was measured, at this size and between sizes."""

from dataclasses import replace
from itertools import count

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_amp.cli.main import main
from lightning_amp.costs.device_rates import CPU_CORE, Rates
from lightning_amp.costs.measured_operators import MeasuredOperators
from lightning_amp.errors import ModelError, PlanError
from lightning_amp.footprint.chain.chain_of import count_step
from lightning_amp.footprint.operator_rates import OperatorRates
from lightning_amp.footprint.run.run_settings import UNDER_AMP
from lightning_amp.simulation import calibrate, calibrate_operators
from lightning_amp.simulation.calibrate_operators import StepClock, operators_report

CPU = torch.device("cpu")
OPERATOR, WHOLE = 1e-3, 0.5
"""Seconds of every operator, and of a whole step, in these tests."""


class Net(LightningModule):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Dropout(0.5), nn.Linear(width, 2))

    def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
        return self.layers(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


class Wandering(Net):
    """Every step calls one more operator than the step before."""

    steps = count(1)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return super().training_step(batch, index) + sum(batch.sum() for _ in range(next(self.steps)))


@pytest.fixture
def clock(monkeypatch) -> None:
    """A clock by which every operator takes OPERATOR seconds, and every step WHOLE."""

    class Moment:
        def __init__(self, device: torch.device) -> None:
            pass

        def seconds_since(self, earlier: object) -> float:
            return OPERATOR

    monkeypatch.setattr(calibrate_operators, "TimedMoment", Moment)
    monkeypatch.setattr(StepClock, "seconds", property(lambda _: WHOLE))


def measured(module: LightningModule, rows: int = 16) -> calibrate_operators.OperatorCalibration:
    return calibrate_operators.calibrate_operators(
        module, torch.ones(rows, 6), run_settings=UNDER_AMP, rates=CPU_CORE, device=CPU
    )


def test_a_counted_step_takes_the_seconds_that_were_measured(clock) -> None:
    found = measured(Net())
    assert [step.rows for step in found.steps] == [1, 2, 4, 8, 16]
    assert found.check is not None
    assert found.check.rows == 12
    for step in (*found.steps, found.check):
        assert step.after == pytest.approx(WHOLE)
        assert step.before < WHOLE / 100
    rates = Rates.from_json(replace(CPU_CORE, operators=found.operators).to_json())
    assert rates.operators == found.operators
    # of the check too, which is no measured size
    for rows in (16, 12):
        counted = count_step(Net(), torch.ones(16, 6), [], batch_size=rows, rates=OperatorRates.of(rates))
        assert counted.chain.seconds == pytest.approx(WHOLE)
    assert "12 rows" in operators_report(found)


def test_the_module_and_the_random_numbers_do_not_change(clock) -> None:
    torch.manual_seed(0)
    module = Net()
    before, state = {k: v.clone() for k, v in module.state_dict().items()}, torch.get_rng_state()
    measured(module)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())


def test_other_sizes_are_interpolated() -> None:
    found = MeasuredOperators(step="a step", points={"mm": ((1.0, 2.0), (4.0, 4.0))})
    assert found.seconds("mm", 1.0) == 2.0
    assert found.seconds("mm", 4.0) == 4.0
    # the ratio, 2 and 1, is 1.5 in the middle of the logarithms
    assert found.seconds("mm", 2.0) == pytest.approx(3.0)
    assert found.seconds("mm", 0.5) == 1.0
    assert found.seconds("mm", 8.0) == 8.0
    assert found.seconds("add", 3.0) == 3.0


@pytest.mark.parametrize("points", [(), ((1.0, 0.0),), ((2.0, 1.0), (1.0, 1.0)), ((1.0, float("inf")),)])
def test_seconds_out_of_range_are_refused(points) -> None:
    with pytest.raises(PlanError, match="operator .mm. has the seconds .*calibrate again"):
        MeasuredOperators(step="a step", points={"mm": points})


def test_a_step_that_calls_other_operators_each_time_is_refused(clock) -> None:
    with pytest.raises(ModelError, match="'Wandering' calls other operators each time"):
        measured(Wandering())


def test_parameters_without_values_are_refused() -> None:
    with torch.device("meta"):
        module = Net()
    with pytest.raises(ModelError, match="'Net' cannot be measured, because its parameters have no values"):
        measured(module)


def test_sizes_without_room_are_left_out(clock, monkeypatch) -> None:
    module = Net(width=6)
    peak = calibrate_operators.profile_module(module, torch.ones(512, 6), run_settings=UNDER_AMP).peak_bytes
    monkeypatch.setattr(calibrate_operators, "device_budget", lambda *_, **__: peak)
    found = measured(module, rows=512)
    assert [step.rows for step in found.steps] == [32, 64, 128, 256]
    assert "512 rows need" in operators_report(found)
    monkeypatch.setattr(calibrate_operators, "device_budget", lambda *_, **__: 10)
    with pytest.raises(PlanError, match="'Net' cannot be measured here: .* use a smaller batch"):
        measured(module)


def test_a_busy_device_is_refused(clock, monkeypatch) -> None:
    seconds = iter([1.0, 3.0, 3.0, 3.0, 3.0] * 9)
    monkeypatch.setattr(StepClock, "seconds", property(lambda _: next(seconds)))
    with pytest.raises(PlanError, match="something else keeps it busy"):
        measured(Net())


def test_a_plan_with_the_file_has_the_measured_seconds(clock, monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(calibrate, "_measure", lambda *_: [[1.0], [1.0]])
    file, step = tmp_path / "rates.json", [f"{__name__}:Net", "--batch", "16x6"]
    main(["calibrate", *step, "--device", "cpu", "--out", str(file)])
    assert "operators of a step of Net on cpu" in capsys.readouterr().out
    main(["plan", *step, "--rates", str(file)])
    assert "predicted step          500 ms" in capsys.readouterr().out


@pytest.mark.parametrize("name", [f"{__name__}:Net", "a_folder"])
def test_a_name_without_a_batch_is_refused(name, tmp_path, capsys) -> None:
    assert main(["calibrate", name, "--out", str(tmp_path / "rates.json")]) == 2
    assert f"{name!r} was named without --batch" in capsys.readouterr().err
