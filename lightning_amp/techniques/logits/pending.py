"""Put off products of linear layers with more outputs than inputs, until the step reads them.

`F.linear` returns a `Pending` tensor, which has no values. Views that keep the last dim, casts and products with a
number are noted; cross-entropy runs in chunks of rows (loss.py); all else that reads it computes the product, once, and
goes on with that, so that a step has the values and gradients that it has without. Views and copies of it are computed
at the same moment: what is written into one of them next is seen by the views, and not by the copies.

A whole product is computed in these cases too, for it would be read too late:

    the step has ended, and something still has it      an attribute, or what the step returns
    an autograd Function gets it                        which would not see where it comes from
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
from lightning_amp.techniques.logits.loss import Rows, cross_entropy, largest

LEAST_CHUNKS = 8
"""Outputs by inputs of a layer, below which little is spared: of hidden layers there are four, of a vocabulary more."""
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
"""What the wrapper says of itself."""
DATA = {Tensor.data.__get__, Tensor.data.__set__}  # type: ignore[attr-defined]
"""Ways to a tensor's memory whose writes autograd does not count."""


class Pending(Tensor):
    """The outputs of a linear layer, not computed yet.

    Attributes:
        rows: What they are computed from.
    """

    rows: Rows
    _made: Tensor | None
    _of: "tuple[Pending, Callable[[Tensor], Tensor]] | None"
    _family: "list[weakref.ref[Pending]]"

    @staticmethod
    def of(
        rows: Rows, shape: Any, dtype: torch.dtype, base: "tuple[Pending, Callable[[Tensor], Tensor]] | None" = None
    ) -> "Pending":
        """A tensor of a shape; with `base` a view or copy of another one, and how to make it."""
        if not torch.is_grad_enabled():
            # what reads it with gradients has none to hand on
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
        """The product; the first call computes it, and all its views and copies."""
        if self._made is None:
            # in the order in which they were noted: what a view is of is made before it
            for one in (ref() for ref in self._family):
                if one is not None:
                    # metrics may be what reads it first, without gradients
                    with torch.inference_mode(False), torch.set_grad_enabled(one.rows.requires_grad):
                        one._made = one.rows.product() if one._of is None else one._of[1](one._of[0].made())
        assert self._made is not None, "it is one of its family"
        return self._made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Note a view, run cross-entropy in chunks, or compute the product and call the function."""
        kwargs = kwargs or {}
        if func in METADATA:
            with disable_torch_function():
                return func(*args, **kwargs)
        x = args[0] if args else None
        if isinstance(x, Pending) and x._made is None and (handler := HANDLERS.get(func)) is not None:
            try:
                given = signature(handler).bind(*args, **kwargs)
            except TypeError:
                # arguments in another form than the handler's
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
        """Refuse what has come past `__torch_function__`: autograd has not seen the product."""
        raise ModelError(MOVED)


def values(x: Any) -> Any:
    """The product in place of a tensor without values."""
    return x.made() if isinstance(x, Pending) else x


def _refuse_gradient(grad: Tensor) -> Tensor:
    raise ModelError(MOVED)


class PutOff(TorchFunctionMode):
    """Products of linear layers are put off while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: list[weakref.ref[Pending]] = []
        self._saving = top_saving_hooks(False)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Put off a linear layer, or call the function."""
        kwargs = kwargs or {}
        if func in DATA and has_storage(args[0]):
            # before the write: no version would show that a product comes after it
            self.compute(of=args[0])
        found = self._put_off(*args, **kwargs) if func is F.linear else None
        return func(*args, **kwargs) if found is None else found

    def _put_off(self, input: Any, weight: Any, bias: Any = None) -> Pending | None:
        x, given = input, [t for t in (input, weight, bias) if t is not None]
        if not all(map(has_storage, given)) or x.dim() < 2 or weight.dim() != 2:
            return None
        if top_saving_hooks(False) != self._saving:
            # what is checkpointed runs again in the backward pass, and has to compute in the same order
            return None
        if torch.is_inference_mode_enabled() or any(t.is_inference() for t in given) or in_transform():
            # tensors of inference mode do not say when they are written to, and torch.func differentiates in its way
            return None
        if not torch.is_grad_enabled() and any(t.requires_grad for t in given):
            # of an autograd Function, perhaps, whose output gets its gradient
            return None
        if weight.shape[0] < LEAST_CHUNKS * weight.shape[1] or x.numel() < LEAST_CHUNKS * x.shape[-1]:
            return None
        rows = Rows.of(x, weight, bias)
        if not rows.casts and any(t.dtype != rows.dtype for t in given):
            # torch refuses types that differ, where no autocast makes them one
            return None
        found = Pending.of(rows, (*x.shape[:-1], weight.shape[0]), rows.dtype)
        self._alive.append(weakref.ref(found))
        return found

    def compute(self, of: Tensor | None = None) -> None:
        """Compute products that are put off, with the parameters of now: all of them, or those of one tensor."""
        memory = None if of is None else of.untyped_storage()._cdata
        for found in (ref() for ref in self._alive):
            if found is not None and memory in (None, *(t.untyped_storage()._cdata for t, _ in found.rows.given)):
                found.made()


HANDLERS: dict[Any, Callable[..., Any]] = {}
"""By function -> what a Pending gives; NotImplemented: compute the product."""


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
    # not True and False, which are masks
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
    # [rows, places, words] -> [rows, words, places], as cross-entropy takes them
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
    """A function that computes value by value comes after the product, in each chunk."""
    kinds = torch.dtype if func is Tensor.to else float | int
    if not all(isinstance(a, kinds) for a in args):
        return NotImplemented

    def call(t: Tensor) -> Tensor:
        return cast(Tensor, func(t, *args))

    dtype = call(torch.empty(0, dtype=x.dtype, device="meta")).dtype
    if not dtype.is_floating_point:
        return NotImplemented
    return Pending.of(replace(x.rows, after=(*x.rows.after, call)), x.shape, dtype, (x, call))


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
