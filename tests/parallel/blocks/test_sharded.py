"""Claim: blocks whose parameters `fully_shard` has split over ranks are recomputed with the parameters they had."""

import copy
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.parallel.blocks import nasty
from tests.parallel.blocks.test_recompute import Net, mean, recompute, train
from tests.ranks import run_ranks


def differences(rank: int, world: int) -> list[float]:
    """The largest difference from one process, for every order and way to shard."""
    mesh, found = init_device_mesh("cpu", (world,)), []
    for reshard in (True, False):
        for before in (True, False):
            torch.manual_seed(0)
            net = Net(nasty.Dropout(), nasty.BatchNorm(), nasty.Dropout()).double()
            eager = copy.deepcopy(net)
            if before:
                recompute(net)
            for block in (*net.blocks, net):
                fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
            if not before:
                recompute(net)
            pairs = zip(train(net, mean), train(eager, mean), strict=True)
            found.append(max(float((_whole(a) - b).abs().max()) for a, b in pairs))
    return found


def _whole(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@pytest.mark.ranks
def test_blocks_of_sharded_parameters(tmp_path: Any) -> None:
    for found in run_ranks(differences, 2, tmp_path, timeout=120):
        assert max(found) < 1e-12
