"""Redistribute a tensor: shard a replicated one, gather, move borders of shards, or shard along another dim."""

from torch import Tensor

from lightning_amp.holding import holding
from lightning_amp.sharding.collectives import exchange, gather, periods_back, periods_first, pick, swap
from lightning_amp.sharding.owners import Owners
from lightning_amp.sharding.splits import MOVING, MeshAxis, Split, Splits


def own_part(whole: Tensor, dim: int, owners: Owners, rank: int) -> Tensor:
    """Return a rank's indices of a dim of a replicated tensor; the gradient of all other indices is zero."""
    own = pick(periods_first(whole, dim, owners), 0, owners.one_period.spans[rank])
    return periods_back(own, dim, owners)


def resplit(local: Tensor, have: Splits, want: Splits) -> Tensor:
    """Return the local shard under other splits; sharding a replicated tensor sends nothing."""
    if have is want:
        return local
    with holding(MOVING, True):
        for axis in {split.axis: None for split in (*have, *want)}:
            local, have = _on_axis(local, have, axis, want.on(axis))
    # contiguous as a plain tensor is, because operators that return views require it
    return local.contiguous()


def _on_axis(local: Tensor, have: Splits, axis: MeshAxis, want: Split | None) -> tuple[Tensor, Splits]:
    """Change the split over one axis, and return the local shard and its splits."""
    now = have.on(axis)
    if now == want:
        return local, have
    # one collective if the axis stays in use; a gather, which needs memory for the full dim, only otherwise
    if now is not None and want is not None:
        if now.dim == want.dim:
            moved = exchange(local, axis, want.dim, now.owners, want.owners.spans)
            return moved, have.replaced(axis, want)
        if have.at(want.dim) is None:
            moved = swap(local, axis, (now.dim, now.owners), (want.dim, want.owners))
            return moved, have.replaced(axis, want)
    if now is not None:
        local, have = gather(local, axis, now.dim, now.owners), have.replaced(axis, None)
    if want is not None:
        other = have.at(want.dim)
        if other is not None:
            # another axis shards this dim: it is gathered first, and gets its new dim later
            local, have = _on_axis(local, have, other.axis, None)
        local, have = own_part(local, want.dim, want.owners, axis.rank), have.replaced(axis, want)
    return local, have
