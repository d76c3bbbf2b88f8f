"""Collectives over one mesh axis; the backward of each is its adjoint.

    all_reduce   sum of all ranks' tensors             backward: all_reduce
    gather       whole dim from its parts              backward: reduce-scatter, uneven parts too
    exchange     any ranges of a dim, also halos       backward: exchange in reverse, added up
    swap         split along another dim               backward: swap back

Every rank differentiates its own copy of the loss. The copies add up to R times the loss, and because every collective
is differentiated as the linear map that it is, the sum of all ranks' gradients is R times the gradient: averaged over
the ranks, as data-parallel gradients are, it is right. No operator has to know which values are replicated.

An axis without a process group is that of a dry run: results have the right shapes, and no values.

Legend: R ranks of the axis. `rows` are the indices along the dim that is sent.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from lightning_amp.dist.owners import Owners, Span, joined_spans
from lightning_amp.dist.splits import MeshAxis, record

# torch 2.13 has a new name, and warns of the old one
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
Spans = tuple[Span, ...]
Wanted = tuple[Spans, ...]
"""For every rank the ranges of a dim that it is to have, in the order in which it is to have them."""


def all_reduce(x: Tensor, axis: MeshAxis) -> Tensor:
    """The sum over the ranks."""
    return x if axis.size == 1 else cast(Tensor, _AllReduce.apply(x, axis))


def gather(x: Tensor, axis: MeshAxis, dim: int, owners: Owners) -> Tensor:
    """The whole of a dim of which each rank has its own indices."""
    return cast(Tensor, _Gather.apply(x, axis, dim, owners))


def reduce_scatter(x: Tensor, axis: MeshAxis, dim: int, owners: Owners) -> Tensor:
    """Own indices of the sum over the ranks of a whole dim."""
    return cast(Tensor, _ReduceScatter.apply(x, axis, dim, owners))


def exchange(x: Tensor, axis: MeshAxis, dim: int, owners: Owners, wanted: Wanted) -> Tensor:
    """The ranges `wanted[r]` of a dim on rank r; nothing is sent where every rank has its own already."""
    if _all_local(owners, wanted):
        return pick(x, dim, _local(owners, axis.rank, wanted[axis.rank]))
    return cast(Tensor, _Exchange.apply(x, axis, dim, owners, wanted))


def swap(x: Tensor, axis: MeshAxis, source: tuple[int, Owners], target: tuple[int, Owners]) -> Tensor:
    """A tensor split along the dim of `source`, split along the dim of `target` instead; one all-to-all."""
    return cast(Tensor, _Swap.apply(x, axis, source, target))


def ring(
    tensors: Sequence[Tensor], shapes: Sequence[Sequence[int]], axis: MeshAxis
) -> Callable[[], list[Tensor]]:
    """Begin to send tensors to the next rank; the returned function waits for those of the previous rank."""
    sent = [t.contiguous() for t in tensors]
    found = [tensor.new_empty(list(shape)) for tensor, shape in zip(sent, shapes, strict=True)]
    record(axis, "ring", sum(tensor.nbytes for tensor in sent))
    works = list[Any]()
    if axis.group is not None:
        ranks = dist.get_process_group_ranks(axis.group)
        after, before = ranks[(axis.rank + 1) % axis.size], ranks[(axis.rank - 1) % axis.size]
        ops = [dist.P2POp(dist.isend, tensor, after, axis.group) for tensor in sent]
        ops += [dist.P2POp(dist.irecv, tensor, before, axis.group) for tensor in found]
        works = dist.batch_isend_irecv(ops)

    def arrive() -> list[Tensor]:
        for work in works:
            work.wait()
        # kept until here: a tensor that is being sent must not be freed
        sent.clear()
        return found

    return arrive


@torch.no_grad()
def reduce_now(x: Tensor, axis: MeshAxis, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """Reduce over the ranks, without a gradient."""
    if axis.size == 1:
        return x
    # a clone: the operator works in place
    found = x.to(torch.uint8) if x.dtype == torch.bool else x.contiguous().clone()
    record(axis, "all_reduce", found.nbytes)
    if axis.group is not None:
        dist.all_reduce(found, op, group=axis.group)
    return found.to(x.dtype)


@torch.no_grad()
def stacked(x: Tensor, axis: MeshAxis) -> Tensor:
    """Tensors of one shape of all ranks, along a new first dim, without a gradient."""
    if axis.size == 1:
        return x[None]
    found = x.new_empty((axis.size, *x.shape))
    record(axis, "all_gather", x.nbytes)
    if axis.group is not None:
        _ALL_GATHER(found.view(-1), x.contiguous().view(-1), group=axis.group)
    return found


@torch.no_grad()
def start_reduce_scatter(rows: Tensor, axis: MeshAxis) -> Callable[[], Tensor]:
    """Begin to add up rows, of which rank r gets the sum of the r-th; the returned function waits for it.

    Args:
        rows: One row for each rank.
    """
    record(axis, "reduce_scatter", rows.nbytes)
    if axis.group is None:
        return lambda: torch.empty_like(rows[0])
    found = torch.empty_like(rows)
    # gloo has no reduce-scatter that sends less than an all-reduce
    work = dist.all_to_all_single(found, rows.contiguous(), group=axis.group, async_op=True)

    def arrive() -> Tensor:
        assert work is not None, "this rank is one of the group"
        work.wait()
        return found.sum(0)

    return arrive


class _AllReduce(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis) -> Tensor:
        ctx.axis = axis
        return reduce_now(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad, ctx.axis), None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis, dim: int, owners: Owners) -> Tensor:
        ctx.to = axis, dim, owners
        most, rows = max(owners.period_counts), _periods_last(x, dim, owners)
        if rows.shape[0] < most:
            rows = torch.cat([rows, rows.new_zeros((most - rows.shape[0], *rows.shape[1:]))])
        parts = stacked(rows, axis).flatten(0, 1)
        place = [0] * axis.size
        spans = list[Span]()
        for length, rank in owners.runs:
            spans.append((rank * most + place[rank], rank * most + place[rank] + length))
            place[rank] += length
        return _periods_back(pick(parts, 0, joined_spans(spans)), dim, owners)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        axis, dim, owners = ctx.to
        return reduce_scatter(grad, axis, dim, owners), None, None, None


class _ReduceScatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis, dim: int, owners: Owners) -> Tensor:
        ctx.to = axis, dim, owners
        rows = _periods_last(x, dim, owners)
        spans = Owners.of(owners.runs, owners.size).spans
        pieces = [pick(rows, 0, spans[rank]) for rank in range(axis.size)]
        record(axis, "reduce_scatter", rows.nbytes)
        # gloo has no reduce-scatter that sends less than an all-reduce: every rank adds up what it gets
        counts = owners.period_counts
        got = _all_to_all(pieces, [counts[axis.rank]] * axis.size, axis)
        total = got[0].clone()
        for piece in got[1:]:
            total += piece
        return _periods_back(total, dim, owners)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return gather(grad, *ctx.to), None, None, None


class _Exchange(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: MeshAxis, dim: int, owners: Owners, wanted: Wanted) -> Tensor:
        ctx.to = axis, dim, owners, wanted
        send, take, order = _route(owners, wanted, axis.rank)
        rows = x.movedim(dim, 0)
        pieces = [pick(rows, 0, spans) for spans in send]
        record(axis, "all_to_all", sum(piece.nbytes for piece in pieces))
        return pick(torch.cat(_all_to_all(pieces, take, axis)), 0, order).movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        found = _ExchangeBack.apply(grad, *ctx.to)
        return found, None, None, None, None


class _ExchangeBack(Function):
    """What was exchanged goes back to its owner, who adds it up."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, axis: MeshAxis, dim: int, owners: Owners, wanted: Wanted) -> Tensor:
        ctx.to = axis, dim, owners, wanted
        send, take, order = _route(owners, wanted, axis.rank)
        rows = grad.movedim(dim, 0)
        pieces, at = list[list[Tensor]](), 0
        back = [list[tuple[int, Tensor]]() for _ in range(axis.size)]
        ends = [sum(take[: rank + 1]) for rank in range(axis.size)]
        for start, stop in order:
            # a range of what had arrived may hold the rows of several ranks
            while start < stop:
                rank = next(r for r, end in enumerate(ends) if start < end)
                n = min(stop, ends[rank]) - start
                back[rank].append((start, rows.narrow(0, at, n)))
                start, at = start + n, at + n
        empty = rows.narrow(0, 0, 0)
        pieces = [[piece for _, piece in sorted(found, key=lambda pair: pair[0])] for found in back]
        given = [torch.cat(found) if found else empty for found in pieces]
        record(axis, "all_to_all", sum(piece.nbytes for piece in given))
        total = rows.new_zeros((owners.counts[axis.rank], *rows.shape[1:]))
        got = _all_to_all(given, [_total(spans) for spans in send], axis)
        for spans, piece in zip(send, got, strict=True):
            first = 0
            for start, stop in spans:
                total.narrow(0, start, stop - start).add_(piece.narrow(0, first, stop - start))
                first += stop - start
        return total.movedim(0, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return exchange(grad, *ctx.to), None, None, None, None


class _Swap(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, axis: MeshAxis, source: tuple[int, Owners], target: tuple[int, Owners]
    ) -> Tensor:
        ctx.to = axis, source, target
        (a, have), (b, want) = source, target
        rows = x.movedim((a, b), (0, 1))
        pieces = [pick(rows, 1, want.spans[rank]) for rank in range(axis.size)]
        shapes = [(have.counts[rank], want.counts[axis.rank], *rows.shape[2:]) for rank in range(axis.size)]
        record(axis, "all_to_all", sum(piece.nbytes for piece in pieces))
        flat = _all_to_all(
            [piece.reshape(-1) for piece in pieces], [torch.Size(shape).numel() for shape in shapes], axis
        )
        place = [sum(have.counts[:rank]) for rank in range(axis.size)]
        order = list[Span]()
        for length, rank in have.expanded():
            order.append((place[rank], place[rank] + length))
            place[rank] += length
        parts = torch.cat([piece.view(shape) for piece, shape in zip(flat, shapes, strict=True)])
        return pick(parts, 0, joined_spans(order)).movedim((0, 1), (a, b))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        axis, source, target = ctx.to
        return swap(grad, axis, target, source), None, None, None


def pick(x: Tensor, dim: int, spans: Sequence[Span]) -> Tensor:
    """The ranges of a dim, one after the other; a view where they are one range."""
    if not spans:
        return x.narrow(dim, 0, 0)
    if len(spans) == 1:
        start, stop = spans[0]
        return x if (start, stop) == (0, x.shape[dim]) else x.narrow(dim, start, stop - start)
    if len(spans) <= 16:
        return torch.cat([x.narrow(dim, start, stop - start) for start, stop in spans], dim)
    # not cached: the indices may be fake tensors of a dry run
    return x.index_select(dim, torch.cat([torch.arange(*span, device=x.device) for span in spans]))


def _all_to_all(pieces: Sequence[Tensor], take: Sequence[int], axis: MeshAxis) -> list[Tensor]:
    """Piece r goes to rank r; the pieces of all ranks, of `take[r]` rows each."""
    if axis.size == 1:
        return list(pieces)
    rows = torch.cat(list(pieces))
    dtype = rows.dtype
    if dtype == torch.bool or dtype.is_complex:
        # what the backends cannot send is sent as bytes or as pairs of numbers
        rows = rows.view(torch.uint8) if dtype == torch.bool else torch.view_as_real(rows)
    found = rows.new_empty((sum(take), *rows.shape[1:]))
    if axis.group is not None:
        dist.all_to_all_single(found, rows, list(take), [len(piece) for piece in pieces], group=axis.group)
    if dtype == torch.bool or dtype.is_complex:
        found = found.view(torch.bool) if dtype == torch.bool else torch.view_as_complex(found)
    return list(found.split(list(take)))


def _periods_last(x: Tensor, dim: int, owners: Owners) -> Tensor:
    """The dim first, with its periods as a dim of their own: all periods are sent alike."""
    if owners.repeat == 1:
        return x.movedim(dim, 0)
    return x.unflatten(dim, (owners.repeat, -1)).movedim(dim + 1, 0)


def _periods_back(rows: Tensor, dim: int, owners: Owners) -> Tensor:
    if owners.repeat == 1:
        return rows.movedim(0, dim)
    return rows.movedim(0, dim + 1).flatten(dim, dim + 1)


@lru_cache(maxsize=4096)
def _route(owners: Owners, wanted: Wanted, rank: int) -> tuple[list[list[Span]], list[int], list[Span]]:
    """Own positions that go to each rank, the number of rows from each rank, and where they are to lie."""
    send = [_local(owners, rank, spans) for spans in wanted]
    take = [_total(_local(owners, other, wanted[rank])) for other in range(owners.size)]
    place = [sum(take[:other]) for other in range(owners.size)]
    order = list[Span]()
    for span in wanted[rank]:
        for length, other in owners.take(range(*span)).expanded():
            order.append((place[other], place[other] + length))
            place[other] += length
    return send, take, joined_spans(order)


@lru_cache(maxsize=4096)
def _all_local(owners: Owners, wanted: Wanted) -> bool:
    """Whether every rank has what it wants."""
    return all(_total(_local(owners, rank, spans)) == _total(spans) for rank, spans in enumerate(wanted))


def _local(owners: Owners, rank: int, spans: Spans) -> list[Span]:
    return joined_spans([own for span in spans for own in owners.own_of(rank, range(*span))])


def _total(spans: Sequence[Span]) -> int:
    return sum(stop - start for start, stop in spans)
