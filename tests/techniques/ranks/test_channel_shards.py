"""Claim: channels are dealt in rotary pairs, each to one rank, and parts of values come together again as they were."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_amp.errors import InstallError
from lightning_amp.techniques.ranks.channel_shards import (
    Channels,
    gather_channels,
    shard_channels,
    take_channels,
)
from tests.ranks import run_ranks
from tests.techniques.sharded_cases import model_mesh


def dealt(dim: int, ranks: int, rank: int = 0) -> Channels:
    """Channels as one of the ranks sees them, without the other processes."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    return shard_channels(dim, model_mesh(ranks)["model"])


def test_a_rank_has_the_same_run_of_both_halves() -> None:
    channels = dealt(12, 3)
    assert [channels.of(rank) for rank in range(3)] == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]
    assert (channels.width, channels.widest, channels.pairs) == (4, 4, slice(0, 2))
    channels = dealt(10, 3, rank=1)
    assert [channels.of(rank) for rank in range(3)] == [[0, 5], [1, 2, 6, 7], [3, 4, 8, 9]]
    assert (channels.widths, channels.width, channels.widest, channels.pairs) == (
        [2, 4, 4],
        4,
        4,
        slice(1, 3),
    )


def test_an_odd_dimension_is_dealt_by_single_channels() -> None:
    channels = dealt(7, 3, rank=2)
    assert [channels.of(rank) for rank in range(3)] == [[0, 1], [2, 3], [4, 5, 6]]
    assert (channels.width, channels.widest, channels.pairs) == (3, 3, slice(4, 7))


@pytest.mark.parametrize(("dim", "ranks"), [(12, 3), (10, 3), (7, 2), (8, 1)])
def test_blocks_hold_every_ranks_channels_and_join_again(dim: int, ranks: int) -> None:
    channels = dealt(dim, ranks)
    values = torch.arange(2.0 * dim, dtype=torch.float64).view(2, dim).requires_grad_()
    blocks = channels.blocks(values)
    assert blocks.shape == (ranks, 2, channels.widest)
    for rank, block in enumerate(blocks):
        width = channels.widths[rank]
        assert torch.equal(block[:, :width], values[:, channels.of(rank)])
        assert not block[:, width:].any(), "filled with zeros"
    assert torch.equal(channels.join(blocks), values)
    weight = torch.arange(values.numel()).view(2, dim) + 1.0
    (gradient,) = torch.autograd.grad((channels.join(blocks) * weight).sum(), values)
    assert torch.equal(gradient, weight.double())


def test_selected_channels_are_a_copy() -> None:
    channels, values = dealt(10, 3, rank=1), torch.arange(20.0).view(2, 10)
    own = channels.select(values)
    assert torch.equal(own, values[:, [1, 2, 6, 7]])
    assert own.untyped_storage().nbytes() == own.nbytes, "a view would keep all channels alive"


@pytest.mark.parametrize(("dim", "ranks", "things"), [(6, 4, "3 pairs of channels"), (3, 4, "3 channels")])
def test_refuses_more_ranks_than_there_is_to_deal(dim: int, ranks: int, things: str) -> None:
    message = rf"S5 got {ranks} ranks .* D={dim}, which has {things} to shard; use a model axis of 3"
    with pytest.raises(InstallError, match=message):
        dealt(dim, ranks)


def border(rank: int, world_size: int) -> list[tuple[Tensor, Tensor]]:
    """Values and gradients of taking and of gathering, each beside what they must be."""
    mesh = model_mesh(world_size)["model"]
    pairs = [pair for dim in (10, 7) for pair in cross(shard_channels(dim, mesh), rank)]
    return [(a.detach(), b.detach()) for a, b in pairs]


def cross(channels: Channels, rank: int) -> list[tuple[Tensor, Tensor]]:
    own, dim = channels.of(rank), channels.dim
    u, v = (torch.arange(float(n * dim)).view(n, dim).requires_grad_() for n in (2, 5))
    took = take_channels(channels, u, v)
    loss = took[0].sum() + (took[1] * (v.detach() + 1)[:, own]).sum()
    du, dv = torch.autograd.grad(loss, (u, v))
    part = v.detach()[:, own].requires_grad_()
    whole = gather_channels(channels, part)
    (d_part,) = torch.autograd.grad(((rank + 1) * whole * v.detach()).sum(), part)
    taken = [(took[0], u[:, own]), (took[1], v[:, own]), (du, torch.ones_like(u)), (dv, v + 1)]
    every = sum(range(1, channels.mesh.size() + 1))
    return [*taken, (whole, v), (d_part, every * v[:, own])]


@pytest.mark.ranks
def test_border_between_whole_and_parts(tmp_path) -> None:
    for rank in run_ranks(border, 3, tmp_path):
        for found, expected in rank:
            assert torch.equal(found, expected)
