"""Count the bytes of a step on fake tensors: how many, of what kind, and where they exceed a budget.

    kind               counts
    parameters         parameters and buffers
    gradients          gradients of parameters, once they are complete
    optimiser state    bytes that the optimiser keeps between steps
    activations        the batch, and tensors of the forward pass that are kept for the backward pass
    temporaries        others: freed within the forward pass, or allocated by the backward pass or the optimiser

Operators on meta tensors only compute shapes, many of them slowly in Python. If all results of an operator are new,
dense tensors, their shapes depend only on the arguments (shapes, strides, dtypes and numbers), so they are cached.

Exact up to the limits of LiveBytes, which counts real tensors; tests compare the two. Sparse tensors are not counted
yet. A tensor on the CPU keeps its values, so that code can read indices; an operator with meta tensors treats it as a
meta tensor.
"""

from collections import Counter, deque
from collections.abc import Collection, Iterable
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_amp.footprint.live_bytes import COLLECTIVES, MADE_OUTSIDE, LiveBytes, storages_of, tensors_of
from lightning_amp.footprint.module_profile import ACTIVATIONS, KINDS, TEMPORARIES

RESIZING = ("resize_", "resize_as_", "set_")
WRAPPING = ("_wrap_tensor_autograd", "wait_tensor")
"""Operators that return their argument, wrapped or waited for, but a new tensor on the meta device."""


class OutOfBudget(Exception):
    """The budget is exceeded; never raised outside the simulation."""

    def __init__(self, requested_bytes: int) -> None:
        super().__init__(requested_bytes)
        self.requested_bytes = requested_bytes


class _Alive(NamedTuple):
    kind: str
    n_bytes: int
    birth: int
    made_in: int


class SimulatedMeter(LiveBytes):  # type: ignore[no-untyped-call]
    """Count live bytes by kind, and the bytes given to collectives.

    Attributes:
        phase: Current phase, in words.
        sent: Bytes given to collectives so far, by kind of collective.
        answers: Cache of result shapes by operator and argument shapes.

    Args:
        budget_bytes: OutOfBudget is raised if more bytes are alive; None for no limit.
        answers: Cache of another meter.
    """

    def __init__(self, *, budget_bytes: int | None = None, answers: dict[Any, Any] | None = None) -> None:
        super().__init__()
        self.phase = ""
        self.sent: Counter[str] = Counter()
        self.answers: dict[Any, Any] = {} if answers is None else answers
        self._budget = budget_bytes
        self._making = TEMPORARIES
        self._pass = self._pass_at_peak = 0
        self._births = self._births_at_peak = 0
        self._living: dict[int, _Alive] = {}
        # a storage may be freed in the middle of any statement, so it is queued, and subtracted later
        self._dead: deque[_Alive] = deque()
        self._by_kind = dict.fromkeys(KINDS, 0)
        self._at_peak = dict(self._by_kind)
        self._dropped = 0

    def _settle(self) -> int:
        """Subtract freed storages from their kinds, and return the bytes alive."""
        while self._dead:
            gone = self._dead.popleft()
            self._by_kind[gone.kind] -= gone.n_bytes
            # freed in the pass with the peak, and allocated before the peak: never kept for the backward pass
            in_its_pass = gone.made_in == self._pass == self._pass_at_peak
            if gone.kind == ACTIVATIONS and in_its_pass and gone.birth <= self._births_at_peak:
                self._dropped += gone.n_bytes
        return self.current

    @property
    def breakdown(self) -> dict[str, int]:
        """Bytes at the peak, by kind."""
        settled = self._settle()
        assert settled <= self.peak, "the peak is the most that was alive"
        found = dict(self._at_peak)
        # bytes that the pass with the peak freed itself were temporaries
        found[ACTIVATIONS] -= self._dropped
        found[TEMPORARIES] += self._dropped
        return found

    def enter(self, phase: str, *, making: str) -> None:
        """Start a phase, worded as in "out of memory at ..."; `making` is the kind of tensors allocated from now on."""
        self._settle()
        self._pass += making != self._making
        self.phase, self._making = phase, making

    def hold(self, values: Any, kind: str) -> None:
        """Count existing tensors as `kind`, also if they are counted as another kind already."""
        self._settle()
        for key in {id(storage) for _, storage in storages_of(tensors_of(values))} & self._living.keys():
            known = self._living[key]
            self._by_kind[known.kind] -= known.n_bytes
            self._by_kind[kind] += known.n_bytes
            self._living[key] = known._replace(kind=kind)
        making, self._making = self._making, kind
        self._count(tensors_of(values))
        self._making = making

    def dispatched(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator on meta tensors, or create its results from cached shapes, and count them."""
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return super().dispatched(func, types, args, kwargs)
        if func._opname in WRAPPING:
            return args[0]
        # a view must be of the argument itself, whose bytes are counted already; the source of an in-place write may be
        # a replacement
        if _only_aliases(func):
            return func(*(_on_one_device(args) if func._schema.is_mutable else args), **kwargs)
        key = _key(func, args, kwargs)
        if key in self.answers:
            result = _make(self.answers[key])
            self.made(func, result)
            return result
        # collectives have no key, so that every call is counted here
        if (sent := sent_bytes(func, args)) is not None:
            self.sent[sent[0]] += sent[1]
        given = {id(storage) for _, storage in storages_of(tensors_of((args, kwargs)))}
        result = super().dispatched(func, types, _on_one_device(args), kwargs)
        if key is not None and func not in MADE_OUTSIDE:
            answer = _answer(result, given)
            if answer is not None:
                self.answers[key] = answer
        return result

    def _count(self, tensors: Iterable[Tensor], given: Collection[int] = ()) -> None:
        """Count tensors, update the peak, and raise OutOfBudget if the bytes alive exceed the budget."""
        before, peak = self._settle(), self.peak
        super()._count(tensors, given)
        if self.peak > peak:
            self._at_peak = dict(self._by_kind)
            self._births_at_peak, self._pass_at_peak, self._dropped = self._births, self._pass, 0
        if self._budget is not None and self.current > self._budget:
            # storages that are freed from here on are freed by the exception
            self._pass_at_peak = -1
            raise OutOfBudget(self.current - before)

    def _born(self, key: int, n_bytes: int, tensor: Tensor | None) -> None:
        self._births += 1
        self._living[key] = _Alive(self._making, n_bytes, self._births, self._pass)
        self._by_kind[self._making] += n_bytes

    def _resized(self, key: int, n_bytes: int) -> None:
        known = self._living[key]
        self._by_kind[known.kind] += n_bytes - known.n_bytes
        self._living[key] = known._replace(n_bytes=n_bytes)

    def _died(self, key: int) -> None:
        self._dead.append(self._living.pop(key))


@cache
def _only_aliases(func: Any) -> bool:
    """Whether all results of an operator are arguments or views of them."""
    schema = func._schema
    if func.namespace != "aten" or func in MADE_OUTSIDE or func._opname in RESIZING:
        return False
    if any(argument.is_out for argument in schema.arguments):
        return False
    return all(r.alias_info is not None for r in schema.returns)


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    """Return the storage of a dense tensor."""
    assert tensor.layout is torch.strided, "the reference model has dense tensors only"
    return tensor.untyped_storage()


def _on_one_device(args: Any) -> Any:
    """Return the arguments with meta tensors instead of CPU tensors, if both kinds exist."""
    tensors = list(tensors_of(args))
    if any(t.is_meta for t in tensors) and not all(t.is_meta for t in tensors):
        return _map(args)
    return args


def _map(values: Any) -> Any:
    if isinstance(values, list | tuple):
        return type(values)(_map(value) for value in values)
    # a tensor without dims works with any device
    if isinstance(values, Tensor) and not values.is_meta and values.dim():
        return torch.empty_strided(values.shape, values.stride(), dtype=values.dtype, device="meta")
    return values


def _key(func: Any, args: Any, kwargs: Any) -> Any:
    """Return what the shapes of an operator's results depend on; None if they are not cached."""
    if func.namespace in COLLECTIVES:
        return None
    key = (func, _signature(args), _signature(kwargs.items()) if kwargs else None)
    with suppress(TypeError):
        hash(key)
        return key
    return None


def _signature(values: Iterable[Any]) -> tuple[Any, ...]:
    parts: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            parts += (value.shape, value.stride(), value.dtype, value.is_meta)
        elif isinstance(value, list | tuple):
            parts.append(_signature(value))
        else:
            # 1, 1.0 and True are equal, but results differ in dtype
            parts += (type(value), value)
    return tuple(parts)


def _answer(result: Any, given: Collection[int]) -> Any:
    """Return how to create an operator's results again, None if that is not possible."""
    if isinstance(result, Tensor):
        storage = _storage(result)
        fresh = result.is_meta and id(storage) not in given
        spec = (result.shape, result.stride(), result.dtype)
        # a result's storage may be larger than its shape, and would be created too small
        return spec if fresh and _storage(_make(spec)).nbytes() == storage.nbytes() else None
    if isinstance(result, tuple) and all(isinstance(part, Tensor) for part in result):
        parts = [_answer(part, given) for part in result]
        distinct = len({id(_storage(part)) for part in result}) == len(parts)
        return parts if distinct and None not in parts else None
    return None


def _make(answer: Any) -> Any:
    if isinstance(answer, list):
        return tuple(_make(part) for part in answer)
    shape, stride, dtype = answer
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


_KIND_AND_INPUT = {
    "all_reduce": ("all_reduce", 0),
    "allreduce_": ("all_reduce", 0),
    "all_gather_into_tensor": ("all_gather", 0),
    "_allgather_base_": ("all_gather", 1),
    "allgather_": ("all_gather", 1),
    "reduce_scatter_tensor": ("reduce_scatter", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "broadcast": ("broadcast", 0),
    "broadcast_": ("broadcast", 0),
    "all_to_all_single": ("all_to_all", 0),
    "alltoall_base_": ("all_to_all", 1),
}
"""Operator -> kind of collective, and index of its input; functional operators, and those that write in place."""
_SILENT = ("wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_")


def sent_bytes(operator: Any, args: tuple[Any, ...]) -> tuple[str, int] | None:
    """Return the kind of a dispatched collective, and the bytes given to it; None for other operators.

    The count is the size of this rank's input, whatever the algorithm transfers: an all-reduce of n bytes counts n, an
    all-gather the own shard, a reduce-scatter all shards, a broadcast the tensor. Not counted are the few numbers with
    which the ranks of a real run check in every step that they agree on their batches.
    """
    if operator.namespace not in COLLECTIVES or operator._opname in _SILENT:
        return None
    assert operator._opname in _KIND_AND_INPUT, f"{operator._opname!r} is a collective that is not counted yet"
    kind, place = _KIND_AND_INPUT[operator._opname]
    return kind, sum(tensor.nbytes for tensor in tensors_of(args[place]))
