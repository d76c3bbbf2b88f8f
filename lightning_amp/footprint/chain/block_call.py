"""Describe a block's call in a step without its tensors: shapes, dtypes, and which arguments are the same tensor."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_amp._torch import FakeTensorMode, disable_torch_function, tree_leaves, tree_map

Autocast = tuple[tuple[str, bool, torch.dtype], ...]
"""Device types, whether autocast is enabled for each, and its dtype."""


@dataclass(frozen=True, slots=True)
class TensorLike:
    """Metadata of a tensor; `same` is equal for all uses of one tensor in a call."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    same: int

    def make(self) -> Tensor:
        """Return an empty tensor with this metadata; it is fake if a fake mode is active."""
        learns = self.requires_grad
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device, requires_grad=learns)


def likeness(values: Any) -> Any:
    """Replace every tensor in nested values by a `TensorLike`, or by None if it is not dense."""
    first: dict[int, int] = {}

    def like(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.layout is not torch.strided:
            return None
        shape = tuple(value.shape), tuple(value.stride()), value.dtype, value.device
        return TensorLike(*shape, value.requires_grad, first.setdefault(id(value), len(first)))

    # a subclass must not see that its strides are read: a product that `logits` has put off would be computed
    with disable_torch_function():
        return tree_map(like, values)


def autocast_now(kinds: Iterable[str] = ("cpu", "cuda")) -> Autocast:
    """Return the autocast state of some device types."""
    known = filter(torch.amp.is_autocast_available, kinds)
    return tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in known)


@contextmanager
def autocast_again(found: Autocast, *, cache_enabled: bool | None = None) -> Iterator[None]:
    """Restore an earlier autocast state."""
    with ExitStack() as stack:
        for kind, enabled, dtype in found:
            stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype, cache_enabled=cache_enabled))
        yield


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCall:
    """One call of a block in a forward pass with gradients.

    Attributes:
        fqn: Name of the block.
        args: Positional arguments, with a `TensorLike` in place of every tensor.
        kwargs: Keyword arguments, likewise.
        autocast: Result of `autocast_now`.
        sparse: Whether an argument is a tensor that is not dense, which a `TensorLike` cannot describe.
    """

    fqn: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    autocast: Autocast
    sparse: bool = False

    @classmethod
    def of(cls, fqn: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> "BlockCall":
        """Describe a call that is about to be made."""
        found = likeness((tuple(args), dict(kwargs)))
        return cls(
            fqn=fqn,
            args=found[0],
            kwargs=found[1],
            autocast=autocast_now(),
            sparse=any(isinstance(v, Tensor) and v.layout is not torch.strided for v in tree_leaves((args, kwargs))),
        )

    def arguments(self, fake: FakeTensorMode) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return args and kwargs with fake tensors in place of every `TensorLike`."""
        made: dict[int, Tensor] = {}

        def tensor(value: Any) -> Any:
            if not isinstance(value, TensorLike):
                return value
            if value.same not in made:
                made[value.same] = value.make()
            return made[value.same]

        with fake:
            found = tree_map(tensor, (self.args, dict(self.kwargs)))
        return found[0], found[1]

    @contextmanager
    def precision(self) -> Iterator[None]:
        """Enable gradients, and restore the autocast state of the call."""
        with torch.enable_grad(), autocast_again(self.autocast):
            yield
