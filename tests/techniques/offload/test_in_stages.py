"""Stages of a pipeline train with `offload` bit by bit as without; what each rank has on the host is predicted to the
byte, and its peak as without `offload`."""

import warnings
from itertools import product
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import seed_everything
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

import lightning_amp
from lightning_amp.costs.device_rates import CPU_CORE
from lightning_amp.errors import PlanError
from lightning_amp.footprint.run.run_settings import BY_ITSELF
from lightning_amp.lightning.profiling.step_of_module import StepOfModule
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.techniques.pipeline.row import PipelineStages
from lightning_amp.techniques.pipeline.schedule.host_bytes import host_bytes
from lightning_amp.techniques.pipeline.schedule.schedules import schedule
from lightning_amp.techniques.pipeline.schedule.stage_bytes import Pipeline
from lightning_amp.techniques.pipeline.stage_facts import stages_of
from lightning_amp.techniques.pipeline.stages_on_host import away, smaller
from tests.each import BEFORE_A_RELEASE
from tests.lightning.pipeline.pipeline_cases import trainer_of
from tests.lightning.pipeline.test_stage_bytes import Images, Timed, Tower, batches
from tests.ranks import run_ranks
from tests.techniques.offload.test_fit import spec_of
from tests.techniques.offload.test_on_grids import Noted


class Drops(Timed):
    """With random numbers in blocks."""

    class Block(Timed.Block):
        def forward(self, x: Tensor, when: Tensor) -> Tensor:
            return F.dropout(super().forward(x, when).relu(), 0.2)


BOTH = "pipeline,offload"
Kind = type[pl.LightningModule]
Case = tuple[Kind, str, int]
"""A module, a schedule, and a number of micro-batches: three of eight samples are unequal."""


def trained(kind: Kind, rank: tuple[int, int] | None, **options: Any) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    seed_everything(3, verbose=False)
    module, meter = kind(), Noted()
    trainer = trainer_of(rank, options, {"callbacks": [meter]})
    trainer.fit(module, DataLoader(batches(module, 24), batch_size=None))  # type: ignore[arg-type]
    plan, moves = getattr(trainer.strategy, "plan", None), meter.moves
    return {
        "state": module.state_dict(),
        "losses": meter.losses,
        "gradients": meter.gradients,
        "draws": torch.get_rng_state(),
        "peak": meter.live.peak,
        "plan": None if plan is None else plan.to_json(),
        "host": None if moves is None else (moves.pool.n_bytes, sum(moves.sizes)),
    }


def in_stages(rank: int, ranks: int, cases: list[Case]) -> list[list[dict[str, Any]]]:
    """Each case without `offload` and with it; the first one also by the plan's JSON."""
    found = list[list[dict[str, Any]]]()
    for kind, order, n in cases:
        options = {"micro_batches": n, "model_parallel_size": ranks, "schedule": order}
        runs = [trained(kind, (rank, ranks), strategies=names, **options) for names in ("pipeline", BOTH)]
        if not found:
            runs.append(trained(kind, (rank, ranks), plan=Plan.from_json(runs[1]["plan"])))
        found.append(runs)
    return found


def on_hosts(kind: Kind, plan: Plan, ranks: int) -> list[tuple[int, int]]:
    """The predicted bytes of each rank's host, and those that leave."""
    module = kind()
    batch = batches(module, 24)[0]
    seen = StepOfModule(module, lambda: batch, run_settings=BY_ITSELF).profiled(CPU_CORE)
    passes, waits = stages_of(seen).passes, spec_of(plan)
    assert passes is not None
    spec = stages(plan)
    part, whole = passes(-(-len(batch) // spec.micro_batches)), passes(None)
    assert not isinstance(part, str)
    assert not isinstance(whole, str)
    pipeline = Pipeline(
        part=away(seen, waits, part),
        whole=away(seen, waits, whole),
        ends=tuple(map(int, spec.ends.split(","))),
        orders=schedule(spec.schedule, ranks, spec.micro_batches, stages_per_device=spec.stages_per_rank),
        at_once=spec.schedule == "gpipe",
    )
    small = smaller(seen, waits, spec.micro_batches)
    found = [host_bytes(pipeline, rank, small) for rank in range(ranks)]
    assert (waits.host_bytes, waits.moved_bytes) == tuple(map(max, zip(*found, strict=True)))
    return found


def stages(plan: Plan) -> PipelineStages:
    (spec,) = (rule.spec for rule in plan.rules if isinstance(rule.spec, PipelineStages))
    return spec


ORDERS = "gpipe", "1f1b", "interleaved"
FEW: list[Case] = [(Tower, "gpipe", 3), (Timed, "1f1b", 4), (Drops, "interleaved", 4)]
EVERY: list[Case] = [*product((Tower, Timed, Drops), ORDERS, [4]), *product((Images,), ORDERS[:2], [4])]


@pytest.mark.ranks
@pytest.mark.parametrize("cases", [
    pytest.param(FEW, id="few"),
    pytest.param(EVERY, id="every", marks=BEFORE_A_RELEASE),
])  # fmt: skip
def test_what_stages_keep_may_leave(tmp_path: Path, cases: list[Case]) -> None:
    """Bit by bit as without `offload`, at the predicted bytes; without random numbers as one process."""
    ranks = run_ranks(in_stages, 2, tmp_path, cases, timeout=300)
    for n, case in enumerate(cases):
        before, plan, *again = (Plan.from_json(one["plan"]) for one in ranks[0][n])
        assert plan.strategies == ("S1", "pipeline", "offload")
        assert all(one.rules == plan.rules for one in again)
        predicted = on_hosts(case[0], plan, 2)
        # copies take time, which may ask for another cut
        same = ("gradients",) * (stages(before).ends == stages(plan).ends)
        for rank, found in enumerate(ranks):
            without, *both = found[n]
            for one in both:
                for key in ("state", "losses", "draws", *same):
                    torch.testing.assert_close(one[key], without[key], rtol=0, atol=0)
                assert one["host"] == predicted[rank], case
                assert one["peak"] == pytest.approx(plan.stages[rank].peak_bytes, rel=0.03, abs=2**14), case
            assert not same or both[0]["peak"] < 0.8 * without["peak"], case
    right = trained(Tower, None)
    torch.testing.assert_close(ranks[0][0][1]["losses"], right["losses"], rtol=1e-10, atol=0)
    torch.testing.assert_close(ranks[0][0][1]["state"], right["state"], rtol=0, atol=1e-10)


def test_other_forms_and_more_than_the_host_has_are_refused_by_name() -> None:
    module = Timed()
    options: Any = {"batch": batches(module, 24)[0], "devices": 2, "model_parallel_size": 2}
    with pytest.raises(PlanError, match="pipeline together with recompute and offload is not supported; allowed is"):
        lightning_amp.plan(module, strategies="pipeline,recompute,offload", **options)
    with pytest.raises(PlanError, match=r"what stages keep takes .* may take 100 KiB; raise host_memory="):
        lightning_amp.plan(module, strategies=BOTH, host_memory="100KiB", **options)
