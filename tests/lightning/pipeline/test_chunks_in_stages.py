"""Claim: blocks of stages run in chunks, by a plan's rules, by name or where policy auto finds that nothing else fits,
and train what one process does (float64, 1e-10); the predicted peak of every rank is within 5 % of the meter's in the
second step, which stays within the budget.
"""

import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from lightning_amp.costs.rule import Rule
from lightning_amp.errors import PlanError
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.techniques.chunk.row import ChunkBlock
from lightning_amp.techniques.chunk.run.in_chunks import InChunks
from lightning_amp.techniques.table import in_order
from tests.lightning.pipeline import test_stage_bytes as stage_bytes
from tests.lightning.pipeline.pipeline_cases import GPT, STEPS, fit
from tests.lightning.pipeline.test_pipeline import close
from tests.ranks import run_ranks

pytestmark = pytest.mark.ranks
LEAST = ChunkBlock(budget_bytes=1)
"""As little as a block can do with."""


def with_chunks(plan: Plan, names: tuple[str, ...]) -> Plan:
    rules = tuple(Rule(fqn=name, spec=LEAST, strategy="chunk", why="by hand") for name in names)
    strategies = in_order({*plan.strategies, "chunk"})
    whole = sorted((*plan.rules, *rules), key=lambda rule: strategies.index(rule.strategy))
    return replace(plan, strategies=strategies, rules=tuple(whole))


def runs(rank: int, ranks: int) -> dict[str, Any]:
    """Some blocks in chunks, the others computed again."""
    warnings.simplefilter("ignore")
    me, settings = (rank, ranks), {"strategies": "pipeline,recompute", "schedule": "1f1b", "micro_batches": 3}
    plan = fit(me, GPT(), settings, {"max_steps": 1})["plan"]
    chunked = with_chunks(plan, ("blocks.0", "blocks.1", "blocks.4"))
    with patch.object(InChunks, "__call__", autospec=True, side_effect=InChunks.__call__) as ran:
        found = fit(me, GPT(), {"plan": chunked}, {"gradient_clip_val": 0.05})
    # the first stage has two of them, the second one
    return found | {"chunked": ran.call_count >= (2, 1)[rank] * 3 * STEPS}


@pytest.mark.full
def test_blocks_of_stages_in_chunks_train_as_one_process(tmp_path: Path) -> None:
    expected = fit(None, GPT(), {}, {"gradient_clip_val": 0.05})
    for run in run_ranks(runs, 2, tmp_path, timeout=200):
        close(run, expected)
        assert run["chunked"], "this rank's blocks"


def three_steps(rank: tuple[int, int] | None, settings: dict[str, Any]) -> dict[str, Any]:
    """Of a module whose bytes are most of them the scores of all pairs of words."""
    return stage_bytes.fit(rank, partial(stage_bytes.Tower, 4 * (64,), heads=8), settings, length=64)


def within_budgets(rank: int, ranks: int) -> dict[str, Any]:
    """In less than all blocks computed again need, the least without chunks: these alone, chunks, and the policy."""
    me, settings = (rank, ranks), {"schedule": "1f1b", "micro_batches": 4}
    every: Any = {"strategies": "pipeline,recompute"} | settings
    least = three_steps(me, every)["plan"].predicted_peak_bytes
    budget = {"device_memory": int(0.88 * least)}
    with pytest.raises(PlanError) as error:
        three_steps(me, every | budget)
    # the policy may take twice as many micro-batches
    tight = {"device_memory": int(0.69 * least)}
    return {
        "refused": str(error.value),
        "chunk": three_steps(me, {"strategies": "pipeline,chunk"} | settings | budget),
        "auto": three_steps(me, {"strategies": None} | tight),
    }


@pytest.mark.exhaustive
@pytest.mark.release
def test_chunks_in_stages_fit_where_recomputing_does_not(tmp_path: Path) -> None:
    expected = three_steps(None, {})["state"]
    every = run_ranks(within_budgets, 2, tmp_path, timeout=300)
    for rank, found in enumerate(every):
        assert "Nothing was trained" in found["refused"]
        for name in ("chunk", "auto"):
            run, plan = found[name], found[name]["plan"]
            assert plan.fits
            said, counted = plan.stages[rank].peak_bytes, run["peak"]
            assert said == pytest.approx(counted, rel=0.05)
            assert max(said, counted) <= plan.budget_bytes
            for key, value in expected.items():
                assert torch.allclose(run["state"][key], value, rtol=0, atol=1e-10), key
    assert every[0]["chunk"]["plan"].strategies == ("S1", "pipeline", "chunk")
    assert {"pipeline", "chunk"} <= {*every[0]["auto"]["plan"].strategies}
