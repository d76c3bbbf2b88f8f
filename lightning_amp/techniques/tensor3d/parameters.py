"""Define a parameter that is sharded over a grid of ranks: each rank holds a flat run of its entries.

    shard        the entries along dims that are split over x and y; of these a run, cut over the axes that split no dim
    gathered     the runs of those axes, when a layer reads the parameter; the backward pass gathers them again
    gradient     reduce-scattered over those axes, divided by the number of ranks of the grid

Every entry lies on exactly one rank of the grid, so optimiser state is sharded too, and norms are sums over the ranks.
Gathered values are not kept for the backward pass: `forgetting_gathered` saves a reference to the parameter instead.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from math import prod
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_amp._torch import top_saving_hooks
from lightning_amp.errors import ModelError
from lightning_amp.sharding.collectives import stacked, start_adding_rows, start_stacked
from lightning_amp.sharding.redistribute import own_part
from lightning_amp.sharding.sharded_tensor import ShardedTensor, part_in, wrap
from lightning_amp.sharding.splits import WHOLE, MeshAxis, Splits, record
from lightning_amp.techniques.tensor3d.grid import Grid
from lightning_amp.techniques.tensor3d.in_step import InStep

Place = tuple[int, ...]


def run_boxes(start: int, stop: int, shape: Sequence[int]) -> Iterator[tuple[Place, Place]]:
    """Yield offsets and sizes of the boxes that a run of a flat tensor consists of, in order."""
    if start >= stop:
        return
    if len(shape) < 2:
        yield ((start,), (stop - start,)) if shape else ((), ())
        return
    inner = prod(shape[1:])
    first, last = -(-start // inner), stop // inner
    # the end of a row, full rows, the start of a row
    if first > last:
        ends = [(last, start - last * inner, stop - last * inner)]
    else:
        ends = [(first - 1, start - (first - 1) * inner, inner)] if start < first * inner else []
    for row, low, high in ends:
        yield from (((row, *o), (1, *s)) for o, s in run_boxes(low, high, shape[1:]))
    if first < last:
        yield (first, *[0] * (len(shape) - 1)), (last - first, *shape[1:])
    if first <= last:
        yield from (((last, *o), (1, *s)) for o, s in run_boxes(0, stop - last * inner, shape[1:]))


def _runs(splits: Splits, dim: int, start: int, n: int) -> list[tuple[int, int, int]]:
    """Split n of this rank's indices of a dim into runs: start in the full dim, start among the n, and length."""
    split = splits.at(dim)
    if split is None:
        return [(start, 0, n)]
    found, before = list[tuple[int, int, int]](), -start
    for span in split.owners.spans[split.axis.rank]:
        low, high = max(before, 0), min(before + len(span), n)
        if low < high:
            found.append((span.start + low - before, low, high - low))
        before += len(span)
    return found


class GridParameter:
    """Location of a parameter's entries, and how its shard is gathered and its gradient reduced.

    Args:
        parameter: Stays the same object; `cut` replaces its values by this rank's shard.
        grid: The ranks.
        splits: Its dims that are split over x and y.
        name: Its name in the module.
        in_step: State that is shared with the other parameters.

    Attributes:
        shape: Shape of the full parameter.
        is_cut: Whether the parameter has this rank's shard as its values.
        most_bytes: Bytes of the entries of the split dims, on the rank that has most of them.
        is_forgotten: Whether autograd saves a reference instead of gathered values. For a dim of size 1, torch may
            save a view where it saves a copy for a longer dim. If only some ranks have one entry of a dim, some would
            gather again and others would not, so the values are kept.
    """

    technique = "tensor3d"

    def __init__(
        self, parameter: nn.Parameter, grid: Grid, splits: Splits, *, name: str = "", in_step: InStep | None = None
    ) -> None:
        self.parameter, self.grid, self.splits = parameter, grid, splits
        self.name, self.in_step, self.is_cut = name, in_step or InStep(), False
        self.shape = torch.Size(parameter.shape)
        self._block = splits.local_shape(self.shape)
        self._flat: list[tuple[MeshAxis, int]] = []
        n = prod(self._block)
        # Each axis that splits no dim cuts the run of the axis before. Lengths are rounded up, so that all ranks of an
        # axis send equally many entries, with padding at the end.
        for axis in grid.axes:
            if splits.on(axis) is None and axis.size > 1:
                self._flat.append((axis, n))
                n = -(-n // axis.size)
        most = list(self.shape)
        for _, dim, owners in splits:
            most[dim] = max(owners.counts)
        self.most_bytes = prod(most) * parameter.element_size()
        self.is_forgotten = not any(min(o.counts) == 1 < max(o.counts) for _, _, o in splits)
        self.in_step.largest_bytes = max(self.in_step.largest_bytes, self.most_bytes)

    @property
    def mesh(self) -> DeviceMesh:
        """All ranks of the grid, each of which has different entries."""
        return cast(DeviceMesh, self.grid.block)

    def cut(self) -> None:
        """Replace the parameter's values by this rank's shard."""
        self.parameter.data = self.own(self.parameter.data).clone()
        self.is_cut = True

    # --- parts of whole tensors with the parameter's shape: itself, an optimiser's state ---

    def own(self, whole: Tensor) -> Tensor:
        """Return this rank's shard of a full tensor, flat, padded with zeros."""
        part = whole
        for axis, dim, owners in self.splits:
            part = own_part(part, dim, owners, axis.rank)
        part = part.reshape(-1)
        for axis, _ in self._flat:
            part = _padded(part, axis.size)[axis.rank]
        return part

    def join(self, own: Tensor) -> Tensor:
        """Gather the full tensor from all ranks' shards; a collective of the grid."""
        part = self._start_joining(own.detach())()
        return part_in(wrap(part, self.splits), WHOLE).contiguous()

    def boxes(self, own: Tensor) -> Iterator[tuple[Place, Tensor]]:
        """Yield boxes of adjacent entries of this rank's shard: offsets in the full tensor, and views of them."""
        start, stop, n = 0, prod(self._block), prod(self._block)
        for axis, _ in self._flat:
            n = -(-n // axis.size)
            start += axis.rank * n
            stop = min(stop, start + n)
        # entries after `stop` are padding
        at = 0
        for starts, sizes in run_boxes(start, stop, self._block):
            values = own[at : at + prod(sizes)].view(sizes)
            at += prod(sizes)
            # adjacent entries of the shard may not be adjacent in the full tensor, along every split dim
            dims = [_runs(self.splits, d, first, n) for d, (first, n) in enumerate(zip(starts, sizes, strict=True))]
            for pieces in product(*dims):
                box = values
                for d, (_, first, length) in enumerate(pieces):
                    box = box.narrow(d, first, length)
                yield tuple(place for place, _, _ in pieces), box

    # --- in a step ---

    def wrapper(self) -> ShardedTensor:
        """Return the sharded tensor that replaces the parameter in the module during a step."""
        leaf = self.parameter

        def gathered() -> Tensor:
            found = cast(Tensor, _Gathered.apply(leaf, self))  # type: ignore[no-untyped-call]
            found.add_up_later = partial(self.in_step.add_up_later, self)  # type: ignore[attr-defined]
            return found

        made = ShardedTensor.made_when_read(gathered, leaf, self.shape, self.splits)
        # for isinstance(x, nn.Parameter)
        made._is_param = True
        return made

    def gather(self) -> Tensor:
        """Gather the entries of the split dims, without a gradient."""
        return self.in_step.gather(self) if self._flat else self.parameter.detach().view(self._block)

    def start_gather(self) -> Callable[[], Tensor]:
        """Start to gather these entries; returns a function that waits for them."""
        return self._start_joining(self.parameter.detach())

    def _start_joining(self, own: Tensor) -> Callable[[], Tensor]:
        (axis, n), *others = self._flat[::-1] or [(self.grid.x, own.numel())]
        arrive = start_stacked(own, axis) if self._flat else lambda: own

        def joined() -> Tensor:
            found = arrive().view(-1)[:n]
            for other, m in others:
                found = stacked(found, other).view(-1)[:m]
            return found.view(self._block)

        return joined

    def start_sum(self, grad: Tensor, *, fresh: bool = False) -> Callable[[], Tensor]:
        """Start to reduce-scatter a gathered parameter's gradient; returns a function that waits for this rank's run.

        The gradient may be changed if it is `fresh`.
        """
        # not in place: autograd may pass one gradient tensor to several functions
        part = grad.reshape(-1).div_(self.grid.size) if fresh else grad.reshape(-1) / self.grid.size
        for i, (axis, _) in enumerate(self._flat):
            rows = _padded(part, axis.size)
            record(axis, "reduce_scatter", rows.nbytes)
            arrive = start_adding_rows(rows, axis.group)
            if i == len(self._flat) - 1:
                return arrive
            part = arrive()
        return lambda: part

    def zeros(self) -> Tensor:
        """Return a zero gradient of the gathered entries."""
        return self.parameter.new_zeros(self._block)


def _padded(flat: Tensor, size: int) -> Tensor:
    """Reshape a flat tensor to one row per rank, padded with zeros."""
    per = -(-flat.numel() // size)
    missing = per * size - flat.numel()
    flat = torch.cat([flat, flat.new_zeros(missing)]) if missing else flat
    return flat.view(size, per)


class _Gathered(torch.autograd.Function):
    """Gather a parameter's shard to the entries that layers compute with.

    Its gradient is reduced asynchronously, and added to the parameter when the backward pass ends.
    """

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, of: GridParameter) -> Tensor:
        ctx.of = of
        # a layer that defers its weight gradient returns none
        ctx.set_materialize_grads(False)
        found = of.gather()
        _remember(found, of)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, None]:
        if grad is not None:
            ctx.of.in_step.add_up(ctx.of, grad)
        return None, None


# the weak reference prevents the address of a storage from being reused
_WHENCE: dict[int, tuple[StorageWeakRef, GridParameter]] = {}


def _remember(x: Tensor, of: GridParameter) -> None:
    for key in [key for key, (storage, _) in _WHENCE.items() if storage.expired()]:  # type: ignore[no-untyped-call]
        del _WHENCE[key]
    storage = x.untyped_storage()
    _WHENCE[storage._cdata] = StorageWeakRef(storage), of  # type: ignore[no-untyped-call]


@contextmanager
def forgetting_gathered() -> Iterator[None]:
    """Context manager: autograd saves a reference to a gathered parameter instead of its values.

    Other tensors go to the hooks around it, as those of a technique that moves what autograd saves.
    """
    keep, give = top_saving_hooks(False) or (Tensor.detach, lambda x: x)

    def pack(x: Tensor) -> Callable[[], Tensor]:
        # saved by a checkpoint, which needs the node in its part to compute its block again
        if type(x) is ShardedTensor:
            return lambda: x
        known = _WHENCE.get(x.untyped_storage()._cdata)
        if known is None:
            # without its node: one that saves its own result would never be freed without a backward pass through it
            return partial(give, keep(x))
        # complex views, and views of imaginary parts, are not described by strides alone
        if not known[1].is_forgotten or x.dtype != known[1].parameter.dtype or x.is_neg():
            return partial(Tensor.detach, x.detach())
        return partial(_again, known[1], known[1].parameter._version, x.shape, x.stride(), int(x.storage_offset()))

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept()):
        yield


def _again(of: GridParameter, version: int, shape: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
    """Gather a parameter again, and return the view of it that autograd saved."""
    if of.parameter._version != version:
        raise ModelError(
            f"under tensor3d the parameter {of.name!r} was changed between the forward pass that reads it and the"
            " backward pass, which would read other values; change it after the backward pass"
        )
    return of.gather().as_strided(shape, stride, offset)
