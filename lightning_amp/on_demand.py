"""Define a mapping whose values are computed when they are asked for."""

from collections import ChainMap
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar, cast

V = TypeVar("V")


class OnDemand(Mapping[str, V]):
    """Values that are computed once, when they are first asked for.

    Args:
        names: Names that may have a value.
        compute: Name -> its value; None if it has none.

    Raises:
        RuntimeError: `compute` has raised a KeyError, which would be read as a name without a value.
    """

    def __init__(self, names: Collection[str], compute: Callable[[str], V | None]) -> None:
        self._names, self._compute, self._computed = names, compute, dict[str, V | None]()

    def __getitem__(self, name: str) -> V:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._computed:
            try:
                self._computed[name] = self._compute(name)
            except KeyError as error:
                raise RuntimeError(f"KeyError: {error} while {name!r} was computed") from error
        found = self._computed[name]
        if found is None:
            raise KeyError(name)
        return found

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @property
    def computed(self) -> Collection[V]:
        """Values that were asked for."""
        return [value for value in self._computed.values() if value is not None]


def first_of(*values: Mapping[str, V]) -> Mapping[str, V]:
    """Return the mappings as one, which asks them in this order; nothing is computed yet."""
    return ChainMap(*cast(Any, values))


def computed_in(values: Mapping[str, V]) -> Iterator[V]:
    """Yield the values that exist already."""
    if isinstance(values, ChainMap):
        for part in values.maps:
            yield from computed_in(part)
    else:
        yield from values.computed if isinstance(values, OnDemand) else values.values()
