"""Describe how a step called a block, without its tensors: shapes, types, and which of them are the same tensor."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_amp._torch import FakeTensorMode, tree_leaves, tree_map

Autocast = tuple[tuple[str, bool, torch.dtype], ...]
"""Kinds of devices, whether autocast is on for them, and its type."""


@dataclass(frozen=True, slots=True)
class Like:
    """A tensor without its memory; `same` is equal for one and the same tensor of a call."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool
    same: int

    def make(self) -> Tensor:
        """A tensor of this kind, of whatever mode is active."""
        learns = self.requires_grad
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device, requires_grad=learns)


def likeness(values: Any) -> Any:
    """Any nesting of values with a `Like` in the place of every tensor, None in that of one that is not dense."""
    first: dict[int, int] = {}

    def like(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.layout is not torch.strided:
            return None
        shape = tuple(value.shape), tuple(value.stride()), value.dtype, value.device
        return Like(*shape, value.requires_grad, first.setdefault(id(value), len(first)))

    return tree_map(like, values)


def autocast_now(kinds: Iterable[str] = ("cpu", "cuda")) -> Autocast:
    """The autocast of some kinds of devices."""
    known = filter(torch.amp.is_autocast_available, kinds)
    return tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in known)


@contextmanager
def autocast_again(found: Autocast, *, cache_enabled: bool | None = None) -> Iterator[None]:
    """Enter an autocast that was on, or off, before."""
    with ExitStack() as stack:
        for kind, enabled, dtype in found:
            stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype, cache_enabled=cache_enabled))
        yield


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockCall:
    """One call of a block in a forward pass with gradients.

    Attributes:
        fqn: Name of the block.
        args: What it was called with, with a `Like` in the place of every tensor.
        kwargs: The same by name.
        autocast: As `autocast_now` said.
        sparse: Whether an argument is a tensor that is not dense, and cannot be described by its shape.
        before: None for a block; for what a module computes after its last block the calls before that one, by name
            with their results, and `args` are the module's, its keywords, and what the last block returned.
    """

    fqn: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    autocast: Autocast
    sparse: bool = False
    before: tuple[tuple[str, Any], ...] | None = None

    @classmethod
    def of(cls, fqn: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> "BlockCall":
        """Of a call that is about to be made."""
        found = likeness((tuple(args), dict(kwargs)))
        return cls(
            fqn=fqn,
            args=found[0],
            kwargs=found[1],
            autocast=autocast_now(),
            sparse=any(isinstance(v, Tensor) and v.layout is not torch.strided for v in tree_leaves((args, kwargs))),
        )

    def arguments(self, fake: FakeTensorMode) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Fake tensors in the place of the tensors."""
        made: dict[int, Tensor] = {}

        def tensor(value: Any) -> Any:
            if not isinstance(value, Like):
                return value
            if value.same not in made:
                made[value.same] = value.make()
            return made[value.same]

        with fake:
            found = tree_map(tensor, (self.args, dict(self.kwargs)))
        return found[0], found[1]

    @contextmanager
    def precision(self) -> Iterator[None]:
        """Gradients and autocast as they were at the call."""
        with torch.enable_grad(), autocast_again(self.autocast):
            yield
