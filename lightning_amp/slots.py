"""Find the slots of a class, in which its objects keep what others keep in a dictionary."""

from functools import cache
from types import MemberDescriptorType
from typing import Any


@cache
def slots_of(kind: type) -> tuple[str, ...]:
    """Names of the slots of a class: `__slots__`, and the arguments that a `partial` binds.

    Left out is where CPython keeps something for itself, such as an address in a `partial`, which a call may change.
    """
    members = (n for base in kind.__mro__ for n, own in vars(base).items() if isinstance(own, MemberDescriptorType))
    return tuple(name for name in members if not name.endswith("offset__"))


def held_in_slots(value: Any) -> dict[str, Any]:
    """Return what an object holds in slots, by name.

    Left out are slots whose names begin with two underscores, which belong to functions and methods, and empty ones.
    """
    kind: Any = type(value)
    names = (name for name in slots_of(kind) if name[:2] != "__" and hasattr(value, name))
    return {name: getattr(value, name) for name in names}
