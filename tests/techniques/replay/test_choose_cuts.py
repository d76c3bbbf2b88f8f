"""Claim: segments are chosen within their bound wherever there are any, from the fewest bytes to those of no replay."""

from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_amp import plan
from lightning_amp.costs.device_rates import CPU_CORE
from lightning_amp.costs.profiled_step import Draft
from lightning_amp.footprint.run.run_settings import RunSettings
from lightning_amp.lightning.profiling.step_of_module import StepOfModule
from lightning_amp.planning.modules.candidates import draft
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.replay.choose_cuts import (
    AT_ONCE,
    KEPT,
    ONE_BY_ONE,
    Level,
    Replays,
    Stretches,
    fastest,
    least,
)
from lightning_amp.techniques.replay.row import add
from tests.techniques.replay.models import Trained


class Layers(Trained):
    """Products with functions between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(128, 128) for _ in range(12))

    def loss(self, batch: Tensor) -> Tensor:
        for layer in self.layers:
            batch = batch + layer(batch).sin().exp().cos()
        return batch.mean()


class Stacked(LightningModule):
    """Modules one after the other, whose optimizer takes much memory."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.body = nn.Sequential(*layers)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.body(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), foreach=True)


def chain(n: int) -> Stretches:
    """Operators one after the other, each saved and read by the next one alone."""
    random = np.random.default_rng(0)
    made, seconds = random.integers(10, 1000, n), random.uniform(1, 10, n)
    p, q = np.indices((n + 1, n + 1))
    until = np.concatenate([[0], np.cumsum(made)])
    saved = np.where(q > p, until[q] - until[p], 0.0)
    took = np.concatenate([[0], np.cumsum(seconds)])
    return Stretches(
        places=np.arange(n + 1),
        out=np.where(q > p, made[np.maximum(q - 1, 0)], 0.0),
        saved=saved,
        saved_each=np.full_like(saved, made.mean()),
        levels=(
            Level(
                keeps=np.array([], int),
                held=0 * saved,
                unsaved=0 * saved,
                seconds=np.where(q > p, took[q] - took[p], 0.0),
                at_work=saved,
                one_by_one_seconds=saved,
            ),
        ),
    )


def test_a_stretch_without_operators_that_run_again_is_kept_beside_replays() -> None:
    whole = chain(20)
    # none that ends at the end does, as after a backward pass inside the step
    seconds = np.where(np.arange(21) == 20, 0.0, whole.levels[0].seconds)
    some = replace(whole, levels=(replace(whole.levels[0], seconds=seconds),))
    found = Replays(lambda: some).choose(2**50)
    assert not isinstance(found, str)
    assert found.segments
    assert found.n_bytes < some.all_saved


def test_every_bound_that_can_be_met_is_met() -> None:
    stretches = chain(40)
    fewest, took = least(stretches), np.inf
    for bound in np.linspace(1.01 * fewest.n_bytes, stretches.all_saved, 60):
        found = fastest(stretches, bound)
        assert found is not None, bound
        assert fewest.n_bytes <= found.n_bytes <= bound, (bound, found.n_bytes)
        # more room takes less time, but for the parts of a bound in which bytes are counted
        assert found.seconds <= 1.1 * took, (bound, found.seconds, took)
        took = found.seconds
    assert took == 0


def test_what_a_backward_pass_frees_is_held_no_longer() -> None:
    whole = chain(40)
    parts = replace(whole, borders=(25,))
    crosses = whole.out[0, 25]
    assert parts.all_saved == max(whole.saved[0, 25], crosses + whole.saved[25, 40]) < whole.all_saved
    fewest = least(parts)
    for bound in np.linspace(1.01 * fewest.n_bytes, parts.all_saved, 20):
        found = fastest(parts, bound)
        assert found is not None
        assert found.n_bytes <= bound
        p = 0
        for q, kind in found.segments:
            assert kind == KEPT or not p < 25 < q
            p = q
    assert found.seconds == 0


def test_gradients_that_the_backward_pass_makes_have_room() -> None:
    torch.manual_seed(0)
    step = StepOfModule(Layers(), lambda: torch.randn(256, 128), run_settings=RunSettings(frees_gradients=True))
    seen = step.profiled(CPU_CORE)
    for share in (0.6, 0.75):
        budget = int(share * seen.peak_bytes(1))
        made = draft(seen, ("replay",), ranks=1, budget=budget)
        assert not isinstance(made, str)
        assert step.count(made.targets).peak_bytes <= made.peak_bytes <= budget
    # unless they are freed as they are made
    budget = int(0.5 * seen.peak_bytes(1))
    alone, both = (draft(seen, names, ranks=1, budget=budget) for names in (("replay",), ("replay", "early_update")))
    assert not isinstance(alone, str)
    assert not isinstance(both, str)
    assert step.count(both.targets).peak_bytes <= budget < step.count(alone.targets).peak_bytes


def test_a_plan_counts_each_stretch_once() -> None:
    stretches = chain(20)
    cuts = least(stretches, kinds=(ONE_BY_ONE,))
    replays = SimpleNamespace(stretches=stretches, choose=lambda bound: cuts)
    draft = add(
        SimpleNamespace(facts={"replay": lambda _: replays}, held_bytes=0, frees_gradients=True),
        Draft(ranks=1, peak_bytes=10**6, seconds=1.0),
        None,
    )
    assert draft.targets[0].why.startswith(f"{len(cuts.segments)} stretch")


def test_the_prediction_includes_the_peak_of_the_optimizer() -> None:
    sines = (module for _ in range(8) for module in (nn.Linear(256, 256), nn.Tanh(), nn.Tanh(), nn.Tanh()))
    module, batch = Stacked(sines), torch.zeros(192, 256)
    predicted = plan(module, batch, device_memory=12_000_000).plan
    counted = plan(module, batch, device_memory="1GiB", strategies="replay").plan.predicted_peak_bytes
    assert f"the peak {format_bytes(counted)} instead of" in predicted.diagnosis.helps["replay"]


def test_a_wider_window_takes_more_bytes_and_less_time() -> None:
    stretches = chain(40)
    level = replace(stretches.levels[0], at_work=stretches.saved / 4)
    stretches = replace(stretches, levels=(level,))
    whole, seconds = stretches.saved[0, 40], np.inf
    for window in (0, whole / 16, whole / 8):
        inside, _, took = stretches.of_way((ONE_BY_ONE, 0), window)
        assert inside[0, 40] == whole / 4 + window
        assert level.seconds[0, 40] <= took[0, 40] < seconds
        seconds = took[0, 40]
    assert stretches.of_way((ONE_BY_ONE, 0), whole)[0][0, 40] == whole


def test_results_that_take_long_are_kept_where_there_is_room() -> None:
    plain = chain(40)
    (level,) = plain.levels
    # a third of the bytes takes nine tenths of the time
    keeps = replace(level, keeps=np.arange(0, 40, 3), held=plain.saved / 3, seconds=level.seconds / 10)
    both = replace(plain, levels=(level, keeps))
    for bound in np.linspace(1.01 * least(plain).n_bytes, plain.all_saved, 20):
        one, other = fastest(plain, bound), fastest(both, bound)
        assert one is not None
        assert other is not None
        assert other.n_bytes <= bound
        # but for the parts of a bound in which bytes are counted
        assert other.seconds <= 1.05 * one.seconds
        assert set(other.keeps) <= set(range(0, 40, 3))
        if 0.5 * plain.all_saved < bound < 0.9 * plain.all_saved:
            assert other.keeps
            assert other.seconds < 0.5 * one.seconds


def test_no_barred_stretch_is_replayed() -> None:
    parts = replace(chain(40), barred=(5, 25))
    for kind in (AT_ONCE, ONE_BY_ONE):
        took = parts.of_way((kind, 0))[2]
        assert [q for q in range(11, 41) if np.isfinite(took[10, q])] == list(range(11, 26))
    found = fastest(parts, 0.5 * parts.all_saved)
    assert found is not None
    p = 0
    for q, kind in found.segments:
        assert kind == KEPT or not (p <= 5 < q or p <= 25 < q)
        p = q
