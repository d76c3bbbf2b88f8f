"""Run repeated operators on fake tensors quickly, by reusing the result metadata of the first one.

A training step has the same operators on the same shapes once per layer, and again in its second run. torch's own cache
of results takes several times as long to describe an operator's arguments, for it serves symbolic shapes too.

An operator is looked up only where its result follows from its arguments' layouts, dtypes and devices: one of aten,
without tensors that have values, and whose result is an argument, a view of one or new memory that it fills. All else
is left to torch.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_amp._torch import (
    CTC_LOSS,
    GROUPED_MM,
    IS_ALL_TRUE,
    RNN_ON_CPU,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    as_meta,
    fake_like,
    tree_leaves,
)
from lightning_amp.footprint.copies.known_values import computed, note
from lightning_amp.footprint.target_device import launches_operators

_OF_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
"""Tags of operators whose results follow from values, or that change the layout of an argument."""


class _Made(NamedTuple):
    """How a result is made anew: of new memory, or as a view of the argument at a place, so many bytes after it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    view_of: int | None = None
    n_bytes: int = 0


_Found = int | _Made | list[_Made] | tuple[_Made, ...] | str | None
"""The place of the argument that is the result, how one or several are made, NOTHING, or None: left to torch."""
NOTHING = "nothing"
_known: dict[Any, _Found] = {}
"""Of all modes, by an operator and its arguments: a step is counted several times while it is planned."""
MOST = 100_000
"""Entries before it is emptied."""
MOST_LEFT = 2**26
"""Bytes that a kernel may leave when it is run to see how many."""


class QuickFakes(FakeTensorMode):  # type: ignore[no-untyped-call]
    """A FakeTensorMode for one step or one graph, in which operators may have other tensors as arguments too.

    Args:
        valid: Whether the checks of `torch.distributions` pass, no value exceeds the bins that `torch.bincount` is
            given, and code may read values that are known without data. A step that is counted passes such checks, or
            the run ends with their error; a graph that is captured would lose them, and the branch on a buffer.
    """

    def __init__(self, *, valid: bool = False) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.valid = valid
        self._looked_up: dict[Any, bool] = {}
        self._by_offset: dict[Any, bool] = {}
        self._alike: dict[torch.device, dict[str, Any]] = {}
        if len(_known) > MOST:
            _known.clear()

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The result of an operator."""
        kwargs = kwargs or {}
        if not self.valid:
            return self._dispatch(func, types, args, kwargs)
        if not self._may_look_up(func) and torch.Tag.data_dependent_output in getattr(func, "tags", ()):
            value = computed(func, args, kwargs)
            if value is not None:
                return value
        result = self._dispatch(func, types, args, kwargs)
        if isinstance(func, OpOverload):
            note(func, args, kwargs, result)
        return result

    def _dispatch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if self.valid and func is IS_ALL_TRUE:
            result: Any = super().dispatch(func, types, args, kwargs)
            # of a fake tensor with a constant, bool() is that of the constant
            result.constant = torch.ones((), dtype=torch.bool)
            return result
        if self.valid and func is torch.ops.aten.bincount.default:
            bins = kwargs.get("minlength", args[2] if len(args) > 2 else 0)
            weights = kwargs.get("weights", args[1] if len(args) > 1 else None)
            if bins:
                # as many as are given, as by torchmetrics; without a number they are as many as the largest value
                dtype = torch.int64
                if weights is not None:
                    dtype = torch.float32 if weights.dtype is torch.float32 else torch.float64
                like, options = torch.ops.aten.new_empty.default, {"dtype": dtype}
                return super().dispatch(like, types, (args[0], [bins]), options)
        if self.valid and func is GROUPED_MM and args[0].dtype in (torch.float32, torch.float16):
            # torch's kernels multiply these too, where its rule for fake tensors allows bfloat16 only
            like = torch.ops.aten.new_empty_strided.default
            return super().dispatch(like, types, (args[0], *_grouped(*args[:3])), {})
        if self.valid and func is CTC_LOSS and args[1].dim() == 2:
            # of scores [step, sample, class] the losses, and those of paths up to each step: a path is as long as the
            # longest target, which is taken to be as long as padded targets [sample, letter]
            (steps, samples, _), like = args[0].shape, torch.ops.aten.new_empty.default
            sizes = (samples,), (samples, steps, 2 * args[1].shape[1] + 1)
            return tuple(super(QuickFakes, self).dispatch(like, types, (args[0], size), {}) for size in sizes)
        if self.valid and func is RNN_ON_CPU and not launches_operators(args[0]):
            # by torch's rule for fake tensors it leaves nothing to its backward pass
            made: Any = super().dispatch(func, types, args, kwargs)
            like, left = torch.ops.aten.new_empty.default, [_left_by_rnn(args)]
            return *made[:3], super().dispatch(like, types, (args[0], left), {"dtype": torch.uint8})
        # with the default dtype, which is that of a quotient of integers, and of all that is made without a dtype
        key: list[Any] = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        if not self._may_look_up(func) or not self._describe(
            (*args, *kwargs, *kwargs.values()), key, offsets=self._by_offset[func]
        ):
            return super().dispatch(func, types, args, kwargs)
        known: Any
        try:
            # the key is the default, for None is an entry
            known = _known.get(tuple(key), key)
        except TypeError:
            # an argument that cannot be compared
            known = None
        if known is key:
            result = super().dispatch(func, types, args, kwargs)
            _known[tuple(key)] = self._found(result, args, kwargs)
            return result
        if isinstance(known, _Made):
            return self._make(known, args)
        if known is NOTHING:
            return None
        if isinstance(known, list | tuple):
            return type(known)([self._make(made, args) for made in known])
        return super().dispatch(func, types, args, kwargs) if known is None else args[known]

    def _may_look_up(self, func: Any) -> bool:
        if func not in self._looked_up:
            self._looked_up[func] = (
                getattr(func, "namespace", "") == "aten"
                and _OF_VALUES.isdisjoint(func.tags)
                and func not in self.lift_fns
            )
            # of all others the result lies where the argument does, or in new memory
            arguments = getattr(func, "_schema", None)
            self._by_offset[func] = arguments is not None and any(
                argument.name == "storage_offset" for argument in arguments.arguments
            )
        return self._looked_up[func]

    def _describe(self, values: Iterable[Any], key: list[Any], *, offsets: bool) -> bool:
        """Add all that a result may depend on to a key; False where that is more than layouts."""
        for value in values:
            if type(value) is FakeTensor:
                if value.fake_mode is not self or value.constant is not None or not _is_plain(value):
                    return False
                key += (value.shape, value.stride(), value.dtype, value.fake_device, value.requires_grad)
                if offsets:
                    key.append(value.storage_offset())
            elif isinstance(value, Tensor):
                return False
            elif type(value) in (list, tuple):
                key += (type(value), len(value))
                if not self._describe(value, key, offsets=offsets):
                    return False
            else:
                # with its type: as keys 1, 1.0 and True are equal, and the dtypes of results are not
                key += (type(value), value)
        return True

    def _make(self, made: _Made, args: Any) -> Tensor:
        # modes are off while an operator is dispatched, so that these are plain tensors of the device "meta"
        found = torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device="meta")
        if made.view_of is not None:
            whole = args[made.view_of]
            at = (whole.storage_offset() * whole.itemsize + made.n_bytes) // made.dtype.itemsize
            found.set_(whole.untyped_storage(), at, made.shape, made.stride)
        if made.device not in self._alike:
            first = FakeTensor(self, found, made.device)
            self._alike[made.device] = dict(vars(first))
            return first
        return fake_like(self._alike[made.device], found, made.device)

    def _found(self, result: Any, args: Any, kwargs: Any) -> _Found:
        """How the result of an operator is made once more."""
        if result is None:
            # as of the fused and foreach operators of optimisers, which write to their arguments
            return NOTHING
        place = next((i for i, value in enumerate(args) if value is result), None)
        if place is not None:
            return place
        if isinstance(result, tuple | list):
            parts = [self._made(part, args, kwargs) for part in result]
            known = [part for part in parts if part is not None]
            return None if len(known) < len(parts) else known if isinstance(result, list) else tuple(known)
        return self._made(result, args, kwargs)

    def _made(self, result: Any, args: Any, kwargs: Any) -> _Made | None:
        if (
            type(result) is not FakeTensor
            or result.constant is not None
            or result.requires_grad
            or not _is_plain(result)
        ):
            return None
        shape, stride, offset = tuple(result.shape), result.stride(), int(result.storage_offset())
        made, memory = _Made(shape, stride, result.dtype, result.fake_device), result.untyped_storage()
        for i, value in enumerate(args):
            if isinstance(value, Tensor) and value.untyped_storage()._cdata == memory._cdata:
                # in bytes, for a view may have another dtype than what it views
                n_bytes = offset * result.itemsize - int(value.storage_offset()) * value.itemsize
                return made._replace(view_of=i, n_bytes=n_bytes)
        # `_make` finds what is viewed among positional arguments alone: a view of anything else is left to torch
        others = (value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor))
        if any(value.untyped_storage()._cdata == memory._cdata for value in others):
            return None
        with as_meta(self):
            new = torch.empty_strided(shape, stride, dtype=result.dtype, device="meta").untyped_storage()
        # a result in more memory than its layout needs, or that begins inside of it, is not what `_make` makes
        return made if offset == 0 and new.nbytes() == memory.nbytes() else None


def _grouped(one: Tensor, other: Tensor, ends: Tensor | None = None) -> tuple[list[int], list[int]]:
    """Shape and strides of a product of groups; its rows begin at multiples of 16 bytes, as the kernels have them."""
    rows, columns = one.shape[-2], other.shape[-1]
    wide = -(-columns * one.itemsize // 16) * 16 // one.itemsize
    if one.dim() != other.dim():
        # groups are runs of the rows of one, or of the columns of the other
        return [rows, columns], [wide, 1]
    groups = one.shape[0] if one.dim() == 3 or ends is None else ends.shape[0]
    return [groups, rows, columns], [rows * wide, wide, 1]


def _left_by_rnn(args: Any) -> int:
    """Bytes that a kernel leaves to its backward pass, as many as its library chooses: it is run with values.

    Beyond `MOST_LEFT` bytes it is run for fewer samples. Each further one adds the same number of bytes, but for pages.
    """
    key = RNN_ON_CPU, *((a.shape, a.dtype) if isinstance(a, Tensor) else str(a) for a in args)
    found: Any = _known.get(key)
    if found is None:
        samples = args[0].shape[-2]
        few = max(1, MOST_LEFT // 2 // _run_rnn(args, 1))
        found = _run_rnn(args, min(samples, 2 * few))
        if samples > 2 * few:
            found += (found - _run_rnn(args, few)) * (samples - 2 * few) // few
        _known[key] = found
    return int(found)


def _run_rnn(args: Any, samples: int) -> int:
    # modes are off, as above
    given = [torch.zeros(a.shape, dtype=a.dtype, device="meta") if isinstance(a, Tensor) else a for a in args]
    for place in (0, 5, 6):
        # inputs, hidden and cell states
        given[place] = given[place][..., :samples, :]
    given = [torch.zeros(a.shape, dtype=a.dtype) if isinstance(a, Tensor) else a for a in given]
    return int(RNN_ON_CPU(*given)[3].nbytes)


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is no more than its layout; forward derivatives are zeros without memory, for one."""
    if tensor.layout is not torch.strided:
        return False
    return not (tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor())
