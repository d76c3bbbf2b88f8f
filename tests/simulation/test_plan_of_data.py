"""Claim: the plan of a data directory is the plan of a fit of the reference model on it, to the byte."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import lightning_amp
from lightning_amp import GLUE, AMPStrategy, SingleCellDataModule
from lightning_amp.costs.device_rates import CPU_CORE
from lightning_amp.data.prepare.synthetic import synthesize
from lightning_amp.errors import AmpError, PlanError
from lightning_amp.footprint.chain.chain_of import count_step
from lightning_amp.footprint.equal_parts import leaving_out_equal
from lightning_amp.footprint.profile_module import profile_module
from lightning_amp.footprint.run import inner_run
from lightning_amp.footprint.run.run_settings import UNDER_AMP
from lightning_amp.holding import replacing
from lightning_amp.lightning.profiling.step_of_module import StepOfModule
from lightning_amp.lightning.profiling.step_of_ranks import on_top_of
from lightning_amp.planning.modules.candidates import as_it_is
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.simulation.parse_shape import parse_shape
from lightning_amp.simulation.simulate import request_decoder, simulate_plan
from lightning_amp.techniques.chunk import look
from lightning_amp.techniques.hic.scores import nonzero_counts
from tests.lightning.strategy.strategy_cases import trainer_of
from tests.planning.profiles import hic, profile, rna
from tests.ranks import run_ranks

CELLS = 4
SIZES: dict[str, Any] = {"latent_dim": 8, "window": 8}
MEMORY = None, "4.1MiB", "3.9MiB"
"""All that there is; less than a step without techniques takes; less than any."""


def facts(plan: Plan) -> dict[str, Any]:
    return {
        "rules": [(rule.fqn, rule.spec) for rule in plan.rules],
        "mesh": plan.mesh,
        "peak": plan.training_bytes,
        "base": plan.predicted_base_bytes,
        "seconds": plan.predicted_step_seconds,
        "signals": plan.signals,
    }


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("data") / "data"
    synthesize(out, cells=24, bins=30, strata=3, genes=20, seed=1)
    return out


def offline(data_dir: Path, **request: Any) -> Plan:
    found: Plan = lightning_amp.plan(lightning_amp.profile(data_dir), batch_size=CELLS, **SIZES, **request)
    return found


def of_fits(rank: int, ranks: int, data_dir: Path, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for request in requests:
        strategy = AMPStrategy(**request, on_predicted_oom="warn")
        trainer = trainer_of(strategy, rank=rank, ranks=ranks, max_steps=1, limit_val_batches=0)
        data = SingleCellDataModule(data_dir, batch_size=CELLS)
        try:
            trainer.fit(GLUE(**SIZES), data)
        except AmpError:
            assert strategy.plan is not None
        assert strategy.plan is not None
        found.append(facts(strategy.plan))
    return found


@pytest.mark.long
@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.full), pytest.param(4, marks=pytest.mark.full)])
def test_a_directory_has_the_plan_of_its_fit(data_dir: Path, tmp_path: Path, ranks: int) -> None:
    requests: list[dict[str, Any]] = [{"device_memory": memory} for memory in (MEMORY if ranks > 1 else MEMORY[:2])]
    requests += [{"strategies": "S1,S2,S4"}, {"policy": "paper"}] if ranks > 1 else [{"strategies": "S4,sparse"}]
    for found in run_ranks(of_fits, ranks, tmp_path, data_dir, requests, timeout=400):
        for request, one in zip(requests, found, strict=True):
            plan = offline(data_dir, devices=ranks, **request)
            planned = facts(plan)
            if "nodes" in plan.strategies:
                # which rows a rank receives depends on the edges of the graph, which a profile only counts
                for name in ("peak", "base"):
                    assert planned[name] == pytest.approx(one[name], rel=1e-3)
                    planned[name] = one[name]
            assert planned == one, request


def test_named_techniques_of_any_module_are_those_of_a_fit(data_dir: Path) -> None:
    assert "offload" in offline(data_dir, strategies="S1,offload").strategies
    with pytest.raises(PlanError, match="Name the dims"):
        offline(data_dir, devices=2, strategies="sequence")


@pytest.mark.parametrize(
    ("sizes", "request_"),
    [
        ("anchors=300,dim=16,strata=4,batch=8,window=40", {}),
        ("anchors=300,dim=16,strata=4,batch=1,window=40", {"devices": 2, "strategies": "S2,S4,sparse"}),
        ("anchors=300,dim=16,strata=4,batch=8,key=convolution", {"devices": 2, "strategies": "strata"}),
    ],
)
def test_the_plan_of_a_shape_has_the_bytes_of_its_simulation(sizes: str, request_: dict[str, Any]) -> None:
    make, plan = request_decoder(parse_shape(sizes), batch_size=CELLS, **request_)
    assert plan.predicted_peak_bytes == max(simulate_plan(make, plan).peak_bytes)


@pytest.mark.parametrize("strategies", ["S1,S4,fused,sparse,stream", "S1,sparse"])
def test_parts_that_the_first_step_leaves_out_change_nothing(monkeypatch: pytest.MonkeyPatch, strategies: str) -> None:
    """Of chunks with equal bytes a few are run before the counted step, whose operators are timed."""
    make, plan = request_decoder(
        parse_shape("anchors=6000,dim=8,strata=2,batch=40,window=16"), batch_size=CELLS, strategies=strategies
    )
    rules = [rule for rule in plan.rules if rule.strategy != "S1"]
    entered, found = list[bool](), list[tuple[int, ...]]()

    def watched() -> AbstractContextManager[None]:
        entered.append(True)
        return leaving_out_equal()

    for counting in (watched, nullcontext):
        monkeypatch.setattr(inner_run, "leaving_out_equal", counting)
        subject = make()
        step = StepOfModule(subject.module, lambda batch=subject.batch: batch, run_settings=UNDER_AMP)
        with replacing(nonzero_counts.ASSUMED, share=subject.share, in_counts=True):
            seen = on_top_of(step, rules, 1, rates=CPU_CORE)[0].profile
        found.append((seen.first_bytes, seen.left_bytes, seen.peak_bytes))
    assert entered
    assert found[0] == found[1]
    assert found[0][-1] == plan.predicted_peak_bytes


@pytest.mark.parametrize("strategies", ["S1,S4,fused,sparse,stream", "S1,sparse", "S1,fused,recompute"])
def test_one_of_equal_parts_is_timed_for_those_that_are_left_out(strategies: str) -> None:
    make, plan = request_decoder(
        parse_shape("anchors=9000,dim=8,strata=2,batch=40,window=160"), batch_size=CELLS, strategies=strategies
    )
    rules = [rule for rule in plan.rules if rule.strategy != "S1"]
    found = []
    for counting in (nullcontext, leaving_out_equal):
        subject = make()
        step = StepOfModule(subject.module, lambda batch=subject.batch: batch, run_settings=UNDER_AMP)
        with replacing(nonzero_counts.ASSUMED, share=subject.share, in_counts=True), counting():
            found.append(on_top_of(step, rules, 1, rates=CPU_CORE)[0])
    whole, fewer = (one.profile for one in found)
    assert (fewer.first_bytes, fewer.left_bytes, fewer.peak_bytes) == (
        whole.first_bytes,
        whole.left_bytes,
        whole.peak_bytes,
    )
    assert len(fewer.makes.made) < len(whole.makes.made)
    assert as_it_is(found[1], 1).seconds == pytest.approx(as_it_is(found[0], 1).seconds, rel=0.01)


@pytest.mark.long
def test_each_rank_is_counted_once_and_no_block_of_a_decoder_is_captured(
    monkeypatch: pytest.MonkeyPatch, data_dir: Path
) -> None:
    """Each of these takes as long as a step of it, and seconds in all."""
    counted, captured, run, tables = list[int](), list[str](), StepOfModule.run_with, look.block_tables

    def run_with(self: StepOfModule, rules: Any, *args: Any) -> Any:
        if not rules and getattr(args[0], "func", args[0]) in (count_step, profile_module):
            counted.append(-1 if self.axis is None else self.axis.get_local_rank())
        return run(self, rules, *args)

    def block_tables(module: Any, calls: Any, **options: Any) -> Any:
        captured.extend(call.fqn for call in calls)
        return tables(module, calls, **options)

    monkeypatch.setattr(StepOfModule, "run_with", run_with)
    monkeypatch.setattr(look, "block_tables", block_tables)
    offline(data_dir, devices=2, strategies="S2,nodes,replay", device_memory="1MiB")
    assert sorted(counted) == [0, 1]
    assert captured
    assert not any(fqn.startswith("decoders.hic") for fqn in captured)


@pytest.mark.long
def test_a_faster_plan_that_fits_is_found_where_closed_forms_assume_dense_counts() -> None:
    sparse = replace(hic(anchors=2600, strata=8), nonzero=60_000)
    data = profile(sparse, replace(rna(), features=500))
    plan = lightning_amp.plan(data, batch_size=512, device_memory="75MiB", latent_dim=8, window=40)
    assert plan.strategies == ("S4", "fused", "sparse", "stream")
    assert plan.fits
    # by closed forms it exceeds this budget, and a slower plan would be taken
    table = {one.strategies: one for one in plan.candidates}
    assert (
        plan.predicted_step_seconds
        == table[plan.strategies].step_seconds
        < table["sdpa", "sparse", "stream"].step_seconds
    )
