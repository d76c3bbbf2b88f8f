"""Fits of one process share their process groups, which hold threads until the process ends."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from lightning_amp import AMPStrategy
from lightning_amp.sharding.meshes import mesh_of
from tests.lightning.strategy.strategy_cases import trainer_of
from tests.optimised import Optimised
from tests.ranks import run_ranks


class Two(Optimised, by=torch.optim.SGD):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layers(batch).square().mean()


def groups_after_fits(rank: int, size: int) -> list[int]:
    found = []
    for _ in range(3):
        torch.manual_seed(0)
        strategy = AMPStrategy(strategies="tensor3d", tensor_grid=(2, 1, 1))
        trainer_of(strategy, rank=rank, ranks=size).fit(Two(), DataLoader(torch.randn(4, 8), 2))
        found.append(len(dist.distributed_c10d._world.pg_map))
    assert mesh_of("cpu", {"data": 1, "model": 2}) is mesh_of("cpu", {"data": 1, "model": 2})
    return found


@pytest.mark.ranks
def test_a_further_fit_makes_no_process_group(tmp_path: Path) -> None:
    for first, *others in run_ranks(groups_after_fits, 2, tmp_path):
        assert others == [first] * 2


def after_a_fork(rank: int, size: int) -> int | None:
    """The exit status of a process that is forked with meshes of this one, and makes its own; None if it hangs."""
    mesh_of("cpu", {"data": 1, "model": size})
    dist.destroy_process_group()
    child = os.fork()
    if child == 0:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        mesh_of("cpu", {"data": 1, "model": 1})
        os._exit(0)
    for _ in range(300):
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return status
        time.sleep(0.1)
    os.kill(child, signal.SIGKILL)
    return None


@pytest.mark.ranks
def test_a_forked_process_leaves_the_groups_of_its_parent(tmp_path: Path) -> None:
    assert run_ranks(after_a_fork, 2, tmp_path) == [0, 0]
