"""Claim: a loss that reads what is drawn before the blocks is refused where it is computed for the whole batch at once;
draws that it does not read are not.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_amp.errors import ModelError
from lightning_amp.footprint.forward_overrides import Override, add_override
from lightning_amp.techniques.pipeline.run.block_walk import BlockWalk, StageBlock, spans
from lightning_amp.techniques.pipeline.run.run_stages import Rest, Stages, Work
from lightning_amp.techniques.pipeline.schedule.schedules import schedule

X, P = torch.arange(12.0).view(6, 2) / 9, 3


@pytest.fixture
def mesh(tmp_path: Path) -> DeviceMesh:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    return init_device_mesh("cpu", (1,), mesh_dim_names=("model",))


class Hides(nn.Module):
    """Dropout of the inputs before the blocks; the loss is of what was hidden, or of all."""

    def __init__(self, of_hidden: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
        self.of_hidden = of_hidden

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.rand(x.shape) < 0.5
        h = x.masked_fill(hidden, 0)
        for block in self.blocks:
            h = block(h)
        squares = (h - x).square()
        return (squares * hidden).sum() / hidden.sum() if self.of_hidden else squares.mean()


def run(net: Hides, mesh: DeviceMesh) -> Any:
    walk = BlockWalk("blocks", 2)
    for i, block in enumerate(net.blocks):
        add_override(str(i), block, Override("pipeline", StageBlock(walk, i), StageBlock.position))
    stages = Stages(walk, spans([2]), mesh, torch.device("cpu"))
    parts = X.chunk(P)
    rest = Rest(step=lambda: net(X), silently=lambda: net(X), seed=7)
    work = Work(step=lambda j: net(parts[j]), seeds=range(P), weights=[1 / P] * P, rest=rest)
    return stages.run(schedule("gpipe", 1, P)[0], work)


def test_a_loss_of_what_is_drawn_before_the_blocks_is_refused(mesh: DeviceMesh) -> None:
    with pytest.raises(ModelError, match="drawn before the blocks"):
        run(Hides(of_hidden=True), mesh)


def test_draws_of_the_inputs_alone_are_each_micro_batch_s_own(mesh: DeviceMesh) -> None:
    net, plain = Hides(of_hidden=False), Hides(of_hidden=False)
    run(net, mesh)
    losses = []
    for j, part in enumerate(X.chunk(P)):
        torch.manual_seed(j)
        losses.append(plain(part) / P)
    torch.stack(losses).sum().backward()
    for ours, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert torch.allclose(ours.grad, theirs.grad)
