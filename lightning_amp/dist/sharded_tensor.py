"""A tensor whose parts lie on several ranks; code that uses it sees the whole: global shapes, global positions.

The part carries autograd, the wrapper does not. A call enters at `__torch_function__`, and goes down to
`__torch_dispatch__` with the keys of autograd and autocast excluded, so that an operator arrives whole and with its
schema (`aten.linear`, `aten.layer_norm`), however it was spelled. There the keys are restored, and a handler or a rule
computes on the parts. So only forward operators have handlers; backward follows from autograd of what they call.
"""

import types
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp.dist._torch import disable_torch_function, skip_one_torch_function
from lightning_amp.dist.below_autograd import STATE, above_autograd, below_autograd
from lightning_amp.dist.owners import Owners
from lightning_amp.dist.redistribute import resplit
from lightning_amp.dist.registry import FUNCTIONS, POINTWISE, shard_error
from lightning_amp.dist.splits import WHOLE, MeshAxis, Split, Splits, axis_of
from lightning_amp.errors import ShardError

Dispatch = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
DISPATCH: list[Dispatch] = []
"""What computes an operator on parts; dispatch.py puts it here, for it needs this module."""


class ShardedTensor(Tensor):
    """A tensor of which this rank holds a part.

    Attributes:
        splits: How the tensor is split.
        copied: Whether the values are a copy where torch would have given a view, so that writes would be lost.
    """

    splits: Splits
    copied: bool
    _local: Tensor | Callable[[], Tensor]
    _like: Tensor

    @staticmethod
    def __new__(cls, local: Tensor, splits: Splits, copied: bool = False) -> "ShardedTensor":
        """Wrap a part; nothing is sent, and its shape is not compared with other ranks'."""
        shape = splits.global_shape(local.shape)
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        made._local = made._like = local
        made.splits, made.copied = splits, copied
        return made

    @staticmethod
    def made_when_read(
        part: Callable[[], Tensor], like: Tensor, shape: Sequence[int], splits: Splits
    ) -> "ShardedTensor":
        """A tensor whose part is made anew each time it is read, such as a parameter that is gathered for its layer.

        Args:
            part: Makes the part.
            like: A tensor of its type and device.
            shape: The global shape.
            splits: How it is split.
        """
        made = Tensor._make_wrapper_subclass(ShardedTensor, shape, dtype=like.dtype, device=like.device)
        made._local, made._like = part, like
        made.splits, made.copied = splits, True
        return made

    @property
    def local(self) -> Tensor:
        """This rank's part, with its gradient graph."""
        return self._local if isinstance(self._local, Tensor) else self._local()

    def __init__(self, local: Tensor, splits: Splits, copied: bool = False) -> None:
        pass

    @staticmethod
    def from_local(
        local: Tensor, mesh: DeviceMesh | MeshAxis, *, dim: int, sizes: Sequence[int] | None = None
    ) -> "ShardedTensor":
        """A tensor of the parts that the ranks hold, end to end along a dim.

        Args:
            local: This rank's part.
            mesh: The ranks, as a mesh of one axis, such as `trainer.strategy.mesh["model"]`.
            dim: The dim along which the parts follow one another.
            sizes: Sizes of all ranks' parts there; None asks the ranks, a collective of a few bytes.

        Raises:
            ShardError: A part is empty, or of another size than `sizes` says.
        """
        axis = axis_of(mesh)
        dim %= local.dim()
        if sizes is None:
            found: list[Any] = [None] * axis.size
            dist.all_gather_object(found, local.shape[dim], group=axis.group)
            sizes = found
        if len(sizes) != axis.size or min(sizes) < 1 or sizes[axis.rank] != local.shape[dim]:
            raise ShardError(
                f"from_local(sizes={list(sizes)!r}) for {axis.size} ranks, of which rank {axis.rank} has a part of size"
                f" {local.shape[dim]} along dim {dim}; give the size of every rank's part, each at least 1"
            )
        return ShardedTensor(local, Splits.of([Split(axis, dim, Owners.contiguous(sizes))]))

    def to_local(self) -> Tensor:
        """This rank's part."""
        return self.local

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Names of the tensors that it holds, for what counts bytes."""
        return ["local"], None

    def full_tensor(self) -> Tensor:
        """The whole tensor on every rank; a collective, with gradients."""
        return part_in(self, WHOLE)

    def redistribute(self, *, dim: int, sizes: Sequence[int] | None = None) -> "ShardedTensor":
        """The tensor split along a dim, in parts of some sizes, evenly where none are given; a collective.

        Raises:
            ShardError: The tensor is split over several axes, or the sizes are not those of parts of the dim.
        """
        if len(self.splits) != 1:
            raise ShardError(f"redistribute of a tensor with {self.splits}; allowed is one mesh axis")
        axis, dim = self.splits[0].axis, dim % len(shape_of(self))
        n = shape_of(self)[dim]
        owners = Owners.even(n, axis.size) if sizes is None else Owners.contiguous(sizes)
        if owners.n != n or owners.size != axis.size or min(owners.counts) < 1:
            raise ShardError(
                f"redistribute(dim={dim}, sizes={sizes!r}) of shape {shape_of(self)!r} over {axis.size} ranks; give one"
                f" size per rank, each at least 1, that add up to {n}"
            )
        return cast(ShardedTensor, redistribute(self, Splits.of([Split(axis, dim, owners)])))

    @property
    def requires_grad(self) -> bool:
        """Of the part."""
        return self._like.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.local.requires_grad = value

    @property
    def grad_fn(self) -> Any:  # type: ignore[override]
        """Of the part."""
        return self._like.grad_fn

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        """Of the part."""
        return self._like.is_leaf

    @property
    def grad(self) -> Tensor | None:
        """The gradient of the part, split as the tensor is: the sum of the gradients of all ranks' losses."""
        return None if self.local.grad is None else ShardedTensor(self.local.grad, self.splits)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.local.grad = local_of(value)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedTensor(shape={shape_of(self)}, {self.splits}, dtype={self.local.dtype})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types_: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Send a call to its handler, or down to `__torch_dispatch__`."""
        if func in POINTWISE and not kwargs:
            found = _elementwise(func, args)
            if found is not None:
                return found
        handler = FUNCTIONS.get(func)
        if handler is not None:
            return handler(*args, **(kwargs or {}))
        if isinstance(func, types.FunctionType):
            # written in Python: the operators that it calls arrive here one by one
            return skip_one_torch_function(func, types_, args, kwargs or {})
        return below_autograd(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types_: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute an operator on the parts, with autograd."""
        if not STATE.keys:
            raise shard_error(
                func, args, "it reached a sharded tensor below autograd, not through torch's functions"
            )
        with above_autograd():
            return DISPATCH[0](func, args, kwargs or {})


def _elementwise(func: Any, args: tuple[Any, ...]) -> Tensor | None:
    """The fast path: an elementwise function of tensors that are split alike; None where they are not."""
    splits, shape, parts = None, None, []
    for arg in args:
        if type(arg) is ShardedTensor:
            if splits is None:
                splits, shape = arg.splits, arg.local.shape
            elif arg.splits is not splits or arg.local.shape != shape:
                return None
            parts.append(arg.local)
        elif isinstance(arg, Tensor):
            return None
        else:
            parts.append(arg)
    return ShardedTensor(func(*parts), cast(Splits, splits))


def splits_of(x: Any) -> Splits:
    """How a tensor is split; a plain one is whole."""
    return x.splits if type(x) is ShardedTensor else WHOLE


def local_of(x: Any) -> Any:
    """The part of a sharded tensor; anything else is returned as it is."""
    return x.local if type(x) is ShardedTensor else x


def shape_of(x: Tensor) -> tuple[int, ...]:
    """The global shape, without a call to torch's functions of sharded tensors."""
    if type(x) is ShardedTensor:
        with disable_torch_function():
            return tuple(x.shape)
    return tuple(x.shape)


def wrap(local: Tensor, splits: Splits, copied: bool = False) -> Tensor:
    """A tensor of a part; a plain one where it is whole, unless writes to it have to be refused."""
    return ShardedTensor(local, splits, copied) if splits or copied else local


def part_in(x: Tensor, splits: Splits) -> Tensor:
    """This rank's part of a sharded or plain tensor under some splits."""
    return resplit(local_of(x), splits_of(x), splits)


def redistribute(x: Tensor, splits: Splits) -> Tensor:
    """A tensor with other splits."""
    return wrap(part_in(x, splits), splits)


def settled(local: Tensor, splits: Splits, copied: bool = False) -> Tensor:
    """A tensor of a part whose splits may leave ranks without an index, which no handler has to expect.

    Where there are enough indices they are split evenly, else every rank has the whole of the dim.
    """
    for split in splits:
        axis, dim, owners = split
        if min(owners.period_counts) > 0:
            continue
        want = Split(axis, dim, Owners.even(owners.n, axis.size)) if owners.n >= axis.size else None
        goal, copied = splits.replaced(axis, want), True
        local, splits = resplit(local, splits, goal), goal
    return wrap(local, splits, copied)


def in_order(x: Tensor, dim: int) -> Tensor:
    """A tensor whose parts of a dim are ranges in the order of the ranks, if the dim is split."""
    split = splits_of(x).at(dim)
    if split is None or split.owners.sizes is not None:
        return x
    ordered = split._replace(owners=Owners.contiguous(split.owners.counts))
    return redistribute(x, splits_of(x).replaced(split.axis, ordered))


def is_view(part: Tensor, of: Tensor) -> bool:
    """Whether a part shares its memory with another tensor, so that writes to it are writes to the other."""
    return part is of or (part._base is not None and part._base is (of if of._base is None else of._base))
