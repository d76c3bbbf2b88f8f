"""Compute values of fake tensors that do not depend on data or parameters, such as a mask that a module creates.

`torch.nn.Transformer` compares its mask with a causal one, and branches on the result. Such masks are computed from
numbers, or are buffers. A storage records how it was made, as a `Recipe`; values are computed only when code reads
them. A view shares its storage, and therefore the recipe.

A buffer that the step changes by numbers, such as the pointer of a queue or a counter, has its values in the second
step too. `OwnReads` knows which buffers a step reads and changes: it may decide otherwise in a later step.

If a value is unknown, `item()` returns a placeholder. A step that appends `loss.item()` to a list, or logs
`correct.item() / n`, takes the same bytes for every number. The placeholder therefore supports arithmetic and
formatting, and raises at comparisons and when it is used as a length. Known limit: numpy and `torch.tensor` convert the
placeholder to 1, and branches on the result are not detected.
"""

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from lightning_amp._torch import SCALES_UPDATES, DataDependentOutput, FakeTensor, OpOverload, tree_leaves, tree_map
from lightning_amp.footprint.copies.noted_values import answers_now
from lightning_amp.footprint.live_bytes import places_written, tensors_of, tensors_written
from lightning_amp.holding import replacing

_EMPTY = {torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default}
MOST_BYTES = 2**30
"""Largest tensor that is computed; the values of larger ones are unknown."""


@dataclass(eq=False)
class Recipe:
    """How a tensor's memory is made: by a tensor with values or an operator; `before` is the memory it overwrites."""

    given: Tensor | None = None
    func: Any = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None
    like: "View | None" = None
    before: "Recipe | None" = None
    was_read: bool = False  # whether code has read `given`, or what was made of it
    of_batch: str = ""  # name of `given` in the batch
    closed: bool = False  # whether `given` must not be read


@dataclass(eq=False)
class View:
    """Layout of a tensor in its memory; `recipe` is None for the memory that an operator writes into."""

    recipe: Recipe | None
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def on(self, memory: torch.UntypedStorage) -> Tensor:
        """Return the tensor on real memory."""
        return torch.empty(0, dtype=self.dtype).set_(memory, self.offset, self.shape, self.stride)


class DataDependent(RuntimeError):
    """A step branches on a value that is unknown, or that may change in another step."""


def give_values(fake: Tensor, tensor: Tensor, of_batch: str = "") -> None:
    """Give a fake tensor the values of a tensor; those of a batch are read only as `batch_values.py` allows."""
    recipe = Recipe(given=tensor.detach(), of_batch=of_batch, closed=bool(of_batch))
    fake.untyped_storage().recipe = recipe  # type: ignore[attr-defined]


def recipe_of(tensor: Tensor) -> Recipe | None:
    """Return how a tensor's memory is made; None if its values are unknown."""
    if type(tensor) is not FakeTensor:
        # a constant that is neither of the module nor of the batch
        found = (
            Recipe(given=tensor) if type(tensor) is Tensor and not (tensor.requires_grad or tensor.is_meta) else None
        )
    elif tensor.constant is not None:
        return Recipe(given=tensor.constant)
    elif tensor.layout is torch.strided:
        found = getattr(tensor.untyped_storage(), "recipe", None)
    else:
        return None
    # a conjugate or negative view shares the memory of its base
    return None if found is None or tensor.is_conj() or tensor.is_neg() else found


def note(func: OpOverload, args: Any, kwargs: Any, result: Any) -> None:
    """Record how the result of an operator is made, and the arguments that it writes to.

    Raises:
        DataDependent: The number of entries that it makes depends on values.
    """
    if func._opname.startswith("_to_sparse"):
        raise DataDependent("a sparse tensor is made of a dense one")
    written = places_written(func)
    # most operators read a tensor whose values are unknown, and the first one says so
    if not written and args and type(args[0]) is FakeTensor and recipe_of(args[0]) is None:
        return
    given = tensors_of((*args, *kwargs.values()))
    known = all(recipe_of(tensor) is not None for tensor in given)
    if not (known or written):
        return
    known = known and func not in _EMPTY and torch.Tag.nondeterministic_seeded not in func.tags
    for tensor in tensors_written(func, args, kwargs):
        # a recipe describes a write to the first argument only; values of other written memory become unknown
        after = None
        if known and tensor is args[0]:
            # None stands for the copy that `_made` writes into: other recipes still read the earlier memory
            into = _view(tensor)
            before, into.recipe = into.recipe, None
            seen_args, seen_kwargs = (into, *tree_map(_seen, args[1:])), tree_map(_seen, kwargs)
            after = Recipe(func=func, args=seen_args, kwargs=seen_kwargs, before=before)
        memory: Any = tensor.untyped_storage()
        if getattr(memory, "recipe", None) is not None:
            memory.recipe = after
            if hasattr(memory, "unowned"):
                memory.unowned.latest = after
    if known and not written and type(result) is FakeTensor:
        memory = result.untyped_storage()
        # a view shares its storage and recipe, so only new memory gets one
        if all(tensor.untyped_storage()._cdata != memory._cdata for tensor in given):
            memory.recipe = Recipe(
                func=func, args=tree_map(_seen, args), kwargs=tree_map(_seen, kwargs), like=_view(result)
            )


def in_a_count(tensor: Tensor) -> bool:
    """Whether a tensor is a fake one of a counted step, which gets what the values of its batch decide."""
    return getattr(getattr(tensor, "fake_mode", None), "valid", False)


class OwnReads:
    """What a step reads and changes: buffers of a copied module, and `unowned` tensors of its attributes."""

    def __init__(self, module: nn.Module, unowned: Mapping[int, "Unowned"]) -> None:
        self._module, self._before, self._unowned = module, _buffers(module), unowned

    @property
    def names(self) -> list[str]:
        """Names of those that were read, and have other values than when this object was made."""
        now, before = _buffers(self._module), self._before.items()
        names = [name for name, one in before if one is not None and one.was_read and now.get(name) is not one]
        others = (one for one in self._unowned.values() if one.first.was_read and one.latest is not one.first)
        return sorted([*names, *(f"a tensor {list(one.real.shape)}, which is no buffer" for one in others)])


class Unowned:
    """A real tensor that no module owns, such as one in a list; fake tensors of it live no longer than an operator.

    Attributes:
        real: The tensor, which keeps its memory alive.
        first, latest: Its values at first, and after what the step has written; None if they are unknown.
    """

    def __init__(self, real: Tensor) -> None:
        self.real, self.first = real, Recipe(given=real)
        self.latest: Recipe | None = self.first

    def give(self, fake: Tensor) -> None:
        """Give the values to a fake tensor of this one, whose writes are noted here."""
        memory: Any = fake.untyped_storage()
        memory.recipe, memory.unowned = self.latest, self


def _buffers(module: nn.Module) -> dict[str, Recipe | None]:
    # from the dicts: a class may override `named_buffers`
    children = ((f"{fqn}." if fqn else "", child._buffers) for fqn, child in module.named_modules())
    return {
        f"{prefix}{name}": getattr(one.untyped_storage(), "recipe", None)
        for prefix, own in children
        for name, one in own.items()
        if one is not None and one.layout is torch.strided
    }


def read_of(func: OpOverload, args: Any, kwargs: Any) -> Recipe | None:
    """Return the recipe of an operator that returns a number; None if the values that it reads are unknown."""
    if any(recipe_of(tensor) is None for tensor in tensors_of((*args, *kwargs.values()))):
        return None
    return Recipe(func=func, args=tree_map(_seen, args), kwargs=tree_map(_seen, kwargs))


def number_of(read: Recipe) -> Any:
    """Compute the number of `read_of`; None if it is unknown."""
    with torch.no_grad():
        found = _called(read, None, {})
    return None if isinstance(found, Tensor) else found


def leaves_of(recipe: Recipe) -> list[Recipe]:
    """Return the recipes of the tensors with values that a recipe is made of."""
    waiting, seen, found = [recipe], set[int](), list[Recipe]()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if one.func is None:
            found.append(one)
            continue
        views = (value for value in tree_leaves((one.args, one.kwargs)) if isinstance(value, View))
        waiting += [part for part in (*(view.recipe for view in views), one.before) if part is not None]
    return found


def _view(tensor: Tensor) -> View:
    shape, offset = tuple(tensor.shape), int(tensor.storage_offset())
    return View(recipe_of(tensor), shape, tensor.stride(), offset, tensor.dtype)


def _seen(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _view(value)
    return torch.device("cpu") if isinstance(value, torch.device) else value


def memory_of(recipe: Recipe, known: dict[int, torch.UntypedStorage | None]) -> torch.UntypedStorage | None:
    """Return the memory of a recipe, with values; None if they are unknown."""
    if id(recipe) not in known:
        known[id(recipe)] = _made(recipe, known)
    return known[id(recipe)]


def _made(recipe: Recipe, known: dict[int, torch.UntypedStorage | None]) -> torch.UntypedStorage | None:
    if recipe.func is None:
        if recipe.given is None or recipe.closed:
            return None
        # a batch is another one in the next step anyway
        recipe.was_read = not recipe.of_batch
        # the storage, because views have offsets in it
        found: torch.UntypedStorage = recipe.given.untyped_storage().cpu()  # type: ignore[no-untyped-call]
        return found
    if recipe.like is not None and recipe.like.dtype.itemsize * math.prod(recipe.like.shape) > MOST_BYTES:
        return None
    into = None
    if recipe.before is not None:
        earlier = memory_of(recipe.before, known)
        if earlier is None:
            return None
        # other recipes still need the earlier memory
        into = earlier.clone()  # type: ignore[no-untyped-call]
    result = _called(recipe, into, known)
    # an in-place operator has no `like`: its result is the memory that it received
    if result is None or recipe.like is None:
        return None if result is None else into
    # recipes run on the CPU, where the layout may differ from that of the fake result: views would then read other
    # entries
    where = (tuple(result.shape), result.stride(), int(result.storage_offset()), result.dtype)
    expected = (recipe.like.shape, recipe.like.stride, recipe.like.offset, recipe.like.dtype)
    made: torch.UntypedStorage = result.untyped_storage()
    return made if where == expected else None


def _called(recipe: Recipe, into: torch.UntypedStorage | None, known: dict[int, torch.UntypedStorage | None]) -> Any:
    """Run a recipe's operator on values; return None if one of them is unknown."""
    unknown = False

    def real(value: Any) -> Any:
        nonlocal unknown
        if not isinstance(value, View):
            return value
        memory = into if value.recipe is None else memory_of(value.recipe, known)
        unknown |= memory is None
        return value if memory is None else value.on(memory)

    args, kwargs = tree_map(real, (recipe.args, recipe.kwargs or {}))
    return None if unknown else recipe.func(*args, **kwargs)


class _Unread:
    """Unknown number: arithmetic returns further unknown numbers, and operations that need the value raise."""

    def _number(self, *others: Any) -> Any:
        return UnreadFloat() if isinstance(self, float) or any(isinstance(x, float) for x in others) else UnreadInt()

    def _ratio(self, *others: Any) -> Any:
        return UnreadFloat()

    def _needs_value(self, *others: Any) -> NoReturn:
        raise DataDependent("a number from .item() decides what is computed")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __neg__ = __pos__ = __abs__ = _number
    __truediv__ = __rtruediv__ = __pow__ = __rpow__ = _ratio
    __bool__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __hash__ = _needs_value
    __int__ = __index__ = __float__ = __round__ = __trunc__ = __floor__ = __ceil__ = _needs_value
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __divmod__ = __rdivmod__ = _needs_value
    is_integer = as_integer_ratio = hex = _needs_value

    def __repr__(self) -> str:
        return "unread"

    def __format__(self, spec: str) -> str:
        return "unread"


class UnreadFloat(_Unread, float):
    """Unknown float for loggers and torch; torch reads 1, which is finite and not zero."""

    def __new__(cls) -> "UnreadFloat":  # noqa: D102
        return super().__new__(cls, 1.0)

    def __reduce__(self) -> Any:
        return UnreadFloat, ()


class UnreadInt(_Unread):
    """Unknown integer; not an int for torch, because it might be used as a length."""


@contextmanager
def numbers_may_be_taken() -> Iterator[None]:
    """Let `item()` of fake tensors return placeholders while a step is counted; f-strings call it, as with values."""
    usual, usual_text = FakeTensor.item, cast(Any, FakeTensor).__format__

    def item(tensor: FakeTensor) -> Any:
        if answers_now() is not None:
            # a number that the forward pass does not read, such as that of a gradient, is unknown
            with suppress(DataDependentOutput):
                return usual(tensor)
        recipe = recipe_of(tensor)
        may_be_read = recipe is not None and not any(leaf.closed for leaf in leaves_of(recipe))
        if tensor.numel() != 1 or tensor.is_complex() or may_be_read:
            return usual(tensor)
        if tensor.is_floating_point() and sys._getframe(1).f_globals.get("__name__") in SCALES_UPDATES:
            return 1.0
        return UnreadFloat() if tensor.is_floating_point() else UnreadInt()

    def text(tensor: FakeTensor, spec: str) -> str:
        return str(usual_text(tensor, spec) if tensor.dim() else format(tensor.item(), spec))

    with replacing(FakeTensor, item=item, __format__=text):
        yield
