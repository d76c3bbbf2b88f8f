"""Define a tensor whose parts lie on several ranks and that behaves like the whole: global shapes and positions.

The part carries autograd, the wrapper does not. A call enters at `__torch_function__`, and goes down to
`__torch_dispatch__` with the keys of autograd and autocast excluded, so that an operator arrives whole and with its
schema (`aten.linear`, `aten.layer_norm`), however it was spelled. There the keys are restored, and a handler or a rule
computes on the parts. So only forward operators have handlers; backward follows from autograd of what they call.
"""

import types
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp.dist._torch import skip_one_torch_function
from lightning_amp.dist.below_autograd import STATE
from lightning_amp.dist.collectives import reduce_now
from lightning_amp.dist.owners import Owners
from lightning_amp.dist.redistribute import resplit
from lightning_amp.dist.registry import FUNCTIONS, describe, shard_error
from lightning_amp.dist.splits import AXES_OF_STEP, WHOLE, MeshAxis, Split, Splits, axis_of
from lightning_amp.errors import ShardError

Compute = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
COMPUTE: dict[str, Compute] = {}
"""What computes a "function" or an "operator" on parts; dispatch/ fills this in, for it imports this module."""


class ShardedTensor(Tensor):
    """A tensor that is sharded over ranks; this rank holds one shard.

    Attributes:
        held: This rank's part, or the tensor from which it is made when it is read.
        splits: How the tensor is split.
        whole_shape: Its global shape.
        strides: Strides of the global tensor, which determine whether an operator copies or returns a view.
        copied: Whether the values are a copy where torch would have given a view, so that writes would be lost.
        source: For such a copy, the copied tensor and its version when it was copied.
    """

    held: Tensor
    splits: Splits
    whole_shape: torch.Size
    strides: tuple[int, ...]
    copied: bool
    source: tuple[Tensor, int] | None
    _make: Callable[[], Tensor] | None

    @staticmethod
    def __new__(
        cls, local: Tensor, splits: Splits, copied: bool = False, strides: tuple[int, ...] | None = None
    ) -> "ShardedTensor":
        """Wrap a part, contiguous without strides; nothing is sent, nor are shapes of ranks compared."""
        shape = torch.Size(splits.global_shape(local.shape))
        if strides is None:
            strides = _contiguous(shape) if splits else local.stride()
        return _wrapper(local, splits, shape, strides, copied, None)

    @staticmethod
    def made_when_read(
        make: Callable[[], Tensor], held: Tensor, shape: Sequence[int], splits: Splits
    ) -> "ShardedTensor":
        """A tensor whose part is made anew each time it is read, such as a parameter that is gathered for its layer.

        Args:
            make: Returns the part, of the type and on the device of `held`, with a gradient if `held` has one.
            held: What it is made from.
            shape, splits: The global shape, and how it is split.
        """
        return _wrapper(held, splits, torch.Size(shape), _contiguous(shape), True, make)

    @property
    def local(self) -> Tensor:
        """This rank's part, with its gradient graph.

        Raises:
            ShardError: The tensor is a copy, and what it is a view of in torch has been written to since.
        """
        if self.source is not None and self.source[0]._version != self.source[1]:
            raise ShardError(
                f"a tensor of shape {describe(self)} is read after a write to the tensor that it is a view of in torch;"
                " it is a copy, which does not change. Take it after the write, or clone() it before"
            )
        return self.held if self._make is None else self._make()

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
            ShardError: A part is empty, or of another size than `sizes` says; or `sizes` is None in a dry run.
        """
        axis = axis_of(mesh)
        dim = range(local.dim())[dim]
        if sizes is None and axis.group is None:
            raise ShardError(
                "from_local was called without sizes before the fit, where the step is counted and nothing"
                " is sent; give the size of every rank's part, or use lightning_amp.as_sharded, which has"
                " them"
            )
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
        axis, dim = next(iter(self.splits)).axis, range(len(shape_of(self)))[dim]
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
        return self.held.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        # The wrapper never requires a gradient: autograd would then record each operator twice.
        self.held.requires_grad = value
        # its gradient is read as that of the whole, unlike one of a plain tensor
        self.held.is_part = True  # type: ignore[attr-defined]

    @property
    def grad_fn(self) -> Any:  # type: ignore[override]
        """Of the part."""
        return self.held.grad_fn

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        """Of the part."""
        return self.held.is_leaf

    @property
    def grad(self) -> Tensor | None:
        """A copy of the gradient, split as the tensor is."""
        if self._make is not None:
            raise ShardError(
                "the gradient of a parameter was read in a step, and this rank has a part of it; call"
                " optimizer.zero_grad(), self.clip_gradients(optimizer, ...) or trainer.strategy.gradient_norm()"
            )
        found = self.local.grad
        if found is None:
            return None
        axes = AXES_OF_STEP or [split.axis for split in self.splits]
        return ShardedTensor(true_gradient(found, self.splits, axes), self.splits, copied=True)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            raise ShardError(f"grad of a sharded tensor was set to {value!r}; allowed is None")
        # of a parameter the part that is read is another tensor each time
        self.held.grad = None

    def __copy__(self) -> "ShardedTensor":
        return ShardedTensor(copy(self.local), self.splits, self.copied, self.strides)

    @property
    def is_made_when_read(self) -> bool:
        """Whether it stands for a parameter, which it holds."""
        return self._make is not None

    def __hash__(self) -> int:
        """That of a parameter, in its place."""
        return id(self.held if self.is_made_when_read else self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedTensor(shape={shape_of(self)}, {self.splits}, dtype={self.held.dtype})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types_: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Send a call to its handler, or down to `__torch_dispatch__`."""
        handler = FUNCTIONS.get(func)
        if handler is not None:
            return handler(*args, **(kwargs or {}))
        if isinstance(func, types.FunctionType):
            # written in Python: the operators that it calls arrive here one by one
            if skip_one_torch_function is None:
                raise ShardError(f"sharded tensors require torch 2.13 or newer, found {torch.__version__}")
            return skip_one_torch_function(func, types_, args, kwargs or {})
        return COMPUTE["function"](func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types_: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute an operator on the parts, with autograd."""
        if not STATE.open:
            why = "it reached a sharded tensor below autograd, as inside a torch.func transform such as vmap"
            raise shard_error(func, args, why)
        return COMPUTE["operator"](func, args, kwargs or {})


def _wrapper(
    held: Tensor, splits: Splits, shape: torch.Size, strides: tuple[int, ...], copied: bool, make: Any
) -> ShardedTensor:
    made = Tensor._make_wrapper_subclass(ShardedTensor, shape, strides, dtype=held.dtype, device=held.device)
    made.held, made.splits, made.whole_shape, made.strides = held, splits, shape, strides
    made.copied, made.source, made._make = copied, None, make
    return made


def splits_of(x: Any) -> Splits:
    """How a tensor is split; a plain one is whole."""
    return x.splits if type(x) is ShardedTensor else WHOLE


def local_of(x: Any) -> Any:
    """The part of a sharded tensor; anything else is returned as it is."""
    return x.local if type(x) is ShardedTensor else x


def held_by(x: Tensor) -> Tensor:
    """A tensor of the type of a part, and with its memory where it is kept; nothing is gathered for it."""
    return x.held if type(x) is ShardedTensor else x


def shape_of(x: Tensor) -> torch.Size:
    """The global shape, without a call to torch's functions of sharded tensors."""
    return x.whole_shape if type(x) is ShardedTensor else x.shape


def copy_of(x: Tensor, copy: Tensor) -> Tensor:
    """A copy of a tensor that is a view of it in torch, or a view of such a copy; it is not read after a write."""
    if type(copy) is ShardedTensor and copy.copied:
        held = held_by(x)
        if type(x) is ShardedTensor and x.copied:
            copy.source = x.source
        elif not held.is_inference():
            # memory of inference mode counts no writes
            copy.source = held, held._version
    return copy


def meta_of(x: Tensor) -> Tensor:
    """The whole without values, with its strides."""
    strides = x.strides if type(x) is ShardedTensor else x.stride()
    return torch.empty_strided(shape_of(x), strides, dtype=held_by(x).dtype, device="meta")


def dense_like(x: Tensor) -> tuple[int, ...]:
    """Strides of the whole without gaps, with its dims in the order in memory of the part."""
    shape, own = shape_of(x), held_by(x).stride()
    order = sorted(range(len(shape)), key=lambda d: -own[d])
    found = dict(zip(order, _contiguous([shape[d] for d in order]), strict=True))
    return tuple(found[d] for d in range(len(shape)))


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    found, step = list[int](), 1
    for n in reversed(shape):
        found.append(step)
        step *= max(n, 1)
    return tuple(reversed(found))


def dim_of(x: Tensor, dim: int) -> int:
    """A dim as a number from 0 on, or an IndexError."""
    return range(len(shape_of(x)))[dim]


def wrap(local: Tensor, splits: Splits, copied: bool = False, strides: tuple[int, ...] | None = None) -> Tensor:
    """A tensor of a part; a plain one where it is whole, unless writes to it have to be refused."""
    return ShardedTensor(local, splits, copied, strides) if splits or copied else local


def axes_in(*tensors: Tensor) -> list[MeshAxis]:
    """The axes that some tensors are split over, in the order of their names."""
    return sorted({s.axis for t in tensors for s in splits_of(t)}, key=lambda axis: axis.name)


def true_gradient(found: Tensor, splits: Splits, axes: Iterable[MeshAxis]) -> Tensor:
    """The gradient of a tensor with some splits, of which autograd has found `found`; a collective.

    Every rank differentiates its copy of the loss: a part has R times its gradient, and what the ranks find of a tensor
    that all of them have adds up to R times the gradient.
    """
    # Ranks of one axis have one place on all others, and so the same entries of what is split over these.
    for axis in axes:
        found = (found if splits.on(axis) else reduce_now(found, axis)) / axis.size
    return found


def part_in(x: Tensor, splits: Splits) -> Tensor:
    """This rank's part of a sharded or plain tensor under some splits."""
    return resplit(local_of(x), splits_of(x), splits)


def redistribute(x: Tensor, splits: Splits) -> Tensor:
    """A tensor with other splits."""
    return wrap(part_in(x, splits), splits)


def in_order(x: Tensor, dim: int) -> Tensor:
    """A tensor whose parts of a dim are ranges in the order of the ranks, if the dim is split."""
    split = splits_of(x).at(dim)
    if split is None or split.owners.sizes is not None:
        return x
    ordered = split._replace(owners=Owners.contiguous(split.owners.counts))
    return redistribute(x, splits_of(x).replaced(split.axis, ordered))


def computed_in(x: Tensor) -> Tensor:
    """A part in the type in which autocast computes products, for operators that autocast does not see."""
    kind = x.device.type
    known = torch.amp.is_autocast_available(kind)
    casts = known and torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(kind)) if casts else x


def is_view(part: Tensor, of: Tensor) -> bool:
    """Whether a part shares its memory with another tensor, so that writes to it are writes to the other."""
    return part is of or part.untyped_storage()._cdata == of.untyped_storage()._cdata
