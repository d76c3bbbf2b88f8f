"""Queries of a chunk under S3, and AutoChunk's own selection of regions, are options of the strategy."""

from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer, seed_everything
from torch.utils.data import DataLoader

import lightning_amp
from lightning_amp import AMPStrategy
from lightning_amp.techniques.chunk.row import ChunkBlock
from lightning_amp.techniques.hic.rows import ChunkedAttention
from tests.any_module import QUIET
from tests.lightning.strategy.model_axis_cases import CASE, Maps, batches, trainer_of
from tests.techniques.chunk.test_rates_of_chunks import DIM, SIDE, Pairs


def test_fewer_queries_in_a_chunk_are_installed_and_predicted_to_take_less() -> None:
    buckets, peaks, losses = list[int](), list[int](), list[list[float]]()
    for queries in (None, 3 * CASE.window, 1):
        seed_everything(7)
        module, strategy = Maps(), AMPStrategy(strategies="S3", chunk_queries=queries, on_predicted_oom="warn")
        trainer_of(0, 1, strategy, max_epochs=1, max_steps=2).fit(module, DataLoader(batches(None), batch_size=None))
        specs = [rule.spec for rule in strategy.plan.rules if isinstance(rule.spec, ChunkedAttention)]
        assert len({spec.buckets for spec in specs}) == 1
        buckets.append(specs[0].buckets)
        peaks.append(strategy.plan.predicted_peak_bytes)
        losses.append(module.losses)
    assert buckets == [max(1, 128 // CASE.window), 3, 1]
    assert peaks[0] >= peaks[1] >= peaks[2]
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)
    assert losses[2] == pytest.approx(losses[0], rel=1e-12)


@pytest.mark.exhaustive
@pytest.mark.release
@pytest.mark.long
def test_the_papers_selection_of_regions_runs_in_a_trainer(tmp_path: Path) -> None:
    options = {"accelerator": "cpu", "devices": 1, "max_steps": 1, "default_root_dir": tmp_path, **QUIET}
    torch.manual_seed(1)
    data, found = DataLoader([torch.randn(2, SIDE, SIDE, DIM)] * 2, batch_size=None), {}
    whole = lightning_amp.plan(Pairs(), torch.randn(2, SIDE, SIDE, DIM)).plan.predicted_peak_bytes
    for policy in ("plain", "auto", "paper"):
        torch.manual_seed(0)
        module, strategy = Pairs().double(), None
        if policy != "plain":
            memory = int(1.2 * whole)
            strategy = AMPStrategy(
                strategies="chunk", chunk_policy=policy, device_memory=memory, on_predicted_oom="warn"
            )
        doubles = [batch.double() for batch in data]
        Trainer(strategy=strategy or "auto", **options).fit(module, DataLoader(doubles, batch_size=None))
        found[policy] = torch.cat([p.detach().flatten() for p in module.parameters()])
        if strategy is not None:
            specs = [rule.spec for rule in strategy.plan.rules if isinstance(rule.spec, ChunkBlock)]
            assert {spec.policy for spec in specs} == {policy}
    torch.testing.assert_close(found["auto"], found["plain"], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found["paper"], found["plain"], rtol=1e-9, atol=1e-12)
