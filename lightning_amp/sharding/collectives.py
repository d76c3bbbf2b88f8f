"""Collectives over one mesh axis; the backward pass of each is its adjoint.

    all_reduce   sum of all ranks' tensors             backward: all_reduce
    gather       full dim from its shards              backward: reduce-scatter, also of uneven shards
    exchange     any ranges of a dim, also halos       backward: reverse exchange, with sums
    swap         reshard along another dim             backward: reverse swap

Every rank differentiates its own copy of the loss. The copies sum to R times the loss. Each collective is
differentiated as a linear map, so that the gradients of all ranks sum to R times the gradient. Averaging over the
ranks, as for data-parallel gradients, gives the exact gradient. Operators need not track which values are replicated.

Without a process group (None), as on fake tensors, it is a dry run: results have correct shapes and no values.

Legend: R ranks of the axis. `rows` is the tensor with the communicated dim first.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from lightning_amp._torch import FakeTensor
from lightning_amp._torch import functional_collectives as functional
from lightning_amp.footprint.target_device import launches_operators
from lightning_amp.sharding.owners import OwnerRun, Owners, joined
from lightning_amp.sharding.splits import MeshAxis, record

# torch 2.13 renamed these, and warns about the old names
ALL_GATHER: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
REDUCE_SCATTER: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
Map = Callable[..., Tensor]
Wanted = tuple[tuple[range, ...], ...]
"""Ranges of a dim that each rank receives, in order."""
LATER: list[Callable[[], None]] = []
"""Deferred computations; the next all-reduce runs them while it is pending."""


class _Linear(Function):
    """A linear map of shards. Its backward is the adjoint, which is linear too, so that double backward works."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Map, back: Map, to: tuple[Any, ...]) -> Tensor:
        ctx.map = back, there, to
        return there(x, *to)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _Linear.apply(grad, *ctx.map), None, None, None


def all_reduce(x: Tensor, axis: MeshAxis) -> Tensor:
    """Return the sum over the ranks."""
    return x if axis.size == 1 else cast(Tensor, _Linear.apply(x, reduce_now, reduce_now, (axis,)))


def gather(x: Tensor, axis: MeshAxis, dim: int, owners: Owners) -> Tensor:
    """Return the full dim from the indices that each rank owns."""
    return cast(Tensor, _Linear.apply(x, _gather, _reduce_scatter, (axis, dim, owners)))


def reduce_scatter(x: Tensor, axis: MeshAxis, dim: int, owners: Owners) -> Tensor:
    """Sum tensors with the full dim, which differ between ranks, and return the indices that this rank owns."""
    return cast(Tensor, _Linear.apply(x, _reduce_scatter, _gather, (axis, dim, owners)))


def exchange(x: Tensor, axis: MeshAxis, dim: int, owners: Owners, wanted: Wanted) -> Tensor:
    """Return the ranges `wanted[r]` of a dim on rank r; nothing is sent if every rank already owns its ranges."""
    if _all_local(owners, wanted):
        return pick(x, dim, _local(owners, axis.rank, wanted[axis.rank]))
    return cast(Tensor, _Linear.apply(x, _exchange, _exchange_back, (axis, dim, owners, wanted)))


def swap(x: Tensor, axis: MeshAxis, source: tuple[int, Owners], target: tuple[int, Owners]) -> Tensor:
    """Reshard from the dim of `source` to the dim of `target` by one all-to-all."""
    return cast(Tensor, _Linear.apply(x, _swap, lambda x, axis, a, b: _swap(x, axis, b, a), (axis, source, target)))


def _arriving(x: Tensor, shape: Sequence[int], axis: MeshAxis) -> Tensor:
    """Allocate the receive buffer; zeros in a dry run, so that a second pass gives the same values."""
    return x.new_zeros(list(shape)) if axis.group is None else x.new_empty(list(shape))


def ring(
    tensors: Sequence[Tensor], shapes: Sequence[Sequence[int]], axis: MeshAxis, step: int = 1
) -> Callable[[], list[Tensor]]:
    """Start sending tensors `step` ranks on; the returned function waits for the tensors of the rank as far before.

    Each tensor is one all-to-all in which a rank sends to one other only. This is as fast as send and receive, and
    supports tensors without values, for a simulation.
    """
    if step % axis.size == 0:
        return lambda: list(tensors)
    sent = [t.contiguous() for t in tensors]
    record(axis, "ring", sum(tensor.nbytes for tensor in sent))
    found = list[Tensor]()
    for tensor, shape in zip(sent, shapes, strict=True):
        given, taken = [0] * axis.size, [0] * axis.size
        given[(axis.rank + step) % axis.size], taken[axis.rank - step] = tensor.numel(), math.prod(shape)
        found.append(start_all_to_all(tensor.view(-1), taken, given, axis.group))

    def arrive() -> list[Tensor]:
        found[:] = [wait_for(t).view(s) for t, s in zip(found, shapes, strict=True)]
        # kept until here: a tensor must not be freed while it is being sent
        sent.clear()
        return found

    return arrive


def start_all_to_all(sent: Tensor, n_received: list[int], n_sent: list[int], group: Any) -> Tensor:
    """Start an all-to-all of rows, without gradients; do not read the result before `wait_for` has returned."""
    if group is None:
        arriving = sent.new_zeros(sum(n_received), *sent.shape[1:])
        # as long as a collective holds what it sends
        vars(arriving)["sent"] = sent.contiguous()
        return arriving
    found = functional.all_to_all_single(sent.contiguous(), n_received, n_sent, group)
    # an AsyncCollectiveTensor waits at its first use, and when autograd inspects it; the raw tensor does not
    return cast(Tensor, getattr(found, "elem", found))


def wait_for(under_way: Tensor) -> Tensor:
    """Return the rows after they have arrived."""
    # of a fake tensor the operator returns another one
    vars(under_way).pop("sent", None)
    return under_way if isinstance(under_way, FakeTensor) else cast(Tensor, functional.wait_tensor(under_way))


@torch.no_grad()
def reduce_now(x: Tensor, axis: MeshAxis, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """Reduce over the ranks, without a gradient."""
    if axis.size == 1:
        return x
    # a copy, because the operator works in place; int16 cannot be summed in the dtype in which it is sent
    kind = torch.int32 if x.dtype == torch.int16 else x.dtype
    found = x.to(kind, copy=True, memory_format=torch.contiguous_format)
    record(axis, "all_reduce", found.nbytes)
    work = None
    if _sends(found, axis):
        work = dist.all_reduce(_sendable(found), op, group=axis.group, async_op=bool(LATER))
    do_later()
    if work is not None:
        work.wait()
    return found.to(x.dtype)


def do_later() -> None:
    """Run the deferred computations."""
    while LATER:
        LATER.pop(0)()


def stacked(x: Tensor, axis: MeshAxis) -> Tensor:
    """Gather tensors of equal shape from all ranks along a new first dim, without a gradient."""
    return start_stacked(x, axis)()


@torch.no_grad()
def start_stacked(x: Tensor, axis: MeshAxis) -> Callable[[], Tensor]:
    """Start an all-gather of a tensor; the returned function waits, and returns the result of `stacked`."""
    if axis.size == 1:
        return lambda: x[None]
    found, given, work = _arriving(x, (axis.size, *x.shape), axis), [x.contiguous()], None
    record(axis, "all_gather", x.nbytes)
    if _sends(found, axis):
        to, own = _sendable(found).view(-1), _sendable(given[0]).view(-1)
        work = ALL_GATHER(to, own, group=axis.group, async_op=True)

    def arrive() -> Tensor:
        if work is not None:
            work.wait()
        # kept until here: a tensor must not be freed while it is being sent
        given.clear()
        return found

    return arrive


@torch.no_grad()
def start_adding_rows(rows: Tensor, group: Any, out: Tensor | None = None) -> Callable[[], Tensor]:
    """Start a reduce-scatter of rows [R, ...]: rank r receives the sum of row r. The returned function waits for it.

    gloo's reduce-scatter sends as much as its all-reduce. With gloo, each rank sends every other rank its row and sums
    the rows that it receives: as many bytes as a ring sends, in one asynchronous collective.

    Args:
        rows: One row for each rank.
        group: The process group; None in a dry run.
        out: Output tensor of the sum.
    """
    by_gloo = not launches_operators(rows) if group is None else dist.get_backend(group) == "gloo"
    # with gloo, rows of all ranks arrive and are summed here; with other backends, the sum arrives
    given, work = [rows.contiguous()], None
    found = torch.empty_like(given[0]) if by_gloo else torch.empty_like(given[0][0]) if out is None else out
    sends = group is not None and not isinstance(rows, FakeTensor)
    if sends and by_gloo:
        work = dist.all_to_all_single(found, given[0], group=group, async_op=True)
    elif sends:
        work = REDUCE_SCATTER(found.view(-1), given[0].view(-1), group=group, async_op=True)

    def arrive() -> Tensor:
        if work is not None:
            work.wait()
        # kept until here: a tensor must not be freed while it is being sent
        given.clear()
        if not by_gloo:
            return found
        total = torch.sum(found, 0, out=out)
        if work is not None:
            # gloo's thread may hold a reference after the collective has ended
            found.untyped_storage().resize_(0)
        return total

    return arrive


def _sends(x: Tensor, axis: MeshAxis) -> bool:
    return axis.group is not None and not isinstance(x, FakeTensor)


def _gather(x: Tensor, axis: MeshAxis, dim: int, owners: Owners) -> Tensor:
    # an all-gather requires equal sizes: shorter shards are padded, and `pick` removes the padding. Owners that repeat
    # are gathered as one period with an extra dim for the repeats, because every period has the same order
    most, rows = max(owners.period_counts), periods_first(x, dim, owners)
    if rows.shape[0] < most:
        rows = torch.cat([rows, rows.new_zeros((most - rows.shape[0], *rows.shape[1:]))])
    parts = stacked(rows, axis).flatten(0, 1)
    place = [rank * most for rank in range(axis.size)]
    return periods_back(pick(parts, 0, _in_order(owners.runs, place)), dim, owners)


def _reduce_scatter(x: Tensor, axis: MeshAxis, dim: int, owners: Owners) -> Tensor:
    rows = periods_first(x, dim, owners)
    pieces = [pick(rows, 0, spans) for spans in owners.one_period.spans]
    record(axis, "reduce_scatter", rows.nbytes)
    # gloo's reduce-scatter sends as much as an all-reduce: every rank sums the rows it receives
    got = exchange_pieces(pieces, [owners.period_counts[axis.rank]] * axis.size, axis, counted=False)
    return periods_back(sum(got[1:], start=got[0]), dim, owners)


def _exchange(x: Tensor, axis: MeshAxis, dim: int, owners: Owners, wanted: Wanted) -> Tensor:
    send, take, order = _route(owners, wanted, axis.rank)
    rows = x.movedim(dim, 0)
    got = exchange_pieces([pick(rows, 0, ranges) for ranges in send], take, axis)
    # Received rows are ordered by rank. This is the wanted order for consecutive ranges, such as a shard with its halo;
    # for all others, such as a reversed dim, the rows are reordered.
    if order == [range(sum(take))]:
        # for a halo, concatenate along `dim`: moving the own rows to the front takes several times as long
        found = [piece.movedim(0, dim) for piece in got if len(piece)]
        return found[0] if len(found) == 1 else torch.cat(found, dim)
    return pick(torch.cat(got), 0, order).movedim(0, dim)


def _exchange_back(x: Tensor, axis: MeshAxis, dim: int, owners: Owners, wanted: Wanted) -> Tensor:
    """Send exchanged rows back to their owners, which sum them."""
    send, take, order = _route(owners, wanted, axis.rank)
    rows = x.movedim(dim, 0)
    if order != [range(sum(take))]:
        # restore the order of arrival, by rank
        arrived, given = rows.new_empty((sum(take), *rows.shape[1:])), 0
        for ordered in order:
            arrived[slice(ordered.start, ordered.stop)] = rows[given : given + len(ordered)]
            given += len(ordered)
        rows = arrived
    # Send and receive are swapped. An index that several ranks received comes back from each of them, and is summed.
    got = exchange_pieces(rows.split(take), [_total(ranges) for ranges in send], axis)
    n, own = owners.counts[axis.rank], got[axis.rank]
    # all own rows come back, as for a halo: they start the sum, in place of zeros
    if send[axis.rank] == [range(n)]:
        total = own.movedim(0, dim).clone(memory_format=torch.contiguous_format)
        send = [[] if rank == axis.rank else ranges for rank, ranges in enumerate(send)]
    else:
        total = x.new_zeros([n if d == dim else size for d, size in enumerate(x.shape)])
    for ranges, piece in zip(send, got, strict=True):
        lengths = [len(r) for r in ranges]
        for r, part in zip(ranges, piece.split(lengths) if ranges else (), strict=True):
            added = part.movedim(0, dim)
            if r.step > 0:
                total[(slice(None),) * dim + (slice(r.start, r.stop, r.step),)] += added
            else:
                total.index_add_(dim, positions([r], x.device), added)
    return total


def _swap(x: Tensor, axis: MeshAxis, source: tuple[int, Owners], target: tuple[int, Owners]) -> Tensor:
    (a, have), (b, want) = source, target
    # Rank r receives its indices of the target dim from each rank's shard. Received rows are then sorted along the
    # source dim, because owners need not be contiguous.
    rows = x.movedim((a, b), (0, 1))
    pieces = [pick(rows, 1, spans) for spans in want.spans]
    shapes = [torch.Size((n, want.counts[axis.rank], *rows.shape[2:])) for n in have.counts]
    # pieces differ in both dims, so they are sent flattened
    flat = exchange_pieces([p.reshape(-1) for p in pieces], [shape.numel() for shape in shapes], axis)
    place = [sum(have.counts[:rank]) for rank in range(axis.size)]
    parts = torch.cat([piece.view(shape) for piece, shape in zip(flat, shapes, strict=True)])
    return pick(parts, 0, _in_order(have.expanded(), place)).movedim((0, 1), (a, b))


def pick(x: Tensor, dim: int, ranges: Sequence[range]) -> Tensor:
    """Concatenate ranges of a dim; a view if it is one range with a positive step."""
    if not ranges:
        return x.narrow(dim, 0, 0)
    if len(ranges) == 1 and ranges[0] == range(x.shape[dim]):
        return x
    if len(ranges) > 16:
        # not cached: the positions may be fake tensors of a dry run
        return x.index_select(dim, positions(ranges, x.device))
    found = [
        x[(slice(None),) * dim + (slice(r.start, r.stop, r.step),)]
        if r.step > 0
        else x.index_select(dim, positions([r], x.device))
        for r in ranges
    ]
    return found[0] if len(found) == 1 else torch.cat(found, dim)


def positions(ranges: Sequence[range], device: torch.device) -> Tensor:
    """Return the indices of some ranges."""
    return torch.cat([torch.arange(r.start, r.stop, r.step, device=device) for r in ranges])


def _in_order(runs: Iterable[OwnerRun], place: list[int]) -> list[range]:
    """Return the positions of a dim's runs, if the indices of rank r start at `place[r]`."""
    found = list[range]()
    for length, rank in runs:
        found.append(range(place[rank], place[rank] + length))
        place[rank] += length
    return joined(found)


def exchange_pieces(
    pieces: Sequence[Tensor], take: Sequence[int], axis: MeshAxis, *, counted: bool = True
) -> list[Tensor]:
    """Send piece r to rank r, and return the pieces of all ranks, with `take[r]` rows each."""
    if axis.size == 1:
        return list(pieces)
    # the own piece is not sent: for a halo it is nearly everything
    sizes = [0 if rank == axis.rank else len(piece) for rank, piece in enumerate(pieces)]
    take = [0 if rank == axis.rank else n for rank, n in enumerate(take)]
    rows = torch.cat([piece.narrow(0, 0, n) for piece, n in zip(pieces, sizes, strict=True)])
    if counted:
        record(axis, "all_to_all", rows.nbytes)
    found = _arriving(rows, (sum(take), *rows.shape[1:]), axis)
    if axis.group is not None:
        dist.all_to_all_single(_sendable(found), _sendable(rows), take, sizes, group=axis.group)
    arrived = list(found.split(take))
    arrived[axis.rank] = pieces[axis.rank]
    return arrived


SENT_AS = {torch.bool: torch.uint8, torch.int16: torch.float16}
"""Dtypes that gloo does not support, and supported ones of equal size."""


def _sendable(x: Tensor) -> Tensor:
    """View a tensor in a dtype that the backends support; complex numbers as pairs."""
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x.view(SENT_AS.get(x.dtype, x.dtype))


def periods_first(x: Tensor, dim: int, owners: Owners) -> Tensor:
    """Move a dim to the front; the repeats of periodic owners become an extra dim."""
    if owners.repeat == 1:
        return x.movedim(dim, 0)
    return x.unflatten(dim, (owners.repeat, -1)).movedim(dim + 1, 0)


def periods_back(rows: Tensor, dim: int, owners: Owners) -> Tensor:
    """Invert `periods_first`."""
    if owners.repeat == 1:
        return rows.movedim(0, dim)
    return rows.movedim(0, dim + 1).flatten(dim, dim + 1)


@lru_cache(maxsize=4096)
def _route(owners: Owners, wanted: Wanted, rank: int) -> tuple[list[list[range]], list[int], list[range]]:
    """Return local positions to send to each rank, rows to receive from each, and positions of received rows."""
    send = [_local(owners, rank, ranges) for ranges in wanted]
    take = [_total(_local(owners, other, wanted[rank])) for other in range(owners.size)]
    place = [sum(take[:other]) for other in range(owners.size)]
    runs = [run for one in wanted[rank] for run in owners.take(one).expanded()]
    return send, take, _in_order(runs, place)


@lru_cache(maxsize=4096)
def _all_local(owners: Owners, wanted: Wanted) -> bool:
    """Whether every rank owns the ranges that it receives."""
    return all(_total(_local(owners, rank, ranges)) == _total(ranges) for rank, ranges in enumerate(wanted))


def _local(owners: Owners, rank: int, ranges: Sequence[range]) -> list[range]:
    return joined([own for one in ranges for own in owners.local(rank, one)])


def _total(ranges: Sequence[range]) -> int:
    return sum(map(len, ranges))
