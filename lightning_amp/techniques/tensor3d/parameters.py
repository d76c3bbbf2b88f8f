"""A parameter of which a rank of the grid holds one part: its entries of the split dims, flat over all other axes.

    own part     the entries along dims that are split over x and y; of these a run, cut over the axes that split no dim
    gathered     the runs of those axes, when a layer reads the parameter; the backward pass gathers again
    gradient     summed over those axes, each rank keeping its run; divided by the ranks of the grid

Every entry lies on exactly one rank of the grid, so optimiser state is split alike, and norms are sums over the ranks.
The gathered part is not kept for the backward pass: `forgetting_gathered` saves where it came from.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_amp.dist.collectives import reduce_now, stacked, start_reduce_scatter
from lightning_amp.dist.redistribute import own_part
from lightning_amp.dist.sharded_tensor import ShardedTensor, part_in, wrap
from lightning_amp.dist.splits import WHOLE, MeshAxis, Splits
from lightning_amp.techniques.tensor3d.grid import Grid


class GridParameter:
    """Where the entries of a parameter lie, and how its part is read and its gradient kept.

    Args:
        parameter: It keeps its identity; `cut` gives it this rank's part.
        grid: The ranks.
        splits: Its dims that are split over x and y.

    Attributes:
        shape: Of the whole parameter.
    """

    def __init__(self, parameter: nn.Parameter, grid: Grid, splits: Splits) -> None:
        self.parameter, self.grid, self.splits = parameter, grid, splits
        self.shape = torch.Size(parameter.shape)
        self._block = splits.local_shape(self.shape)
        self._flat: list[tuple[MeshAxis, int]] = []
        n = prod(self._block)
        for axis in grid.axes:
            if splits.on(axis) is None and axis.size > 1:
                self._flat.append((axis, n))
                n = -(-n // axis.size)
        self.n_own = n

    # --- parts of whole tensors with the parameter's shape: itself, an optimiser's state ---

    def own(self, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor, flat, with zeros where a run is longer than what is there."""
        part = whole
        for axis, dim, owners in self.splits:
            part = own_part(part, dim, owners, axis.rank)
        part = part.reshape(-1)
        for axis, _ in self._flat:
            part = _padded(part, axis.size)[axis.rank]
        return part

    def join(self, own: Tensor) -> Tensor:
        """The whole tensor of all ranks' parts; a collective of the grid."""
        part = self._joined(own.detach()).view(self._block)
        return part_in(wrap(part, self.splits), WHOLE).contiguous()

    def put(self, whole: Tensor, own: Tensor) -> None:
        """Write this rank's part into a whole tensor."""
        place = self.own(torch.arange(1, prod(self.shape) + 1).view(self.shape))
        there = place > 0
        whole.view(-1)[(place[there] - 1).to(whole.device)] = own[there.to(own.device)].to(whole.dtype)

    def _joined(self, own: Tensor) -> Tensor:
        for axis, n in reversed(self._flat):
            own = stacked(own, axis).view(-1)[:n]
        return own

    # --- in a step ---

    def wrapper(self) -> ShardedTensor:
        """What stands in the module's place of the parameter during a step."""
        leaf = self.parameter

        def gathered() -> Tensor:
            return cast(Tensor, _Gathered.apply(leaf, self))  # type: ignore[no-untyped-call]

        return ShardedTensor.made_when_read(gathered, leaf, self.shape, self.splits)

    def gather(self) -> Tensor:
        """The entries of the split dims, without a gradient."""
        return self._joined(self.parameter.detach()).view(self._block)

    def keep(self, grad: Tensor) -> Callable[[], None]:
        """Begin to sum a gradient of the gathered part; the returned function adds what is this rank's to `grad`."""
        part = grad.reshape(-1) / self.grid.size
        last: Callable[[], Tensor] | None = None
        for i, (axis, _) in enumerate(self._flat):
            arrive = start_reduce_scatter(_padded(part, axis.size), axis)
            if i == len(self._flat) - 1:
                last = arrive
            else:
                part = arrive()

        def add() -> None:
            found = part if last is None else last()
            leaf = self.parameter
            leaf.grad = found.clone() if leaf.grad is None else leaf.grad.add_(found)

        return add


def _padded(flat: Tensor, size: int) -> Tensor:
    """A flat tensor as rows, one for each rank; the last ones end in zeros."""
    per = -(-flat.numel() // size)
    missing = per * size - flat.numel()
    flat = torch.cat([flat, flat.new_zeros(missing)]) if missing else flat
    return flat.view(size, per)


class _Gathered(torch.autograd.Function):
    """A parameter's part -> the entries that layers compute with. Its gradient goes to the parameter by itself, where
    it is waited for when the backward pass ends.
    """

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, of: GridParameter) -> Tensor:
        ctx.of = of
        found = CACHE.take(of)
        _remember(found, of)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        ON_THEIR_WAY.append(ctx.of.keep(grad))
        return None, None


# the weak reference keeps the address of a storage from being used again
_WHENCE: dict[int, tuple[StorageWeakRef, GridParameter]] = {}


def _remember(x: Tensor, of: GridParameter) -> None:
    for key in [key for key, (storage, _) in _WHENCE.items() if storage.expired()]:  # type: ignore[no-untyped-call]
        del _WHENCE[key]
    storage = x.untyped_storage()
    _WHENCE[storage._cdata] = StorageWeakRef(storage), of  # type: ignore[no-untyped-call]


ON_THEIR_WAY: list[Callable[[], None]] = []


class _Cache:
    """Gathered parameters."""

    def take(self, of: GridParameter) -> Tensor:
        return of.gather()


CACHE = _Cache()


@contextmanager
def forgetting_gathered() -> Iterator[None]:
    """Let autograd keep where a gathered parameter came from, instead of its values."""

    def pack(x: Tensor) -> Any:
        known = _WHENCE.get(x.untyped_storage()._cdata)
        return x if known is None else (known[1], x.shape, x.stride(), x.storage_offset())

    def unpack(kept: Any) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        of, shape, stride, offset = kept
        return CACHE.take(of).as_strided(shape, stride, offset)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def average(gradients: list[Tensor], replicas: MeshAxis) -> None:
    """Average gradients over the copies of the grid."""
    for grad in gradients:
        grad.copy_(reduce_now(grad / replicas.size, replicas))
