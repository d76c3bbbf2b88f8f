"""Claim: a step whose micro-batches compute something else than its batch is refused (a pipeline of one rank)."""

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from lightning_amp.errors import DataError, ModelError
from lightning_amp.footprint.forward_overrides import Override, add_override
from lightning_amp.techniques.pipeline.row import PipelineStages
from lightning_amp.techniques.pipeline.run.block_walk import BlockWalk, StageBlock, spans
from lightning_amp.techniques.pipeline.run.run_stages import Stages
from lightning_amp.techniques.pipeline.steps.pipelined_steps import PipelinedSteps
from lightning_amp.techniques.pipeline.steps.sample_check import SampleCheck
from tests.odd_modules.collection.stages import BLOCKS, Batch, Net

CELLS = torch.arange(12.0).view(6, 2) / 9


def staged(blocks: nn.ModuleList, mesh: DeviceMesh) -> Stages:
    walk = BlockWalk("blocks", len(blocks))
    for i, block in enumerate(blocks):
        add_override(str(i), block, Override("pipeline", StageBlock(walk, i), StageBlock.position))
    return Stages(walk, spans([len(blocks)]), mesh, torch.device("cpu"))


def lstm(h: Tensor) -> Tensor:
    torch.manual_seed(0)
    return nn.LSTM(2, 2)(h)[0]


MIXES: dict[str, Callable[[Tensor], Tensor]] = {
    "a mean": lambda h: h - h.mean(0),
    "the first sample": lambda h: h - h[:1],
    "the last sample": lambda h: h - h[-1:],
    "samples before": lambda h: h.cumsum(0),
    "samples after": lambda h: h.flip(0).cumsum(0).flip(0),
    "a recurrence over samples": lstm,
}


class Mixes(nn.Module):
    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.mix = mix

    def forward(self, h: Tensor) -> Tensor:
        return self.mix(h)


class Hides(nn.Module):
    """Draws before its blocks."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(2, 2), Mixes(mix)])

    def forward(self, x: Tensor) -> Tensor:
        h = x.masked_fill(torch.rand(x.shape) < 0.5, 0)
        for block in self.blocks:
            h = block(h)
        return (h - x).square().mean()


def checked(mix: Callable[[Tensor], Tensor], mesh: DeviceMesh, parts: int) -> Any:
    net = Hides(mix)
    check = SampleCheck(staged(net.blocks, mesh), dict(net.blocks.named_children()))
    cut = CELLS.chunk(parts)
    before = torch.get_rng_state()
    found = check.look(net, CELLS, cut[0], [len(part) for part in cut], seed=0)
    assert torch.equal(torch.get_rng_state(), before), "draws of one rank only"
    return found


@pytest.mark.parametrize("parts", [2, 3, 6])
def test_samples_that_depend_on_others_of_the_batch_are_found(mesh: DeviceMesh, parts: int) -> None:
    assert checked(torch.tanh, mesh, parts) is None
    for name, mix in MIXES.items():
        assert "other samples of the batch" in str(checked(mix, mesh, parts)), name


class Even(Net):
    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return self.loss(batch)


class NearlyEven(Even):
    """A weighted mean whose weights differ by less than half precision rounds."""

    def loss(self, batch: Batch) -> Tensor:
        weights = 1 + 0.02 * torch.arange(len(batch["y"]))
        losses = F.cross_entropy(self(batch["x"]), batch["y"], reduction="none")
        return (losses * weights).sum() / weights.sum()


class HalfHead(Even):
    """Has dropout after the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.last(super().forward(x)), 0.5, self.training)


class MixedHead(HalfHead):
    def to(self, *_: Any) -> Any:
        self.last.bfloat16()
        return self


class Ignores(Even):
    """Writes what it does not learn into its labels, after it has read them."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        y = batch["y"]
        assert "seen" in batch or (y >= 0).all(), "as one process finds it"
        count = (y == 2).sum()
        y[y == 2] = -100
        losses = F.cross_entropy(self(batch["x"]), y, reduction="none")
        return losses.mean() + 0 * count


class IgnoresBoth(Ignores):
    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return super().training_step({**batch, "y": batch["seen"]}, batch_idx)


class Clamps(Even):
    """Parameters of the second step, by a way that has no version."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        for parameter in self.parameters() if batch_idx else ():
            parameter.data.clamp_(-0.1, 0.1)
        return loss


class Counts(Even):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        self.count.data += 1
        return super().training_step(batch, batch_idx)


def installed(kind: type[Net], mesh: DeviceMesh, *, micro_batches: int = 3, dtype: torch.dtype = torch.float32) -> Net:
    module = kind().float().to(dtype)
    module.trainer = Mock(current_epoch=0)
    parameters = Mock(here=list(module.parameters()))
    spec, blocks = PipelineStages(ends=str(BLOCKS), micro_batches=micro_batches), dict(module.blocks.named_children())
    PipelinedSteps(module, blocks, staged(module.blocks, mesh), parameters, spec, data_rank=0)
    return module


def samples(dtype: torch.dtype = torch.float32) -> Batch:
    draw = torch.Generator().manual_seed(0)
    return {"x": torch.randn(7, 3, generator=draw).to(dtype), "y": torch.randint(3, (7,), generator=draw)}


def two_steps(
    kind: type[Net], mesh: DeviceMesh, *, half: bool = False, micro_batches: int = 3, dtype: torch.dtype = torch.float32
) -> None:
    module = installed(kind, mesh, micro_batches=micro_batches, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        for i in range(2):
            module.training_step(samples(dtype), i)


@pytest.mark.parametrize("half", [False, True])
def test_a_loss_that_is_no_mean_is_found_in_half_precision_too(mesh: DeviceMesh, half: bool) -> None:
    two_steps(Even, mesh, half=half)
    with pytest.raises(DataError, match="it is no mean over samples"):
        two_steps(NearlyEven, mesh, half=half)


def test_a_head_that_runs_in_half_precision_only_is_compared_in_it(mesh: DeviceMesh) -> None:
    two_steps(MixedHead, mesh, half=True)


def test_results_of_blocks_in_half_precision_without_autocast_stay_so(mesh: DeviceMesh) -> None:
    two_steps(HalfHead, mesh, dtype=torch.bfloat16)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_labels_that_a_step_writes_into_are_each_call_s_own(mesh: DeviceMesh, micro_batches: int) -> None:
    module, batch = installed(Ignores, mesh, micro_batches=micro_batches), samples()
    expected = batch["y"].masked_fill(batch["y"] == 2, -100)
    module.training_step(batch, 0)
    assert torch.equal(batch["y"], expected), "hooks find what the step has left"


def test_labels_that_another_name_has_too_are_not_written_into(mesh: DeviceMesh) -> None:
    batch = samples()
    with pytest.raises(ModelError, match="writes in place into a tensor of its batch"):
        installed(IgnoresBoth, mesh).training_step({**batch, "seen": batch["y"]}, 0)


class Encoding(dict[str, Tensor]):
    """Has more than a dictionary."""

    rows = 0


class ReadsRows(Even):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * batch.rows

    def validation_step(self, batch: Batch, batch_idx: int) -> Any:
        return self.loss(batch)


def test_a_step_that_is_called_once_gets_the_batch_itself_and_validation_looks_at_no_values(mesh: DeviceMesh) -> None:
    module, batch = installed(ReadsRows, mesh, micro_batches=1), Encoding(samples())
    batch.rows = 7
    assert module.training_step(batch, 0) > 0
    with patch("lightning_amp.techniques.pipeline.steps.pipelined_steps.digests", Mock(side_effect=AssertionError)):
        assert module.validation_step(batch, 0) > 0


class ResetsLists(Even):
    def __init__(self) -> None:
        super().__init__()
        self.all = torchmetrics.CatMetric()

    def loss(self, batch: Batch) -> Tensor:
        loss = super().loss(batch)
        self.all.update(loss.detach())
        self.all.reset()
        return loss


def test_a_metric_of_lists_that_a_step_resets_is_refused_with_the_reason(mesh: DeviceMesh) -> None:
    with pytest.raises(ModelError, match="or the step updated and reset a metric whose states are lists"):
        two_steps(ResetsLists, mesh)


def test_a_parameter_that_is_changed_by_its_data_is_found(mesh: DeviceMesh) -> None:
    for kind, name in ((Clamps, "embed.weight"), (Counts, "count")):
        with pytest.raises(ModelError, match=f"has changed the parameters or buffers \\['{name}'"):
            two_steps(kind, mesh, micro_batches=1)
