"""Define the errors that a user can cause; each message states what was found, what is allowed and what to do."""

import difflib
from collections.abc import Iterable


def meant(name: str, known: Iterable[str], *, most: int = 1) -> str:
    """Return the nearest known names, `most` of them, as the end of a message; "" if none is close."""
    # case does not count
    names = {one.lower(): one for one in known}
    near = [repr(names[one]) for one in difflib.get_close_matches(name.lower(), list(names), n=most)]
    return f". Did you mean {' or '.join(near)}?" if near else ""


class AmpError(Exception):
    """Base class of errors caused by a user's mistake; the command line exits with its `status`."""

    status = 2


class DataError(AmpError):
    """A data file or directory cannot be used."""


class PlanError(AmpError):
    """No valid plan exists for the request, or a plan has an invalid or unsupported setting."""


class DoesNotFitError(PlanError):
    """No plan fits the device memory, or whether one does is not known."""

    status = 3


class NoRoomToCountError(PlanError):
    """A step that needs values exceeds the memory in which it may be counted, so that its peak is not known."""


class InstallError(AmpError):
    """A plan does not fit the module it is installed on; the module is unchanged."""


class ModelError(AmpError):
    """A module, its settings, its training step or its batch is not supported."""


class ShardError(AmpError):
    """An operator cannot be computed on the shards of a tensor."""


STATUS_OF_INTERRUPT = 130
"""Exit status of a process that SIGINT has stopped, as in shells."""
