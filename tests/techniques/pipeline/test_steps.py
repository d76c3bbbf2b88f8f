"""Claim: a step whose micro-batches compute something else than its batch is refused (a pipeline of one rank)."""

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
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
from tests.lightning.pipeline.attacks import BLOCKS, Batch, Net

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


def two_steps(
    kind: type[Net], mesh: DeviceMesh, *, half: bool = False, micro_batches: int = 3, dtype: torch.dtype = torch.float32
) -> None:
    module = kind().float().to(dtype)
    module.trainer = Mock(current_epoch=0)
    parameters = Mock(here=list(module.parameters()))
    spec, blocks = PipelineStages(ends=str(BLOCKS), micro_batches=micro_batches), dict(module.blocks.named_children())
    PipelinedSteps(module, blocks, staged(module.blocks, mesh), parameters, spec, data_rank=0)
    draw = torch.Generator().manual_seed(0)
    batch = {"x": torch.randn(7, 3, generator=draw).to(dtype), "y": torch.randint(3, (7,), generator=draw)}
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        for i in range(2):
            module.training_step(batch, i)


@pytest.mark.parametrize("half", [False, True])
def test_a_loss_that_is_no_mean_is_found_in_half_precision_too(mesh: DeviceMesh, half: bool) -> None:
    two_steps(Even, mesh, half=half)
    with pytest.raises(DataError, match="it is no mean over samples"):
        two_steps(NearlyEven, mesh, half=half)


def test_a_head_that_runs_in_half_precision_only_is_compared_in_it(mesh: DeviceMesh) -> None:
    two_steps(MixedHead, mesh, half=True)


def test_results_of_blocks_in_half_precision_without_autocast_stay_so(mesh: DeviceMesh) -> None:
    two_steps(HalfHead, mesh, dtype=torch.bfloat16)


def test_a_parameter_that_is_changed_by_its_data_is_found(mesh: DeviceMesh) -> None:
    for kind, name in ((Clamps, "embed.weight"), (Counts, "count")):
        with pytest.raises(ModelError, match=f"has changed the parameters or buffers \\['{name}'"):
            two_steps(kind, mesh, micro_batches=1)
