"""Claim: blocks whose parameters `fully_shard` has split over ranks are recomputed with the parameters they had, and
blocks that share batch statistics with those that their first pass has received."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_amp.techniques.chunk.run.chunk_module import chunk
from lightning_amp.techniques.data.batch_norm import share_batch_statistics
from tests.ranks import CountCollectives, run_ranks
from tests.techniques.recompute import nasty
from tests.techniques.recompute.test_recompute import Net, mean, recompute, train


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


def shared_statistics(rank: int, world: int, by_hand: bool) -> tuple[bool, list[int]]:
    """Whether every bit is that of blocks that do not run again, and the collectives of a forward pass, of a backward
    pass, and of another backward pass through the same graph; `by_hand` a block was given to `lightning_amp.chunk`."""
    torch.manual_seed(rank)
    last = nasty.BatchNorm()
    if by_hand:
        last = chunk(nn.Sequential(nasty.Plain(), last), torch.zeros(5, nasty.DIM), budget="1MiB")
    net = Net(nasty.BatchNorm(), nasty.Plain(), last).double()
    share_batch_statistics(net, init_device_mesh("cpu", (world,)))
    kept = copy.deepcopy(net)
    recompute(net)
    same = all(map(torch.equal, train(net, mean), train(kept, mean)))
    counts = []
    with CountCollectives() as mode:
        loss = mean(net, torch.randn(4, nasty.DIM, dtype=torch.float64))
    counts.append(mode.total)
    for retain in (True, False):
        with CountCollectives() as mode:
            loss.backward(retain_graph=retain)
        counts.append(mode.total)
    return same, counts


def both(rank: int, world: int) -> list[tuple[bool, list[int]]]:
    return [shared_statistics(rank, world, by_hand) for by_hand in (False, True)]


@pytest.mark.ranks
def test_statistics_of_all_ranks_are_sent_once(tmp_path: Any) -> None:
    one, other = run_ranks(both, 2, tmp_path, timeout=120)
    for same, counts in (*one, *other):
        assert same
        assert counts == [2, 2, 2]
