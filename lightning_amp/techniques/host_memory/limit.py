"""How much host memory the techniques of a rank may take together: option `host_memory`, or most of what is free."""

from os import environ
from typing import Any

import psutil

from lightning_amp.errors import PlanError
from lightning_amp.quantities import parse_bytes

SHARE = 0.8
"""Share of the host's free memory that the ranks of a node take at most."""


def free_bytes() -> int:
    """Return the bytes of host memory that this process may take."""
    return int(SHARE * psutil.virtual_memory().available / int(environ.get("LOCAL_WORLD_SIZE", "1")))


def requested_bytes(request: Any) -> int | None:
    """Return `host_memory` of a request; None if it is not given.

    Raises:
        PlanError: It is no size.
    """
    found = getattr(request, "host_memory", None)
    if found is None:
        return None
    if isinstance(found, bool) or not isinstance(found, int | str):
        raise PlanError(f'host_memory={found!r} is not supported; allowed is a size such as "64GiB", or None')
    return parse_bytes(str(found))
