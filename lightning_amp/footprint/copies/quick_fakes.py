"""Run repeated operators on fake tensors quickly, by reusing the result metadata of the first one.

A training step runs the same operators on the same shapes once per layer, and again in its second run. torch's own
cache takes several times as long to describe an operator's arguments, because it also supports symbolic shapes.

Results are cached only where they follow from the layouts, dtypes and devices of the arguments: for aten operators on
fake tensors without a constant, whose result is an argument, a view of one, or new memory that it fills. torch computes
all others.
"""

from collections.abc import Iterable
from functools import cache, cached_property
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
    SharedFakeMode,
    as_meta,
    fake_like,
    pack_padded,
    special_fakes,
    tree_leaves,
    tree_map,
)
from lightning_amp.footprint.copies.batch_values import BatchReads
from lightning_amp.footprint.copies.kernel_sizes import CORRECTED, corrections, grouped_layout, left_by_rnn
from lightning_amp.footprint.copies.known_values import Unowned, note, number_of, read_of
from lightning_amp.footprint.copies.noted_values import (
    BACKWARD_SELECTS,
    MISSING,
    Layout,
    answers_now,
    decided_by_values,
)
from lightning_amp.footprint.copies.results_by_element import UNTAGGED, ByElement
from lightning_amp.footprint.target_device import launches_operators

_SPECIAL = {IS_ALL_TRUE, torch.ops.aten.bincount.default, GROUPED_MM, CTC_LOSS, RNN_ON_CPU, pack_padded}
"""Operators whose results differ here from those of torch's rules, or whose shapes values decide without a tag."""
_aten = torch.ops.aten
PLAIN = {_aten.mm, _aten.bmm, _aten.addmm, _aten.baddbmm, *UNTAGGED}
"""Products of matrices, and element-wise operators that torch does not tag as such."""
VIEWS = {_aten.slice.Tensor, _aten.as_strided.default, _aten.view.default, _aten.select.int, _aten.expand.default}
_OF_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
"""Tags of operators whose result depends on values, or that change the layout of an argument."""


class _Made(NamedTuple):
    """How to make a result: as new memory, or as a view of the argument at index `view_of`, offset by `n_bytes`."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    view_of: int | None = None
    n_bytes: int = 0


class _Of(NamedTuple):
    """Properties of an operator.

    Attributes:
        looked_up: Whether its results may be cached.
        by_offset: Whether an argument is an offset; all other results are at the argument's offset, or in new memory.
        plain: Whether its results may be cached, and none of the special cases of `dispatch` applies to it.
    """

    looked_up: bool
    by_offset: bool
    plain: bool


@cache
def _of(func: Any) -> _Of:
    aten = getattr(func, "namespace", "") == "aten"
    looked_up = aten and _OF_VALUES.isdisjoint(func.tags) and func not in FakeTensorMode.lift_fns
    arguments = getattr(func, "_schema", None)
    by_offset = arguments is not None and any(one.name == "storage_offset" for one in arguments.arguments)
    special = func in _SPECIAL or func in BACKWARD_SELECTS or func in BACKWARD_SELECTS.values()
    return _Of(looked_up, by_offset, looked_up and not special)


_Found = int | _Made | list[_Made] | tuple[_Made, ...] | str | None
"""Index or name of the argument that is the result, how to make results, NOTHING, or None: not cached."""
NOTHING = "nothing"
_known: dict[Any, _Found] = {}
"""Cache of all modes, by operator and arguments: planning counts a step several times."""
MOST = 100_000
"""Number of entries above which the cache is cleared."""


class QuickFakes(SharedFakeMode):  # type: ignore[no-untyped-call]
    """A FakeTensorMode for one step or one graph, in which arguments of operators may also be real tensors.

    Args:
        valid: Whether checks of `torch.distributions` pass, values fit the bins of `torch.bincount`, and code may read
            values that do not depend on data. True for a counted step: the real run makes these checks. False for a
            captured graph, which would lose the checks, and the branch on a buffer.

    Attributes:
        unowned: Real tensors that no module owns, by their memory.
        cache: What code that caches tensors from step to step keeps of this mode's, by anything hashable.
    """

    def __init__(self, *, valid: bool = False) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.valid, self.reads = valid, BatchReads()
        # that of torch, whose description of arguments takes longer than a result
        self.cache_enabled = False
        self.cache: dict[Any, Any] = {}
        self._alike: dict[torch.device, dict[str, Any]] = {}
        self.unowned: dict[int, Unowned] = {}
        if len(_known) > MOST:
            _known.clear()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, as LiveBytes does: torch's guard against Dynamo takes a tenth of a count."""
        return False

    @cached_property
    def avoid_device_init(self) -> bool:
        """As torch's, which asks the driver again for every operator until CUDA is initialized."""
        return bool(super().avoid_device_init)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator; torch's method does the same, behind a guard against Dynamo and a count of its calls."""
        return self.dispatch(func, types, args, kwargs)

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the result of an operator."""
        kwargs = kwargs or {}
        if not self.valid:
            return self._dispatch(func, types, args, kwargs)
        if func not in FakeTensorMode.lift_fns and any(type(value) is Tensor for value in args):
            args = tuple([self._fake_of(value) if type(value) is Tensor else value for value in args])
        of, run = _of(func), self._quickly
        if not of.plain:
            run = self._dispatch
            if func in BACKWARD_SELECTS and (answers := answers_now()) is not None:
                answers.remember(func, args)
            # asked first in any case, for the next question is answered by the next note
            noted = self._noted(func, types, args) if decided_by_values(func, args) else MISSING
            if not of.looked_up and torch.Tag.data_dependent_output in getattr(func, "tags", ()):
                read = read_of(func, args, kwargs)
                value = None if read is None else number_of(read)
                if read is not None and value is not None:
                    self.reads.note(read)
                    return value
            if noted is not MISSING:
                return noted
        try:
            result = run(func, types, args, kwargs)
        except Exception:
            # an operator of a library, without a rule for fake tensors, or with one that needs values
            if (noted := self._noted(func, types, args)) is MISSING:
                raise
            return noted
        if isinstance(func, OpOverload):
            note(func, args, kwargs, result)
        return result

    def _fake_of(self, real: Tensor) -> Tensor:
        """Return a fake tensor of a real one that no module owns, with what the step has written to it."""
        if real.requires_grad or real.is_meta or real.layout is not torch.strided or real.is_conj() or real.is_neg():
            return real
        fake, memory = self.from_tensor(real), real.untyped_storage()._cdata
        self.unowned.setdefault(memory, Unowned(real)).give(fake)
        return fake

    def _noted(self, func: Any, types: Any, args: Any) -> Any:
        """Return what the step with values got from an operator, or MISSING."""
        answers = answers_now()
        found = MISSING if answers is None else answers.of(func, args)
        if found is MISSING and answers is not None and decided_by_values(func, args):
            found = answers.of_backward()
        if found is MISSING:
            return found
        device = next((tensor.device for tensor in tree_leaves(args) if isinstance(tensor, Tensor)), None)

        def made(answer: Any) -> Any:
            if not isinstance(answer, Layout):
                return answer.clone() if isinstance(answer, Tensor) else answer
            like, options = torch.ops.aten.empty_strided.default, {"dtype": answer.dtype, "device": device}
            return super(QuickFakes, self).dispatch(like, types, (answer.shape, answer.stride), options)

        return tree_map(made, found)

    def _dispatch(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if self.valid and func is IS_ALL_TRUE:
            result: Any = super().dispatch(func, types, args, kwargs)
            # bool() of a fake tensor with a constant reads the constant
            result.constant = torch.ones((), dtype=torch.bool)
            return result
        if self.valid and func is torch.ops.aten.bincount.default:
            bins = kwargs.get("minlength", args[2] if len(args) > 2 else 0)
            weights = kwargs.get("weights", args[1] if len(args) > 1 else None)
            if bins:
                # as many bins as are given, as in torchmetrics; without a number, the largest value decides
                dtype = torch.int64
                if weights is not None:
                    dtype = torch.float32 if weights.dtype is torch.float32 else torch.float64
                like, options = torch.ops.aten.new_empty.default, {"dtype": dtype}
                return super().dispatch(like, types, (args[0], [bins]), options)
        if self.valid and func is GROUPED_MM and args[0].dtype in (torch.float32, torch.float16):
            # torch's kernels support these dtypes too, but its rule for fake tensors only bfloat16
            like = torch.ops.aten.new_empty_strided.default
            return super().dispatch(like, types, (args[0], *grouped_layout(*args[:3])), {})
        if self.valid and func is CTC_LOSS and args[1].dim() == 2:
            # from scores [step, sample, class]: the losses, and the losses of paths up to each step. A path is as long
            # as the longest target, which is assumed to be as long as the padded targets [sample, letter]
            (steps, samples, _), like = args[0].shape, torch.ops.aten.new_empty.default
            sizes = (samples,), (samples, steps, 2 * args[1].shape[1] + 1)
            return tuple(super(QuickFakes, self).dispatch(like, types, (args[0], size), {}) for size in sizes)
        if self.valid and func is RNN_ON_CPU and not launches_operators(args[0]):
            # torch's rule for fake tensors leaves out the reserve bytes for the backward pass
            made: Any = super().dispatch(func, types, args, kwargs)
            like, left = torch.ops.aten.new_empty.default, [left_by_rnn(args)]
            return *made[:3], super().dispatch(like, types, (args[0], left), {"dtype": torch.uint8})
        return self._quickly(func, types, args, kwargs)

    def _quickly(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        # the default dtype is that of a quotient of integers, and of tensors that are created without a dtype
        key: list[Any] = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        of = _of(func)
        if not of.looked_up or not self._describe((*args, *kwargs, *kwargs.values()), key, offsets=of.by_offset):
            return self._computed(func, types, args, kwargs)
        known: Any
        try:
            # the key itself is the default, because None is an entry
            known = _known.get(tuple(key), key)
        except TypeError:
            # an argument is not hashable
            known = None
        if known is key:
            # before a rule, which may resize them
            shapes = {name: value.shape for name, value in kwargs.items() if isinstance(value, Tensor)}
            known = self._by_own_rule(func, args, kwargs)
            if known is None:
                result = self._computed(func, types, args, kwargs)
                _known[tuple(key)] = self._found(result, args, kwargs, shapes)
                return result
            _known[tuple(key)] = known
        if isinstance(known, _Made):
            return self._make(known, args)
        if known is NOTHING:
            return None
        if isinstance(known, str):
            return kwargs[known]
        if isinstance(known, list | tuple):
            return type(known)([self._make(made, args) for made in known])
        return self._computed(func, types, args, kwargs) if known is None else args[known]

    def _computed(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Return torch's result, with the strides and dtypes of the kernel."""
        result: Any = super().dispatch(func, types, args, kwargs)
        if func not in CORRECTED:
            return result
        results = [*result] if isinstance(result, tuple) else [result]
        for place, options in corrections(func, args, results):
            results[place] = super().dispatch(torch.ops.aten.empty_like.default, types, (results[place],), options)
        return tuple(results) if isinstance(result, tuple) else results[0]

    def _describe(self, values: Iterable[Any], key: list[Any], *, offsets: bool) -> bool:
        """Add everything that a result may depend on to a key; return False if it depends on more than layouts."""
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
                # with its type: 1, 1.0 and True are equal as keys, but give results of different dtypes
                key += (type(value), value)
        return True

    def new(self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a new tensor, where no mode is active."""
        return self._make(_Made(shape, stride, dtype, device), ())

    def _make(self, made: _Made, args: Any) -> Tensor:
        # modes are disabled during dispatch, so this is a plain meta tensor
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

    def _by_own_rule(self, func: Any, args: Any, kwargs: Any) -> _Found:
        """Return how to make the results of an operator by its rule for meta tensors, or None.

        torch runs the same rule, and takes five times as long for what it asks before. It asks nothing that matters of
        element-wise operators, products of matrices and views, on tensors of one device.
        """
        given = [*args, *kwargs.values()]
        tensors = [value for value in given if isinstance(value, Tensor)]
        plain = torch.Tag.pointwise in func.tags or func.overloadpacket in PLAIN
        # torch's own rules for views are about sizes that are not known
        if not (func in VIEWS or (plain and func not in special_fakes)) or not tensors or len(kwargs) > 1:
            return None
        device, shapes = tensors[0].fake_device, [tensor.shape for tensor in tensors]  # type: ignore[attr-defined]
        # a tensor without dims may be on another device, and counts as a number in the result's dtype
        if any(tensor.fake_device != device or not tensor.dim() for tensor in tensors):  # type: ignore[attr-defined]
            return None
        if kwargs and not (func._schema.is_mutable and isinstance(given[-1], Tensor)):
            return None
        call = ByElement(func, args, kwargs)
        if (known := call.known()) is not None:
            return _Made(call.shape or (), call.stride, known, device) if isinstance(known, torch.dtype) else known
        try:
            with as_meta(self):
                result = func(*args, **kwargs)
        except NotImplementedError:
            # torch takes the operator apart
            return None
        if func._schema.is_mutable:
            # an argument that was resized is not cached
            if shapes != [tensor.shape for tensor in tensors] or all(result is not value for value in given):
                return None
            written = 0 if result is args[0] else next(iter(kwargs), None)
            if written is not None:
                call.keep(written)
            return written
        if isinstance(result, Tensor) and call.gives(result):
            call.keep(result.dtype)
        parts = result if isinstance(result, tuple) else (result,)
        made = tuple(_Made(tuple(part.shape), part.stride(), part.dtype, device) for part in parts)
        if func in VIEWS:
            offset = (result.storage_offset() - args[0].storage_offset()) * result.itemsize
            return made[0]._replace(view_of=0, n_bytes=offset)
        return made if isinstance(result, tuple) else made[0]

    def _found(self, result: Any, args: Any, kwargs: Any, shapes: dict[str, torch.Size]) -> _Found:
        """Return how to make the result of an operator again; `shapes` are those of its named tensors before."""
        if result is None:
            # as for fused and foreach operators of optimizers, which write to their arguments
            return NOTHING
        for name, shape in shapes.items():
            if kwargs[name] is result:
                # an argument that was resized is not cached
                return name if result.shape == shape else None
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
                # in bytes, because a view may have another dtype than its base
                n_bytes = offset * result.itemsize - int(value.storage_offset()) * value.itemsize
                return made._replace(view_of=i, n_bytes=n_bytes)
        # `_make` finds the base of a view among positional arguments only; views of other tensors are not cached
        others = (value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor))
        if any(value.untyped_storage()._cdata == memory._cdata for value in others):
            return None
        with as_meta(self):
            new = torch.empty_strided(shape, stride, dtype=result.dtype, device="meta").untyped_storage()
        # `_make` cannot make a result with an offset, or in more memory than its layout needs
        return made if offset == 0 and new.nbytes() == memory.nbytes() else None


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has a plain layout; forward derivatives, for one, are zeros without memory."""
    if tensor.layout is not torch.strided:
        return False
    return not (tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor())
