"""Claim: ranks that run one function after the other start each with no group of the one before."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.ranks import run_ranks


def whole(rank: int, ranks: int, groups: int) -> float:
    for _ in range(groups):
        dist.new_group([*range(ranks)])
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("other", "x"))["x"]
    part = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])
    return float((2 * part).full_tensor().sum())


@pytest.mark.ranks
def test_a_cached_layout_names_no_group_that_has_ended(tmp_path: Path) -> None:
    for groups in (6, 0):
        assert run_ranks(whole, 4, tmp_path, groups) == [20.0] * 4
