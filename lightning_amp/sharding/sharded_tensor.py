"""Define ShardedTensor: each rank holds one shard, and shapes and indices are those of the global tensor.

Autograd follows the local shard, not the wrapper. A call enters `__torch_function__`, which excludes the dispatch keys
of autograd and autocast. The operator therefore reaches `__torch_dispatch__` undecomposed and with its schema
(`aten.linear`, `aten.layer_norm`), whichever Python function was called. There the keys are restored, and a handler or
a rule computes on the shards. Only forward operators need handlers, because autograd differentiates what they call.
"""

import types
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp.errors import ShardError
from lightning_amp.sharding._torch import skip_one_torch_function
from lightning_amp.sharding.below_autograd import STATE
from lightning_amp.sharding.collectives import reduce_now
from lightning_amp.sharding.owners import Owners
from lightning_amp.sharding.redistribute import resplit
from lightning_amp.sharding.registry import FUNCTIONS, describe, shard_error
from lightning_amp.sharding.splits import AXES_OF_STEP, WHOLE, MeshAxis, Split, Splits, axis_of

Compute = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
COMPUTE: dict[str, Compute] = {}
"""Functions that compute a "function" or an "operator" on shards; set by dispatch/, which imports this module."""


class ShardedTensor(Tensor):
    """A tensor that is sharded over ranks; this rank holds one shard.

    Attributes:
        held: Local shard, or the tensor from which it is made at each access.
        splits: Sharded dims with their mesh axes and owners.
        whole_shape: Global shape.
        strides: Strides of the global tensor, which determine whether an operator copies or returns a view.
        copied: Whether the tensor is a copy where torch returns a view, so that writes would be lost.
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
        """Wrap a local shard, contiguous without `strides`; no communication, and no check of shapes across ranks."""
        shape = torch.Size(splits.global_shape(local.shape))
        if strides is None:
            strides = _contiguous(shape) if splits else local.stride()
        return _wrapper(local, splits, shape, strides, copied, None)

    @staticmethod
    def made_when_read(
        make: Callable[[], Tensor], held: Tensor, shape: Sequence[int], splits: Splits
    ) -> "ShardedTensor":
        """Return a tensor whose shard is made at each access, such as a parameter that is gathered for its layer.

        Args:
            make: Returns the shard, with the dtype and device of `held`, and with a gradient if `held` requires one.
            held: Tensor from which the shard is made.
            shape, splits: Global shape, and splits.
        """
        return _wrapper(held, splits, torch.Size(shape), _contiguous(shape), True, make)

    @property
    def local(self) -> Tensor:
        """Local shard, with its autograd graph.

        Raises:
            ShardError: The tensor is a copy (a view in torch) of a tensor that was written to afterwards.
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
        """Return the tensor that concatenates the local shards of all ranks along a dim.

        Args:
            local: Local shard.
            mesh: One-dimensional mesh, such as `trainer.strategy.mesh["model"]`.
            dim: Sharded dim.
            sizes: Sizes of all ranks' shards along the dim; None exchanges them, a collective of a few bytes.

        Raises:
            ShardError: A shard is empty, or its size is not that in `sizes`; or `sizes` is None in a dry run.
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
        """Return the local shard."""
        return self.local

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Return the names of inner tensors, for code that counts bytes."""
        return ["local"], None

    def full_tensor(self) -> Tensor:
        """Return the full tensor on every rank; a collective, with gradients."""
        return part_in(self, WHOLE)

    def redistribute(self, *, dim: int, sizes: Sequence[int] | None = None) -> "ShardedTensor":
        """Return the tensor sharded along `dim`, in shards of `sizes` or evenly; a collective.

        Raises:
            ShardError: The tensor is sharded over several axes, or `sizes` do not fit the dim.
        """
        if len(self.splits) != 1:
            raise ShardError(
                f"redistribute of a tensor with {self.splits} is not supported; allowed is one mesh axis: take"
                " full_tensor() first"
            )
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
        """Whether the local shard requires a gradient."""
        return self.held.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        # The wrapper never requires a gradient: autograd would then record each operator twice.
        self.held.requires_grad = value
        # marks the shard, because its gradient is read as that of a sharded tensor
        self.held.is_part = True  # type: ignore[attr-defined]

    @property
    def grad_fn(self) -> Any:  # type: ignore[override]
        """Autograd node of the local shard."""
        return self.held.grad_fn

    @property
    def is_leaf(self) -> bool:  # type: ignore[override]
        """Whether the local shard is a leaf."""
        return self.held.is_leaf

    @property
    def grad(self) -> Tensor | None:
        """Copy of the gradient, sharded as the tensor is."""
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
        # on `held`: a parameter's local shard is another tensor at each access
        self.held.grad = None

    def __copy__(self) -> "ShardedTensor":
        return ShardedTensor(copy(self.local), self.splits, self.copied, self.strides)

    @property
    def is_made_when_read(self) -> bool:
        """Whether this tensor replaces a parameter, which is `held`."""
        return self._make is not None

    def __hash__(self) -> int:
        """Return the hash of the parameter that this tensor replaces, else its own."""
        return id(self.held if self.is_made_when_read else self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ShardedTensor(shape={shape_of(self)}, {self.splits}, dtype={self.held.dtype})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types_: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the handler of a function, or continue to `__torch_dispatch__`."""
        handler = FUNCTIONS.get(func)
        if handler is not None:
            return handler(*args, **(kwargs or {}))
        if isinstance(func, types.FunctionType):
            # a Python function: the operators that it calls arrive here one by one
            if skip_one_torch_function is None:
                raise ShardError(
                    f"sharded tensors require torch 2.13 or newer, found {torch.__version__}; install a newer torch"
                )
            return skip_one_torch_function(func, types_, args, kwargs or {})
        return COMPUTE["function"](func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types_: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Compute an operator on the shards, with autograd."""
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
    """Return the splits of a tensor; a plain tensor is replicated."""
    return x.splits if type(x) is ShardedTensor else WHOLE


def local_of(x: Any) -> Any:
    """Return the local shard of a sharded tensor, and any other value unchanged."""
    return x.local if type(x) is ShardedTensor else x


def held_by(x: Tensor) -> Tensor:
    """Return a tensor with the dtype and device of the local shard, and its memory if it is stored; gathers nothing."""
    return x.held if type(x) is ShardedTensor else x


def shape_of(x: Tensor) -> torch.Size:
    """Return the global shape, without a call of torch functions."""
    return x.whole_shape if type(x) is ShardedTensor else x.shape


def copy_of(x: Tensor, copy: Tensor) -> Tensor:
    """Mark a copy of a tensor that is a view in torch: reading it after a write to the tensor raises an error."""
    if type(copy) is ShardedTensor and copy.copied:
        held = held_by(x)
        if type(x) is ShardedTensor and x.copied:
            copy.source = x.source
        elif not held.is_inference():
            # inference tensors have no version counter
            copy.source = held, held._version
    return copy


def meta_of(x: Tensor) -> Tensor:
    """Return the global tensor on the meta device, with its strides."""
    strides = x.strides if type(x) is ShardedTensor else x.stride()
    return torch.empty_strided(shape_of(x), strides, dtype=held_by(x).dtype, device="meta")


def dense_like(x: Tensor) -> tuple[int, ...]:
    """Return dense strides of the global tensor, with its dims in the memory order of the local shard."""
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
    """Return a dim as a non-negative number, or raise an IndexError."""
    return range(len(shape_of(x)))[dim]


def wrap(local: Tensor, splits: Splits, copied: bool = False, strides: tuple[int, ...] | None = None) -> Tensor:
    """Wrap a local shard; return a replicated one as a plain tensor, unless writes to it must raise an error."""
    return ShardedTensor(local, splits, copied, strides) if splits or copied else local


def axes_in(*tensors: Tensor) -> list[MeshAxis]:
    """Return the axes over which some tensors are sharded, sorted by name."""
    return sorted({s.axis for t in tensors for s in splits_of(t)}, key=lambda axis: axis.name)


def true_gradient(found: Tensor, splits: Splits, axes: Iterable[MeshAxis]) -> Tensor:
    """Return the gradient of a tensor from the gradient `found` of autograd; a collective.

    Every rank differentiates its copy of the loss. Gradients of a shard are therefore R times too large, and the ranks'
    gradients of a replicated tensor sum to R times its gradient.
    """
    # Ranks of one axis have the same coordinates on all other axes, and therefore the same shards over these.
    for axis in axes:
        found = (found if splits.on(axis) else reduce_now(found, axis)) / axis.size
    return found


def part_in(x: Tensor, splits: Splits) -> Tensor:
    """Return the local shard of a sharded or plain tensor under other splits."""
    return resplit(local_of(x), splits_of(x), splits)


def redistribute(x: Tensor, splits: Splits) -> Tensor:
    """Return the tensor with other splits."""
    return wrap(part_in(x, splits), splits)


def in_order(x: Tensor, dim: int) -> Tensor:
    """Return the tensor with shards of a dim that are contiguous and in the order of the ranks."""
    split = splits_of(x).at(dim)
    if split is None or split.owners.sizes is not None:
        return x
    ordered = split._replace(owners=Owners.contiguous(split.owners.counts))
    return redistribute(x, splits_of(x).replaced(split.axis, ordered))


def computed_in(x: Tensor) -> Tensor:
    """Cast a shard to the autocast dtype, for operators to which autocast does not apply."""
    kind = x.device.type
    known = torch.amp.is_autocast_available(kind)
    casts = known and torch.is_autocast_enabled(kind) and x.is_floating_point() and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(kind)) if casts else x


def is_view(part: Tensor, of: Tensor) -> bool:
    """Whether a shard shares memory with another tensor, so that writes to one change the other."""
    return part is of or part.untyped_storage()._cdata == of.untyped_storage()._cdata
