"""`GradientSync.reduce` leaves on every rank the mean over the data axis, of parts the sum over the model axis."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_amp.errors import InstallError
from lightning_amp.techniques.data.gradient_sync import GradientSync
from tests.ranks import CountCollectives, run_ranks

pytestmark = pytest.mark.ranks

Grads = list[Tensor | None]


def parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(shape, dtype=dtype)) for shape in shapes]


@cache
def mesh_of(model: int) -> DeviceMesh:
    shape = (dist.get_world_size() // model, model)
    return init_device_mesh("cpu", shape, mesh_dim_names=("data", "model"))


def sync_of(
    params: list[nn.Parameter], bucket_bytes: int = 2**20, *, model: int = 1, **kinds: list[nn.Parameter]
) -> GradientSync:
    sync = GradientSync(params, mesh_of(model), bucket_bytes=bucket_bytes, **kinds)
    sync.watch()
    return sync


def grads(params: list[nn.Parameter]) -> Grads:
    return [None if p.grad is None else p.grad.clone() for p in params]


def mean_of_ranks(rank: int) -> Grads:
    p = parameters((2, 3), (4,))
    sync = sync_of(p)
    ((rank + 1.0) * p[0].sum() + 10 * rank * p[1].sum()).backward()
    sync.reduce()
    return grads(p)


def missing_on_one_rank(rank: int) -> Grads:
    p = parameters((2,), (2,), (2,))
    sync = sync_of(p)
    # rank 1 uses no parameter at all; the third is used by nobody
    if rank == 0:
        (p[0] * 4 + p[1]).sum().backward()
    sync.reduce()
    return grads(p)


def accumulated_while_blocked(rank: int) -> tuple[Grads, Grads]:
    p = parameters((2,))
    sync = sync_of(p)
    sync.blocked = True
    (p[0].sum() * (rank + 1)).backward()
    sync.reduce()
    local = grads(p)
    sync.blocked = False
    (p[0].sum() * 10).backward()
    sync.reduce()
    return local, grads(p)


def forced_while_blocked(rank: int) -> Grads:
    p = parameters((2,))
    sync = sync_of(p)
    sync.blocked = True
    (p[0].sum() * (rank + 1)).backward()
    sync.reduce(force=True)
    return grads(p)


def left_on_one_rank(rank: int) -> Grads:
    p = parameters((2,))
    sync = sync_of(p)
    if rank:
        (p[0].sum() * 3).backward()
    sync.reduce_rest()
    # nothing is left of what is reduced
    sync.reduce_rest()
    return grads(p)


def reset_before_reduce(rank: int) -> Grads:
    p = parameters((2,), (2,))
    sync = sync_of(p)
    (p[0] + p[1]).sum().backward()
    p[0].grad = None
    sync.reduce()
    return grads(p)


def untouched_is_left_alone(rank: int) -> Grads:
    p = parameters((2,), (2,))
    sync = sync_of(p)
    # what only this rank knows and no backward has reached, for example another optimizer's gradient
    p[1].grad = torch.full((2,), float(rank), dtype=torch.float64)
    p[0].sum().backward()
    sync.reduce()
    return grads(p)


def given_twice(rank: int) -> tuple[int, Grads]:
    p = parameters((64,))
    sync = sync_of([p[0], p[0]], bucket_bytes=64 * 8)
    ((rank + 1.0) * p[0]).sum().backward()
    return collectives(sync.reduce), grads(p)


def mixed_types(rank: int) -> Grads:
    p = [*parameters((3,)), *parameters((2,), dtype=torch.bfloat16), *parameters((3,), dtype=torch.float32)]
    sync = sync_of(p)
    sum((rank + 1.0) * q.sum().double() for q in p).backward()
    sync.reduce()
    return grads(p)


def other_layout(rank: int, alone: bool = False) -> Grads:
    p = [nn.Parameter(torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)), nn.Parameter(torch.ones(3))]
    sync = sync_of(p, bucket_bytes=1 if alone else 2**20)
    weights = torch.arange(120.0).view(2, 3, 4, 5)
    ((rank + 1.0) * ((p[0] * weights).sum() + p[1].sum())).backward()
    sync.reduce()
    assert not p[0].grad.is_contiguous(), "the case is about a gradient that is not contiguous"
    return grads(p)


def sparse(rank: int) -> str:
    table = nn.Embedding(5, 2, sparse=rank == 0)
    sync = sync_of([*parameters((2,)), table.weight])
    table(torch.tensor([rank])).sum().backward()
    with pytest.raises(InstallError) as caught:
        sync.reduce()
    return str(caught.value)


def removed(rank: int) -> tuple[bool, Grads]:
    p = parameters((2,))
    sync = sync_of(p)
    sync.remove()
    (p[0].sum() * (rank + 1)).backward()
    was_pending = sync.pending
    sync.reduce()
    return was_pending, grads(p)


def collectives(action: Callable[[], None]) -> int:
    with CountCollectives() as mode:
        action()
    return mode.total


def counted(rank: int) -> dict[str, int]:
    p = parameters((100,), (100,), (100,), (1000,), (100,))
    sync = sync_of(p, bucket_bytes=200 * 8)
    nothing = collectives(sync.reduce)
    sum(q.sum() for q in p).backward()
    # 1000 alone | 100 + 100 | 100 + 100
    full = collectives(sync.reduce)
    again = collectives(sync.reduce)
    rest = collectives(sync.reduce_rest)
    sync.blocked = True
    p[0].sum().backward()
    return {"nothing": nothing, "full": full, "again": again, "rest": rest, "blocked": collectives(sync.reduce)}


CASES = (
    mean_of_ranks,
    missing_on_one_rank,
    accumulated_while_blocked,
    forced_while_blocked,
    left_on_one_rank,
    reset_before_reduce,
    untouched_is_left_alone,
    given_twice,
    mixed_types,
    other_layout,
    sparse,
    removed,
    counted,
)


def all_cases(rank: int, world_size: int) -> dict[str, Any]:
    return {case.__name__: case(rank) for case in CASES}


def values(found: Grads) -> list[float | None]:
    """Each gradient as its one number, which all its entries must have."""
    for grad in found:
        assert grad is None or (grad == grad.flatten()[0]).all(), f"entries differ: {grad}"
    return [None if grad is None else grad.flatten()[0].item() for grad in found]


MEANS: dict[str, list[float | None]] = {
    "mean_of_ranks": [1.5, 5.0],
    "missing_on_one_rank": [2.0, 0.5, None],
    "forced_while_blocked": [1.5],
    "left_on_one_rank": [1.5],
    "reset_before_reduce": [None, 1.0],
    "mixed_types": [1.5, 1.5, 1.5],
}


def test_every_rank_holds_the_mean_of_what_was_reached(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(all_cases, 2, tmp_path)):
        assert {case: values(found[case]) for case in MEANS} == MEANS
        local, reduced = found["accumulated_while_blocked"]
        assert (values(local), values(reduced)) == ([rank + 1.0], [11.5]), "averaged once, as a sum"
        assert values(found["untouched_is_left_alone"]) == [1.0, float(rank)]
        assert (found["removed"][0], values(found["removed"][1])) == (False, [rank + 1.0])
        first, second = found["other_layout"]
        assert torch.equal(first, 1.5 * torch.arange(120.0).view(2, 3, 4, 5)), "entries keep their places"
        assert values([second]) == [1.5]
        assert "parameter of shape (5, 2) has a sparse one" in found["sparse"]
        # one for the agreement, and one for each bucket
        assert found["counted"] == {"nothing": 1, "full": 1 + 3, "again": 1, "rest": 1, "blocked": 0}
        assert (found["given_twice"][0], values(found["given_twice"][1])) == (2, [1.5])


def one_of_each(rank: int, model: int) -> list[nn.Parameter]:
    """A replicated parameter, a part and a shard, whose length is the rank's own."""
    return parameters((3,), (2, 2), (2 + rank % model,))


def on_a_mesh(rank: int, model: int) -> tuple[Grads, dict[str, int]]:
    p = one_of_each(rank, model)
    sync = sync_of(p, model=model, partial=[p[1]], sharded=[p[2]])
    d, m = divmod(rank, model)
    # alike in a model group; a part, different on all ranks; the own shard's, different from the other shards'
    ((d + 1.0) * p[0].sum() + 10.0**rank * p[1].sum() + (d + 1.0) * (m + 1) * p[2].sum()).backward()
    with CountCollectives() as mode:
        sync.reduce()
    return grads(p), dict(mode.counts)


def added_to_whole(rank: int) -> list[float | None]:
    """Two backward passes, each reduced, into one gradient; the third accumulates two before it is reduced."""
    p = parameters((2,))
    sync = sync_of(p, model=2, partial=p)
    for blocked in (False, False, True, False):
        sync.blocked = blocked
        (10.0**rank * p[0].sum()).backward()
        sync.reduce()
    return values(grads(p))


def added_on_one_rank(rank: int) -> list[float | None]:
    """Only rank 0 reaches the parameter again: the others must not count their copy of the whole as a part."""
    p = parameters((2,))
    sync = sync_of(p, model=2, partial=p)
    (10.0**rank * p[0].sum()).backward()
    sync.reduce()
    if rank == 0:
        p[0].sum().backward()
    sync.reduce()
    return values(grads(p))


def reached_by_other_ranks(rank: int) -> Grads:
    """Each parameter is reached by one rank alone."""
    p = one_of_each(rank, 2)
    sync = sync_of(p, model=2, partial=[p[1]], sharded=[p[2]])
    if rank == 3:
        p[1].sum().backward()
    if rank == 1:
        p[2].sum().backward()
    sync.reduce()
    return grads(p)


def with_other_rounding(rank: int, model: int) -> tuple[Grads, dict[str, int]]:
    """Twice, into one gradient: what the ranks of a model group have found differs a little."""
    p = one_of_each(rank, model)
    sync = sync_of(p, model=model, partial=[p[1]], sharded=[p[2]], rounds_differently=True)
    d, m = divmod(rank, model)
    for _ in range(2):
        ((d + 1.0 + m * 2.0**-20) * p[0].sum() + p[1].sum() + p[2].sum()).backward()
        with CountCollectives() as mode:
            sync.reduce()
    return grads(p), dict(mode.counts)


def mesh_cases(rank: int, world_size: int) -> dict[str, Any]:
    return {
        "2 x 2": on_a_mesh(rank, 2),
        "1 x 4": on_a_mesh(rank, 4),
        "whole": added_to_whole(rank),
        "whole on one": added_on_one_rank(rank),
        "one each": reached_by_other_ranks(rank),
        "rounding, 2 x 2": with_other_rounding(rank, 2),
        "rounding, 1 x 4": with_other_rounding(rank, 4),
    }


def test_parts_are_summed_over_the_model_axis_and_all_is_averaged_over_the_data_axis(tmp_path: Path) -> None:
    for rank, result in enumerate(run_ranks(mesh_cases, 4, tmp_path)):
        found, counts = result["2 x 2"]
        assert values(found) == [1.5, (1 + 10 + 100 + 1000) / 2, 1.5 * (rank % 2 + 1)]
        assert len(found[2]) == 2 + rank % 2
        # the agreement, and one bucket of each kind
        assert counts == {"allreduce_": 4}
        found, counts = result["1 x 4"]
        assert values(found) == [1.0, 1111.0, rank + 1.0]
        assert counts == {"allreduce_": 2}, "without a data axis only parts are sent"
        for mesh, mean, part, n in (("2 x 2", 1.5 + 2.0**-21, 2.0, 4), ("1 x 4", 1.0 + 1.5 * 2.0**-20, 4.0, 3)):
            found, counts = result[f"rounding, {mesh}"]
            assert values(found) == [2 * mean, 2 * part, 2.0], "copies that were rounded differently become alike"
            # as many as without, where there is a data axis
            assert counts == {"allreduce_": n}
        # parts added to a whole gradient count once
        assert result["whole"] == [pytest.approx(4 * 1111 / 2, rel=1e-15)]
        assert result["whole on one"] == [pytest.approx((1111 + 1) / 2, rel=1e-15)]
        # rank 3 alone reached the part, rank 1 alone the shard, which ranks 1 and 3 share
        assert values(result["one each"]) == [None, 0.5, 0.5 if rank % 2 else 0.0]


def one_rank_fails(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("told so")
    dist.barrier()


def test_the_helper_tells_why_ranks_failed(tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match="told so"):
        run_ranks(one_rank_fails, 2, tmp_path, timeout=60)
