"""Claim: a module with a decoder gets the techniques of any module on top of those of its decoder, as much of them as
its budget needs, to the numbers of a plain Trainer and with the predicted peak; offline it is the same plan."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

import lightning_amp
from lightning_amp import ModulePlan
from lightning_amp.errors import PlanError
from lightning_amp.lightning.profiling.loaders import loaders_of
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.planning.modules.plan_decoder import with_rules_beyond
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.techniques.hic.attention import rotary
from lightning_amp.techniques.recompute.row import RecomputeBlock
from tests.any_module import Meter
from tests.lightning.strategy.strategy_cases import trainer_of
from tests.optimised import Optimised
from tests.ranks import run_ranks
from tests.techniques.recompute.test_beside_decoder import CASE, DECODER, ENCODERS, Run, beside, cells
from tests.techniques.sharded_cases import Case, decoder, differences, inputs, make_plan

Fitted = tuple[Plan, int, dict[str, torch.Tensor]]
SMALL = Case(distances=(0, 1))
"""Every fit counts its step four times or more."""


class Decoding(Meter):
    """It sees the tables which attention keeps from step to step: they are made again."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        rotary._kept.cache_clear()
        super().on_train_batch_start(trainer, module, batch, batch_idx)


def fitted(rank: int = 0, ranks: int = 1, case: Case = SMALL, **options: Any) -> Fitted:
    """The plan of a run, the least bytes of its later steps, and the parameters that three steps leave."""
    module, meter = Run(case), Decoding()
    strategy: Any = AMPStrategy(**options) if options else "auto"
    trainer = trainer_of(strategy, rank=rank, ranks=ranks, max_steps=3, callbacks=[meter])
    trainer.fit(module, cells(case))
    left = {name: p.detach() for name, p in module.named_parameters()}
    return getattr(strategy, "plan", None), meter.live.peak, left  # type: ignore[return-value]


@pytest.fixture(scope="module")
def least() -> Fitted:
    """All that can be is done, for there is next to nothing."""
    with pytest.warns(UserWarning, match="predicted to run out of memory"):
        return fitted(device_memory="1KiB", on_predicted_oom="warn")


@pytest.fixture(scope="module")
def alone() -> Plan:
    """The policy's plan of the decoder, where it fits."""
    plan, measured, _ = fitted(device_memory="1GiB")
    assert plan.predicted_peak_bytes == measured
    return plan


@pytest.fixture(scope="module")
def plain() -> dict[str, torch.Tensor]:
    return fitted()[2]


def again(plan: Plan) -> list[str]:
    return [rule.fqn for rule in plan.rules if isinstance(rule.spec, RecomputeBlock)]


@pytest.mark.full
def test_all_blocks_run_again_where_that_is_not_enough(least: Fitted, plain: dict[str, torch.Tensor]) -> None:
    plan, measured, left = least
    assert {*again(plan)} == {*ENCODERS}
    assert plan.fits is False
    assert plan.predicted_peak_bytes == measured
    assert differences(left, plain) == []
    with pytest.raises(PlanError, match=r"predicted to run out of memory .* per rank of 1.00 KiB"):
        fitted(device_memory="1KiB")


@pytest.mark.parametrize(("missing", "blocks"), [(15_000, 1), (36_000, 2)])
def test_as_few_blocks_as_the_budget_asks_for(
    alone: Plan, plain: dict[str, torch.Tensor], missing: int, blocks: int
) -> None:
    """On top of the leanest plan of the decoder, which alone saves 11 KB."""
    budget = alone.predicted_peak_bytes - missing
    plan, measured, left = fitted(device_memory=f"{budget}B")
    assert again(plan) == [ENCODERS[1], ENCODERS[3]][:blocks]
    assert plan.axes != alone.axes
    assert measured <= budget
    assert plan.predicted_peak_bytes <= budget
    assert plan.predicted_peak_bytes == measured
    assert plan.fits
    assert plan.candidates[0].strategies == plan.strategies
    assert Plan.from_json(plan.to_json()) == plan
    assert differences(left, plain) == []


def test_a_leaner_plan_of_the_decoder_where_that_is_faster(alone: Plan) -> None:
    plan, measured, _ = fitted(device_memory=f"{alone.predicted_peak_bytes - 500}B")
    assert again(plan) == []
    assert "sparse" in plan.strategies
    assert "sparse" not in alone.strategies
    assert plan.predicted_peak_bytes == measured


@pytest.mark.parametrize("missing", [0, 5_000, 30_000])
def test_offline_it_is_the_plan_of_the_fit(alone: Plan, missing: int) -> None:
    budget = f"{alone.predicted_peak_bytes - missing}B"
    offline = lightning_amp.plan(Run(SMALL), inputs(SMALL)[2], device_memory=budget)
    plan = fitted(device_memory=budget)[0]
    assert offline.plan.rules == plan.rules
    assert offline.plan.predicted_peak_bytes == plan.predicted_peak_bytes
    assert offline.plan.candidates == plan.candidates


class OfCells(Optimised, by=torch.optim.RMSprop, lr=2e-3):
    """Latents come from the counts, so that a batch may have any number of cells."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = decoder(SMALL)
        _, v, batch = inputs(SMALL)
        self.v = torch.nn.Parameter(v)
        self.encoder = torch.nn.Linear(batch["x"].shape[1], SMALL.dim, dtype=torch.float64)

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self.decoder(self.encoder(batch["x"]), self.v, **batch)


def test_the_questions_of_a_plan_are_asked_of_the_planner() -> None:
    """The largest batch is the largest whose plan fits, and the fewest devices are those of such a plan."""

    def at(n: int) -> ModulePlan:
        return lightning_amp.plan(OfCells(), inputs(SMALL)[2], device_memory="200KiB", batch_size=n)

    found = at(4)
    most = found.largest_batch()
    assert most > 4
    assert at(most).plan.fits
    assert not at(most + 1).plan.fits
    assert found.fewest_devices() == 1
    assert found.answers() is None


@pytest.mark.parametrize("asked", ["offload", "S4,offload", "S3,S4,replay"])
def test_techniques_of_any_module_by_name(plain: dict[str, torch.Tensor], asked: str) -> None:
    plan, measured, left = fitted(strategies=asked)
    assert {*asked.split(",")} < {*plan.strategies}
    assert plan.predicted_peak_bytes == measured
    assert differences(left, plain) == []


def test_what_no_decoder_can_have_is_refused_with_its_reason() -> None:
    with pytest.raises(PlanError, match="early_update is not possible: the peak is elsewhere"):
        fitted(strategies="early_update")
    with pytest.raises(PlanError, match="fsdp needs 2 ranks"):
        fitted(strategies="fsdp")


def on_rank(rank: int, ranks: int) -> list[Fitted]:
    """Next to nothing, what asks for a large block, and a plain run."""
    all_that_can_be = fitted(rank, ranks, CASE, device_memory="1KiB", on_predicted_oom="warn")
    rules = [rule for rule in all_that_can_be[0].rules if isinstance(rule.spec, RecomputeBlock)]
    budget = all_that_can_be[0].predicted_peak_bytes + sum(rule.saves_bytes for rule in rules) - 15_000
    return [all_that_can_be, fitted(rank, ranks, CASE, device_memory=budget), fitted(case=CASE)]


@pytest.mark.full
@pytest.mark.ranks
def test_ranks_choose_alike(tmp_path: Path) -> None:
    found = run_ranks(on_rank, 2, tmp_path, timeout=200)
    for everything, some, plain in found:
        # the others save nothing of the peak of the fullest rank
        assert {*again(everything[0])} == {ENCODERS[0], ENCODERS[1], ENCODERS[3]}
        assert len(again(some[0])) == 1
        assert (everything[0], some[0]) == (found[0][0][0], found[0][1][0])
        for _, _, left in (everything, some):
            assert differences(left, plain[2]) == []
    for everyones in zip(*(fits[:2] for fits in found), strict=True):
        assert max(measured for _, measured, _ in everyones) == everyones[0][0].predicted_peak_bytes
    assert found[0][1][0].fits


def test_a_plan_that_is_made_anew_keeps_the_blocks_outside() -> None:
    """What is installed outside of a decoder stays while the decoder's own techniques change."""
    before, after = beside(DECODER["one"]), make_plan(("S4",), 1)
    found = with_rules_beyond(after, before)
    assert again(found) == again(before)
    assert found.strategies == ("S4", "recompute", "chunk")
    assert with_rules_beyond(found, before) == found
    assert with_rules_beyond(after, after) == after


@pytest.mark.parametrize("dealt", [False, True])
def test_rows_that_were_dealt_before_the_plan_are_dealt_again(dealt: bool) -> None:
    """How many ranks have a batch of their own is not known before there is a plan."""
    asked = []

    class Dealing(Run):
        def train_dataloader(self) -> Any:
            asked.append(self)
            rows = torch.zeros(6, 1)
            sampler = DistributedSampler(rows, num_replicas=1, rank=0) if dealt else None  # type: ignore[arg-type]
            return DataLoader(rows, batch_size=2, sampler=sampler)  # type: ignore[arg-type]

    module = Dealing()
    trainer = trainer_of("auto", max_steps=1)
    trainer.strategy.connect(module)
    trainer._data_connector.attach_data(module)
    loaders, why = loaders_of(trainer)
    assert not why
    assert isinstance(loaders, DataLoader)
    trainer.fit_loop._data_source.dataloader()
    assert len(asked) == 1 + dealt
