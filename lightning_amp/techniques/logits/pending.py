"""Defer products of linear layers with more outputs than inputs, until the step reads them.

`F.linear` returns a `Pending` tensor without values. It records views that keep the last dim, casts, products with a
number and sums with a constant of each class. Cross-entropy of it runs in chunks of rows (loss.py). Any other function
first computes the product, once, and then uses it, so values and gradients of the step do not change. Views and copies
are computed at the same time: a later write to one of them changes the views, but not the copies.

The full product is also computed in these cases, because it would be read too late:

    the step has ended, and the tensor is still referenced     by an attribute, or as a result of the step
    the tensor is passed to an autograd Function               which would bypass its autograd graph
"""

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from inspect import signature
from itertools import product
from math import prod
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from lightning_amp._torch import disable_torch_function, in_transform, top_saving_hooks, tree_leaves, tree_map
from lightning_amp.errors import ModelError
from lightning_amp.footprint.live_bytes import has_storage
from lightning_amp.techniques.logits.loss import WRITTEN, Rows, cross_entropy, largest

LEAST_CHUNKS = 8
"""Least ratio of outputs to inputs at which deferring saves much: hidden layers have about 4, vocabulary heads more."""
MOVED = (
    "the gradient of logits was taken where it cannot be handed on to their layer, as by torch.autograd.grad, or by an"
    " operator that torch does not see in Python. Leave 'logits' out of the strategies"
)
METADATA = {
    *(getattr(Tensor, name) for name in ("size", "dim", "numel", "is_floating_point", "is_complex", "__len__")),
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda")),
    *(getattr(Tensor, name).__get__ for name in ("is_sparse", "is_quantized", "is_meta", "layout")),
    Tensor.__hash__,
}
"""Metadata that the wrapper answers itself."""
DATA = {Tensor.data.__get__, Tensor.data.__set__}  # type: ignore[attr-defined]
"""Accessors to a tensor's memory; autograd does not count writes through them."""


class Pending(Tensor):
    """Outputs of a linear layer that are not computed yet.

    Attributes:
        rows: Inputs from which they are computed.
    """

    rows: Rows
    _made: Tensor | None
    _of: "tuple[Pending, Callable[[Tensor], Tensor]] | None"
    _family: "list[weakref.ref[Pending]]"

    @staticmethod
    def of(
        rows: Rows, shape: Any, dtype: torch.dtype, base: "tuple[Pending, Callable[[Tensor], Tensor]] | None" = None
    ) -> "Pending":
        """Make a tensor of a shape; `base` has the tensor that it is a view or copy of, and how to make it."""
        if not torch.is_grad_enabled():
            # without gradients now, so it has none to pass on later
            rows = rows.detached()
        found = Tensor._make_wrapper_subclass(
            Pending, shape, dtype=dtype, device=rows.x.device, requires_grad=rows.requires_grad
        )
        found.rows, found._made, found._of = rows, None, base
        found._family = base[0]._family if base else []
        found._family.append(weakref.ref(found))
        if rows.requires_grad:
            with disable_torch_function():
                found.register_hook(_refuse_gradient)  # type: ignore[no-untyped-call]
        return found

    def made(self) -> Tensor:
        """Return the product; the first call computes it, with all its views and copies."""
        if self._made is None:
            # in the order of creation: the base of a view is computed first
            for one in (ref() for ref in self._family):
                if one is not None:
                    # the first reader may be a metric, which runs without gradients
                    with torch.inference_mode(False), torch.set_grad_enabled(one.rows.requires_grad):
                        one._made = one.rows.product() if one._of is None else one._of[1](one._of[0].made())
        assert self._made is not None, "it is one of its family"
        return self._made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record a view, run cross-entropy in chunks, or compute the product and call the function."""
        kwargs = kwargs or {}
        if func in METADATA:
            with disable_torch_function():
                return func(*args, **kwargs)
        x = args[0] if args else None
        if isinstance(x, Pending) and x._made is None and (handler := HANDLERS.get(func)) is not None:
            try:
                given = signature(handler).bind(*args, **kwargs)
            except TypeError:
                # arguments that the handler does not accept
                given = None
            found = NotImplemented if given is None else handler(*given.args, **given.kwargs)
            if found is not NotImplemented:
                return found
        if func is torch.autograd.grad and any(isinstance(t, Pending) and t._made is None for t in tree_leaves(args)):
            raise ModelError(MOVED)
        return func(*tree_map(values, args), **tree_map(values, kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Raise ModelError: the operator bypassed `__torch_function__`, so autograd has not recorded the product."""
        raise ModelError(MOVED)


def values(x: Any) -> Any:
    """Return the product of a pending tensor; return anything else unchanged."""
    return x.made() if isinstance(x, Pending) else x


def _refuse_gradient(grad: Tensor) -> Tensor:
    raise ModelError(MOVED)


class PutOff(TorchFunctionMode):
    """Torch function mode that defers products of linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: list[weakref.ref[Pending]] = []
        self._saving = top_saving_hooks(False)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Defer a linear layer, or call the function."""
        kwargs = kwargs or {}
        if func in DATA and has_storage(args[0]):
            # before the write, which does not change the version that `Rows.check` compares
            self.compute(of=args[0])
        found = self._put_off(*args, **kwargs) if func is F.linear else None
        return func(*args, **kwargs) if found is None else found

    def _put_off(self, input: Any, weight: Any, bias: Any = None) -> Pending | None:
        x, given = input, [t for t in (input, weight, bias) if t is not None]
        if not all(map(has_storage, given)) or x.dim() < 2 or weight.dim() != 2:
            return None
        if top_saving_hooks(False) != self._saving:
            # a checkpointed function runs again in the backward pass, and must compute in the same order
            return None
        if torch.is_inference_mode_enabled() or any(t.is_inference() for t in given) or in_transform():
            # inference tensors have no version counter, and torch.func differentiates by itself
            return None
        if not torch.is_grad_enabled() and any(t.requires_grad for t in given):
            # possibly inside an autograd Function, whose output receives the gradient
            return None
        if weight.shape[0] < LEAST_CHUNKS * weight.shape[1] or x.numel() < LEAST_CHUNKS * x.shape[-1]:
            return None
        rows = Rows.of(x, weight, bias)
        if not rows.casts and any(t.dtype != rows.dtype for t in given):
            # torch raises an error for unequal dtypes without autocast
            return None
        found = Pending.of(rows, (*x.shape[:-1], weight.shape[0]), rows.dtype)
        self._alive.append(weakref.ref(found))
        return found

    def compute(self, of: Tensor | None = None) -> None:
        """Compute deferred products with the current parameters: all, or those with an input in the memory of `of`."""
        memory = None if of is None else of.untyped_storage()._cdata
        for found in (ref() for ref in self._alive):
            if found is not None and memory in (None, *(t.untyped_storage()._cdata for t, _ in found.rows.given)):
                found.made()


HANDLERS: dict[Any, Callable[..., Any]] = {}
"""By function: handler of a Pending tensor. If it returns NotImplemented, the product is computed."""


def _handles(*names: str, gets_function: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(handler: Callable[..., Any]) -> Callable[..., Any]:
        for home, name in product((Tensor, torch), names):
            if (func := getattr(home, name, None)) is not None:
                HANDLERS[func] = partial(handler, func) if gets_function else handler
        return handler

    return register


def _view(x: Pending, rows: Rows, view: Callable[[Tensor], Tensor]) -> Pending:
    return Pending.of(rows, (*rows.x.shape[:-1], x.shape[-1]), x.dtype, (x, view))


@_handles("view", "reshape")
def _reshaped(x: Pending, *shape: Any, **kwargs: Any) -> Any:
    if len(shape) == 1 and isinstance(shape[0], list | tuple):
        shape = tuple(shape[0])
    if kwargs or x.rows.moved or not shape or not all(type(n) is int for n in shape):
        return NotImplemented
    n, v = x.rows.n_rows, x.shape[-1]
    if shape[-1] == -1:
        shape = (*shape[:-1], v) if prod(shape[:-1]) == n else shape
    if shape[-1] != v:
        return NotImplemented
    inner = x.rows.x.reshape(*shape[:-1], x.rows.x.shape[-1])
    return _view(x, replace(x.rows, x=inner), lambda t: t.reshape(shape))


@_handles("flatten")
def _flattened(x: Pending, start_dim: int = 0, end_dim: int = -1) -> Any:
    last = x.dim() - 1
    if x.rows.moved or end_dim % x.dim() == last:
        return NotImplemented
    inner = x.rows.x.flatten(start_dim, end_dim % x.dim())
    return _view(x, replace(x.rows, x=inner), lambda t: t.flatten(start_dim, end_dim))


@_handles("contiguous")
def _contiguous(x: Pending) -> Any:
    return NotImplemented if x.rows.moved else _view(x, x.rows, Tensor.contiguous)


@_handles("__getitem__")
def _indexed(x: Pending, index: Any) -> Any:
    items = index if isinstance(index, tuple) else (index,)
    # bool indices are masks, which are not supported
    if x.rows.moved or not all(type(i) in (slice, int) or i is Ellipsis for i in items):
        return NotImplemented
    if Ellipsis in items:
        at = items.index(Ellipsis)
        missing = x.dim() - len(items) + 1
        items = (*items[:at], *[slice(None)] * missing, *items[at + 1 :])
    if len(items) == x.dim():
        if items[-1] != slice(None):
            return NotImplemented
        items = items[:-1]
    inner = x.rows.x[items]
    if inner.dim() < 2:
        return NotImplemented
    return _view(x, replace(x.rows, x=inner), lambda t: t[index])


@_handles("transpose", "swapaxes", "movedim")
def _transposed(x: Pending, a: Any, b: Any) -> Any:
    # [rows, positions, classes] -> [rows, classes, positions], as cross-entropy expects
    if x.dim() != 3 or x.rows.moved or not isinstance(a, int) or {a % 3, b % 3} != {1, 2}:
        return NotImplemented
    return _with_classes_second(x)


@_handles("permute")
def _permuted(x: Pending, *dims: Any) -> Any:
    dims = tuple(dims[0]) if len(dims) == 1 and not isinstance(dims[0], int) else dims
    if x.dim() != 3 or x.rows.moved or [d % 3 for d in dims] != [0, 2, 1]:
        return NotImplemented
    return _with_classes_second(x)


def _with_classes_second(x: Pending) -> Pending:
    b, n, v = x.shape
    return Pending.of(replace(x.rows, moved=True), (b, v, n), x.dtype, (x, lambda t: t.transpose(1, 2)))


BY_VALUE = ("float", "double", "half", "bfloat16", "to", "mul", "div", "__mul__", "__truediv__", "__rmul__", "tanh")


@_handles(*BY_VALUE, gets_function=True)
def _after(func: Any, x: Pending, *args: Any) -> Any:
    """Apply an elementwise function after the product, in each chunk."""
    kinds = torch.dtype if func is Tensor.to else float | int
    if not all(isinstance(a, kinds) for a in args):
        return NotImplemented

    def call(t: Tensor) -> Tensor:
        return cast(Tensor, func(t, *args))

    dtype = call(torch.empty(0, dtype=x.dtype, device="meta")).dtype
    if not dtype.is_floating_point:
        return NotImplemented
    return Pending.of(replace(x.rows, after=(*x.rows.after, call)), x.shape, dtype, (x, call))


@_handles("add", "__add__", gets_function=True)
def _with_bias(func: Any, x: Pending, other: Any) -> Any:
    """Add one constant to each class in each chunk, as models with a buffer of biases do."""
    if not isinstance(other, Tensor) or not has_storage(other) or other.requires_grad or other.dtype != x.dtype:
        return NotImplemented
    if x.rows.moved or other.dim() > x.dim() or other.shape[-1:] != x.shape[-1:] or other.numel() != x.shape[-1]:
        return NotImplemented
    version = other._version

    def call(t: Tensor) -> Tensor:
        if other._version != version:
            raise ModelError(WRITTEN)
        return cast(Tensor, func(t, other.view(-1)))

    return Pending.of(replace(x.rows, after=(*x.rows.after, call)), x.shape, x.dtype, (x, call))


@_handles("detach")
def _detached(x: Pending) -> Pending:
    return Pending.of(x.rows.detached(), x.shape, x.dtype, (x, Tensor.detach))


@_handles("argmax")
def _argmax(x: Pending, dim: Any = None, keepdim: bool = False) -> Any:
    if x.rows.moved or keepdim or dim is None or dim % x.dim() != x.dim() - 1:
        return NotImplemented
    return largest(x.rows)


def _cross_entropy(x: Pending, target: Any, *args: Any, **kwargs: Any) -> Any:
    found = cross_entropy(x.rows, target, *args, **kwargs)
    return NotImplemented if found is None else found


HANDLERS[F.cross_entropy] = _cross_entropy
