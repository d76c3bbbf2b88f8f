"""Queries of a chunk under S3, and AutoChunk's own selection of regions, are options of the strategy."""

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import lightning_amp
from lightning_amp import AMPStrategy
from lightning_amp.techniques.chunk.row import ChunkBlock
from lightning_amp.techniques.hic.rows import ChunkedAttention
from tests.any_module import QUIET
from tests.lightning.strategy.model_axis_cases import CASE, Maps
from tests.odd_modules.test_rates_of_chunks import DIM, SIDE, Pairs
from tests.techniques.sharded_cases import cells


def fit(folder: Path, model: object, data: object, strategy: object) -> None:
    from lightning.pytorch import Trainer

    options = {"accelerator": "cpu", "devices": 1, "max_steps": 2, "default_root_dir": folder, **QUIET}
    Trainer(strategy=strategy, **options).fit(model, data)


def test_fewer_queries_in_a_chunk_are_installed_and_predicted_to_take_less(tmp_path: Path) -> None:
    data = DataLoader([cells(CASE, 4)] * 2, batch_size=None)
    buckets, peaks, losses = list[int](), list[int](), list[list[float]]()
    for queries in (None, 3 * CASE.window, 1):
        module, strategy = Maps(), AMPStrategy(strategies="S3", chunk_queries=queries, unfit="train")
        fit(tmp_path, module, data, strategy)
        specs = [rule.spec for rule in strategy.plan.rules if isinstance(rule.spec, ChunkedAttention)]
        assert len({spec.buckets for spec in specs}) == 1
        buckets.append(specs[0].buckets)
        peaks.append(strategy.plan.predicted_peak_bytes)
        losses.append(module.losses)
    assert buckets == [max(1, 128 // CASE.window), 3, 1]
    assert peaks[0] >= peaks[1] >= peaks[2]
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)
    assert losses[2] == pytest.approx(losses[0], rel=1e-12)


def test_the_papers_selection_of_regions_runs_in_a_trainer(tmp_path: Path) -> None:
    torch.manual_seed(1)
    data, found = DataLoader([torch.randn(2, SIDE, SIDE, DIM)] * 2, batch_size=None), {}
    whole = lightning_amp.plan(Pairs(), torch.randn(2, SIDE, SIDE, DIM)).plan.predicted_peak_bytes
    for policy in ("plain", "auto", "paper"):
        torch.manual_seed(0)
        module, strategy = Pairs().double(), None
        if policy != "plain":
            memory = int(1.2 * whole)
            strategy = AMPStrategy(strategies="chunk", chunk_policy=policy, device_memory=memory, unfit="train")
        doubles = [batch.double() for batch in data]
        fit(tmp_path, module, DataLoader(doubles, batch_size=None), strategy or "auto")
        found[policy] = torch.cat([p.detach().flatten() for p in module.parameters()])
        if strategy is not None:
            specs = [rule.spec for rule in strategy.plan.rules if isinstance(rule.spec, ChunkBlock)]
            assert {spec.policy for spec in specs} == {policy}
    torch.testing.assert_close(found["auto"], found["plain"], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found["paper"], found["plain"], rtol=1e-10, atol=1e-12)
