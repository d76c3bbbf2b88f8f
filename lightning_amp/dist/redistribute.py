"""Change how a tensor is split: cut a whole one, gather, move borders, split along another dim."""

from torch import Tensor

from lightning_amp.dist.collectives import exchange, gather, periods_back, periods_first, pick, swap
from lightning_amp.dist.owners import Owners
from lightning_amp.dist.splits import MOVING, MeshAxis, Split, Splits
from lightning_amp.holding import holding


def own_part(whole: Tensor, dim: int, owners: Owners, rank: int) -> Tensor:
    """A rank's indices of a dim of a whole tensor; the gradient of others' is zero."""
    own = pick(periods_first(whole, dim, owners), 0, owners.one_period.spans[rank])
    return periods_back(own, dim, owners)


def resplit(local: Tensor, have: Splits, want: Splits) -> Tensor:
    """This rank's part under other splits; nothing is sent where a whole tensor is cut."""
    if have is want:
        return local
    with holding(MOVING, True):
        for axis in {split.axis: None for split in (*have, *want)}:
            local, have = _on_axis(local, have, axis, want.on(axis))
    # memory in the order of the dims, as a whole tensor has it: operators that make views ask for it
    return local.contiguous()


def _on_axis(local: Tensor, have: Splits, axis: MeshAxis, want: Split | None) -> tuple[Tensor, Splits]:
    """The part with another split over one axis, and its splits then."""
    now = have.on(axis)
    if now == want:
        return local, have
    # one collective where the axis stays in use; a gather, which needs memory for the whole dim, only where it must
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
            # another axis, which gets another dim or none, splits this dim
            local, have = _on_axis(local, have, other.axis, None)
        local, have = own_part(local, want.dim, want.owners, axis.rank), have.replaced(axis, want)
    return local, have
