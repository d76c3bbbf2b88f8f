"""Claim: blocks of stages may run in chunks, by a plan's rules, and train what one process does (float64, 1e-10)."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from lightning_amp.parallel.chunk.in_chunks import InChunks
from lightning_amp.planning.modules.plan_module import WITHOUT_CHUNKS
from lightning_amp.planning.plan.plan import Plan, Rule
from lightning_amp.planning.plan.specs import ChunkBlock
from lightning_amp.planning.plan.strategies import in_order
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
    warnings.simplefilter("ignore")
    found, me = {}, (rank, ranks)
    for name, settings in {
        "1f1b": {"schedule": "1f1b", "micro_batches": 3},
        "gpipe": {"schedule": "gpipe", "micro_batches": 3},
        "recompute": {"strategies": "pipeline,recompute", "schedule": "1f1b", "micro_batches": 3},
    }.items():
        plan = fit(me, GPT(), settings, {"max_steps": 1})["plan"]
        chunked = with_chunks(plan, ("blocks.0", "blocks.1", "blocks.4"))
        with patch.object(InChunks, "__call__", autospec=True, side_effect=InChunks.__call__) as ran:
            found[name] = fit(me, GPT(), {"plan": chunked}, {"gradient_clip_val": 0.05})
        # the first stage has two of them, the second one
        found[name]["chunked"] = ran.call_count >= (2, 1)[rank] * 3 * STEPS
    return found


def test_blocks_of_stages_in_chunks_train_as_one_process(tmp_path: Path) -> None:
    expected = fit(None, GPT(), {}, {"gradient_clip_val": 0.05})
    for found in run_ranks(runs, 2, tmp_path, timeout=200):
        for run in found.values():
            close(run, expected)
            assert run["chunked"], "this rank's blocks"
            assert WITHOUT_CHUNKS in run["plan"].notes
