"""Look up what an operator writes to and which generators it draws from, so that it can run a second time."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_amp._torch import OpOverload
from lightning_amp.footprint.live_bytes import has_storage, tensors_of
from lightning_amp.footprint.recompute_state import STATISTICS

COLLECTIVES = ("c10d", "_c10d_functional")


@dataclass(frozen=True, slots=True)
class How:
    """What a kind of operator does.

    Attributes:
        replayable: Whether it may run a second time.
        draws: Whether it draws random numbers.
        in_place: Whether it returns nothing but what it has written to.
        writes: Places and names of arguments that it writes to; None for all of its tensors.
    """

    replayable: bool
    draws: bool
    in_place: bool
    writes: tuple[tuple[int, str], ...] | None

    def written(self, args: Any, kwargs: Any) -> list[Tensor]:
        """The tensors that it writes to."""
        if self.writes is None:
            return tensors_of((args, kwargs))
        return tensors_of([args[i] if i < len(args) else kwargs.get(name) for i, name in self.writes])


@cache
def how_of(func: Any) -> How:
    """What an operator does, which is looked up once."""
    if not isinstance(func, OpOverload):
        return How(replayable=False, draws=False, in_place=False, writes=())
    collective = func.namespace in COLLECTIVES
    # schemas of batch norms do not say that they write to their statistics
    writes = (
        (i, argument.name)
        for i, argument in enumerate(func._schema.arguments)
        if (argument.alias_info is not None and argument.alias_info.is_write) or argument.name in STATISTICS
    )
    return How(
        replayable=not collective,
        draws=torch.Tag.nondeterministic_seeded in func.tags,
        in_place=all(r.alias_info is not None and r.alias_info.is_write for r in func._schema.returns)
        and func._schema.is_mutable,
        # schemas of collectives do not say what they write to
        writes=None if collective else tuple(writes),
    )


def is_plain(x: Tensor) -> bool:
    """Whether a tensor is given by its place in a storage."""
    return has_storage(x) and not x.is_conj() and not x.is_neg()


def version_of(x: Tensor) -> int:
    """Autograd's count of writes to a tensor; inference tensors have none."""
    return 0 if x.is_inference() else x._version


def copied(x: Tensor) -> Tensor:
    """A copy that lies in memory as the tensor does."""
    copy = x.clone()
    if copy.stride() == x.stride():
        return copy
    n = x.untyped_storage().nbytes() // x.element_size()
    return x.as_strided((n,), (1,), 0).clone().as_strided(x.shape, x.stride(), x.storage_offset())


def draws_of(kwargs: Any) -> list[tuple[torch.Generator, Tensor]]:
    """The generators that an operator may draw from, with their states."""
    if (given := kwargs.get("generator")) is not None:
        return [(given, given.get_state())]
    found = [torch.default_generator]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        # the operator may make its tensor on a device that no argument is on
        found += torch.cuda.default_generators
    return [(generator, generator.get_state()) for generator in found]


@contextmanager
def drawing(draws: Sequence[tuple[torch.Generator, Tensor]]) -> Iterator[None]:
    """Let generators draw what they drew, and go on as if they had not."""
    now = [generator.get_state() for generator, _ in draws]
    for generator, state in draws:
        generator.set_state(state)
    try:
        yield
    finally:
        for (generator, _), state in zip(draws, now, strict=True):
            generator.set_state(state)
