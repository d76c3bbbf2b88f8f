"""Claim: a fit that races its plans trains what one plan trains, on one and two ranks, and ends with the fastest.

A step's time is replaced by one that a plan is given, so that the winner is known; everything else is as in a real run.
Double precision, plain descent: parameters of all runs are compared to 1e-12.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from torch import Tensor
from torch.optim.swa_utils import get_ema_avg_fn

from lightning_amp.errors import InstallError
from lightning_amp.lightning.steps import race_of_plans
from lightning_amp.lightning.strategy import hardware, measured_rates, plan_run
from lightning_amp.lightning.strategy.install_plan import InstalledPlan
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.reports.plan_report import labels
from tests.lightning.conformance.cases import STEPS, Batch, Outcome, Site, Tiny, fit, trained
from tests.ranks import run_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks"),
]
EPOCHS = 9
"""Of 4 batches each: a race takes at most 24 of them here."""
WINNER = ("fused", "sparse")
SECONDS = {WINNER: 1.0, ("fused",): 1.1}
"""Of a step under these plans, so that the winner follows on a plan with modules of its own; 1.2 under others."""
BEFORE = ("sdpa",)
"""The last plan that runs before those with `sparse` or `S4`."""
KINDS = {
    "recompute": "RecomputedStrata",
    "stream": "StreamedStrata",
    "fused": "FusedAttentionproducts",
    "sdpa": "FusedAttentionsdpa",
    "S4": "KeyFirstDecode",
    "sparse": "SparseLikelihood",
}
"""Class of a module that a strategy installs, with its kernel."""


@dataclass(frozen=True, kw_only=True)
class Racing(Site):
    """A place where policy "auto" races, or does not."""

    race: bool = True
    in_parts: bool = False

    def strategy(self) -> Any:
        if not self.strategies:
            return "auto"
        return AMPStrategy(
            race=self.race,
            model_parallel_size=self.model_ranks,
            save_distributed_checkpoint=self.in_parts,
        )


PLACED = {"S1", "S2", "S5", "nodes", "strata"}
"""Of the data and the model axis, which no race changes."""


def raced(strategies: Iterable[str]) -> tuple[str, ...]:
    return tuple(s for s in strategies if s not in PLACED)


class Seen(Callback):
    """The strategies of the plan of every batch."""

    def __init__(self) -> None:
        self.plans: list[tuple[str, ...]] = []

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        self.plans.append(raced(trainer.strategy.plan.strategies))


class Installed(Callback):
    """Whether in every batch the modules are those of its plan, told by the decoder's loop and leaves."""

    def __init__(self) -> None:
        self.wrong: list[tuple[str, ...]] = []

    def on_train_batch_start(self, trainer: Trainer, module: Any, *args: Any) -> None:  # type: ignore[override]
        parts = list(module.decoder.modules())
        found = {f"{type(part).__name__}{getattr(part, 'kernel', '')}" for part in parts}
        strategies = trainer.strategy.plan.strategies
        if any((kind in found) != (strategy in strategies) for strategy, kind in KINDS.items()):
            self.wrong.append(strategies)


class Average(WeightAveraging):
    """An exponential average of the weights."""

    def __init__(self) -> None:
        super().__init__(avg_fn=get_ema_avg_fn(0.9))


class Manual(Tiny):
    """The same under manual optimisation."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


@contextmanager
def known_times(strategies_now: Any, rank: int) -> Iterator[None]:
    """Let a step take the least time under the plan that is to win; ranks after the first are faster than that one."""
    real = race_of_plans.Moment

    class Known:
        def __init__(self, device: torch.device) -> None:
            pass

        def seconds_since(self, earlier: "Known") -> float:
            strategies = raced(strategies_now())
            if rank:
                return 0.1 if "stream" in strategies else 0.5
            return SECONDS.get(strategies, 1.2)

    race_of_plans.Moment = Known  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        race_of_plans.Moment = real  # type: ignore[misc]


def run(site: Racing, module: Tiny | None = None, **options: Any) -> Outcome:
    """Train; what was trained, the plans of all steps, and the last plan."""
    module, seen, installed = module or Tiny(), Seen(), Installed()
    callbacks = [*options.pop("callbacks", []), seen, installed]
    with known_times(lambda: module.trainer.strategy.plan.strategies, site.rank):
        found = fit(site, module, **{"max_epochs": EPOCHS, "callbacks": callbacks, **options})
    assert not installed.wrong
    found |= {"plans": seen.plans, "plan": seen_plan(module).to_json()}
    return found


def seen_plan(module: Tiny) -> Plan:
    plan = module.trainer.strategy.plan
    assert isinstance(plan, Plan)
    return plan


CASES: dict[str, dict[str, Any]] = {
    "automatic": {},
    "accumulated": {"accumulate_grad_batches": 3},
    "clipped": {"gradient_clip_val": 0.5},
    "averaged weights": {"callbacks": "average"},
    "validated between": {"limit_val_batches": 2, "val_check_interval": 2},
    "manual": {"module": "manual"},
}


def both(rank: int, ranks: int, name: str, folder: Path, *, model_ranks: int = 1) -> tuple[Outcome, Outcome]:
    """With a race and without."""

    def once(race: bool) -> Outcome:
        options = dict(CASES[name])
        if options.get("callbacks"):
            options["callbacks"] = [Average()]
        module = Manual() if options.pop("module", None) else None
        site = Racing(
            strategies="amp", rank=rank, ranks=ranks, model_ranks=model_ranks, folder=folder, race=race
        )
        return run(site, module, **options)

    return once(True), once(False)


def compare(raced: Outcome, plain: Outcome) -> None:
    assert len(set(raced["plans"])) >= 4, raced["plans"]
    assert len(set(plain["plans"])) == 1
    assert raced["plans"][-1] == WINNER
    ended = Plan.from_json(raced["plan"])
    assert ended.measured_step_seconds == 1.0
    for name, value in plain.items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(raced[name], value, rtol=1e-12, atol=1e-12, msg=name)


class Default(Site):
    """A place where nothing is asked of the strategy."""

    def strategy(self) -> Any:
        return AMPStrategy()


def test_two_fits_have_the_same_plan_and_the_same_bits_whatever_the_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    site, rates, found = Default(strategies="amp", folder=tmp_path), measured_rates.measured_rates(1), []
    for scale, seconds in ((1, SECONDS), (10, {("stream",): 0.1})):
        slower = replace(rates, memory_bytes=rates.memory_bytes / scale)
        monkeypatch.setattr(hardware, "measured_rates", lambda threads, slower=slower: slower)
        monkeypatch.setitem(globals(), "SECONDS", seconds)
        found.append(run(site, max_epochs=3))
    one, other = found
    assert one["plans"] == other["plans"]
    assert len(set(one["plans"])) == 1
    assert one["plan"] == other["plan"]
    assert all(torch.equal(other[name], value) for name, value in one.items() if isinstance(value, Tensor))
    assert f"plan            {labels(Plan.from_json(one['plan']))}\n" in caplog.text


@pytest.mark.parametrize("name", CASES)
def test_one_device_trains_what_one_plan_trains(name: str, tmp_path: Path) -> None:
    compare(*both(0, 1, name, tmp_path))


def all_cases(rank: int, ranks: int, folder: Path) -> dict[str, tuple[Outcome, Outcome]]:
    return {name: both(rank, ranks, name, folder) for name in CASES}


@pytest.mark.ranks
def test_two_ranks_train_what_one_plan_trains_and_switch_together(tmp_path: Path) -> None:
    results = run_ranks(all_cases, 2, tmp_path, tmp_path, timeout=120)
    for name in CASES:
        for result in results:
            compare(*result[name])
        assert results[0][name][0]["plans"] == results[1][name][0]["plans"], name


def on_a_model_axis(rank: int, ranks: int, folder: Path) -> list[tuple[Outcome, Outcome]]:
    return [both(rank, ranks, name, folder, model_ranks=2) for name in ("accumulated", "clipped")]


@pytest.mark.ranks
def test_what_ranks_have_parts_of_stays_while_plans_of_a_model_axis_race(tmp_path: Path) -> None:
    results = run_ranks(on_a_model_axis, 2, tmp_path, tmp_path, timeout=60)
    for found, same in zip(*results, strict=True):
        compare(*found)
        assert found[0]["plans"] == same[0]["plans"]
        first, last = (Plan.from_json(outcome["plan"]) for outcome in reversed(found))
        assert set(first.strategies) & PLACED - {"S1"}, "the plans split something"
        assert set(first.strategies) & PLACED == set(last.strategies) & PLACED


@pytest.mark.parametrize("options", [{"deterministic": True}, {"fast_dev_run": True}])
def test_no_race_where_sums_are_to_keep_their_order(options: dict[str, Any], tmp_path: Path) -> None:
    try:
        found = run(Racing(strategies="amp", folder=tmp_path), **options)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(set(found["plans"])) == 1
    assert Plan.from_json(found["plan"]).measured_step_seconds is None


def test_a_resumed_run_starts_with_the_plan_that_has_won(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Racing(strategies="amp", folder=tmp_path)
    checkpoint = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    reads, read = [], plan_run.read_run
    monkeypatch.setattr(plan_run, "read_run", lambda *args: reads.append(args) or read(*args))
    whole = run(site, max_epochs=EPOCHS + 2, callbacks=[checkpoint], enable_checkpointing=True)
    assert len(reads) == 1, "data and module are read once, however many plans run"
    # weights are loaded before the module is made double
    module, seen = Tiny().double(), Seen()
    again = site.trainer(max_epochs=EPOCHS + 2, callbacks=[seen])
    again.fit(module, site.loader(), ckpt_path=tmp_path / f"epoch={EPOCHS - 1}.ckpt")
    assert len(reads) == 2
    assert set(seen.plans) == {WINNER}
    assert seen_plan(module).measured_step_seconds == 1.0
    for name, value in trained(site, module).items():
        if name != "losses":
            torch.testing.assert_close(value, whole[name], rtol=1e-12, atol=1e-12, msg=name)
    # one that was saved during the race begins a new one
    module, seen = Tiny(), Seen()
    early = site.trainer(max_epochs=4, callbacks=[seen])
    early.fit(module, site.loader(), ckpt_path=tmp_path / "epoch=1.ckpt")
    assert len(set(seen.plans)) > 1
    # a Trainer without this package reads the checkpoint too
    plain = replace(site, strategies="").trainer(max_epochs=EPOCHS + 2)
    plain.fit(Tiny(), site.loader(), ckpt_path=tmp_path / f"epoch={EPOCHS - 1}.ckpt", weights_only=False)


PLACES: dict[str, dict[str, Any]] = {
    "a file": {},
    "a directory": {"in_parts": True},
    "a model axis": {"model_ranks": 2},
}
"""Of a run on two ranks that is resumed."""


def resume(site: Racing, path: Path, **options: Any) -> tuple[Outcome, list[tuple[str, ...]], Plan]:
    """Go on from a checkpoint; what was trained, the plans of the steps, and the last plan."""
    # weights are loaded before the module is made double
    module, seen = Tiny().double(), Seen()
    trainer = site.trainer(max_epochs=EPOCHS + 2, callbacks=[seen], **options)
    with known_times(lambda: trainer.strategy.plan.strategies, site.rank):
        trainer.fit(module, site.loader(), ckpt_path=path)
    return trained(site, module), seen.plans, seen_plan(module)


def resumed(rank: int, ranks: int, folder: Path) -> dict[str, list[Any]]:
    """An uninterrupted run; and for those that go on from its checkpoints what they trained, and their plans."""
    found = {}
    for name, place in PLACES.items():
        site = Racing(strategies="amp", rank=rank, ranks=ranks, folder=folder / name, **place)
        saved = ModelCheckpoint(site.folder, filename="{epoch}", save_top_k=-1, every_n_epochs=EPOCHS)
        whole = run(site, max_epochs=EPOCHS + 2, callbacks=[saved], enable_checkpointing=True)
        found[name] = [whole, *resume(site, site.folder / f"epoch={EPOCHS - 1}.ckpt")]
    return found


@pytest.mark.ranks
def test_a_run_that_is_resumed_on_two_ranks_starts_with_the_plan_that_has_won(tmp_path: Path) -> None:
    results = run_ranks(resumed, 2, tmp_path, tmp_path, timeout=120)
    for name in PLACES:
        for whole, again, plans, plan in (result[name] for result in results):
            assert set(plans) == {WINNER}, name
            assert len(plans) == 2 * STEPS
            assert plan == results[0][name][3], "ranks have one plan"
            assert plan.measured_step_seconds == 1.0
            for key, value in again.items():
                if key != "losses":
                    torch.testing.assert_close(value, whole[key], rtol=1e-12, atol=1e-12, msg=f"{name} {key}")
    # for other ranks it is another question
    alone = Racing(strategies="amp", folder=tmp_path)
    _, plans, plan = resume(alone, tmp_path / "a file" / f"epoch={EPOCHS - 1}.ckpt")
    assert len(set(plans)) > 1
    assert plan.mesh.data == 1


def test_plans_that_leave_no_memory_to_spare_do_not_run(tmp_path: Path) -> None:
    site = Racing(strategies="amp", folder=tmp_path)
    outcome = run(site)
    free = Plan.from_json(outcome["plan"])
    peak = {raced(c.strategies): c.peak_bytes for c in free.candidates}
    # of the plans that race the heaviest is one byte above the half
    budget = 2 * max(peak[strategies] for strategies in outcome["plans"]) - 2

    @dataclass(frozen=True, kw_only=True)
    class Tight(Racing):
        def strategy(self) -> Any:
            return AMPStrategy(device_memory=f"{budget}B", race=True)

    found = run(Tight(strategies="amp", folder=tmp_path))
    most = max(peak[found["plans"][0]], budget / 2)
    over = {strategies for strategies, size in peak.items() if size > most}
    assert over & set(outcome["plans"])
    assert not over & set(found["plans"])
    assert len(set(found["plans"])) > 1


def refused_on_one(rank: int, ranks: int, folder: Path) -> tuple[Outcome, Outcome]:
    """The last rank refuses what comes last, so that what was installed before, the fastest, stays."""
    made = InstalledPlan._made

    def refusing(self: InstalledPlan, plan: Plan, **options: Any) -> Any:
        if rank == ranks - 1 and {"sparse", "S4"} & set(plan.strategies):
            raise InstallError("not here")
        return made(self, plan, **options)

    InstalledPlan._made, SECONDS[BEFORE] = refusing, 1.0  # type: ignore[method-assign]
    try:
        return both(rank, ranks, "automatic", folder)
    finally:
        del SECONDS[BEFORE]
        InstalledPlan._made = made  # type: ignore[method-assign]


@pytest.mark.ranks
def test_what_one_rank_refuses_runs_on_none(tmp_path: Path) -> None:
    results = run_ranks(refused_on_one, 2, tmp_path, tmp_path, timeout=40)
    for raced, plain in results:
        assert raced["plans"][-1] == BEFORE
        assert not any({"sparse", "S4"} & set(strategies) for strategies in raced["plans"])
        assert raced["plans"] == results[0][0]["plans"]
        assert len(set(raced["plans"])) >= 3
        for name, value in plain.items():
            if isinstance(value, Tensor):
                torch.testing.assert_close(raced[name], value, rtol=1e-12, atol=1e-12, msg=name)


def test_a_plan_keeps_its_times_in_its_json(tmp_path: Path) -> None:
    found = Plan.from_json(run(Racing(strategies="amp", folder=tmp_path))["plan"])
    assert Plan.from_json(found.to_json()) == found
    measured = {c.strategies for c in found.candidates if c.measured_seconds is not None}
    assert found.strategies in measured
    assert len(measured) >= 4
    assert replace(found, measured_step_seconds=None) != found
