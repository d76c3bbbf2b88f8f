"""How much host memory the techniques of a rank may take together: option `host_memory`, or most of what is free."""

from dataclasses import replace
from os import environ
from typing import Any, TypeVar

import psutil

from lightning_amp.errors import PlanError
from lightning_amp.quantities import parse_bytes

S = TypeVar("S", bound=Any)
SHARE = 0.8
"""Share of the host's free memory that the ranks of a node take at most."""


def free_bytes() -> int:
    """Return the bytes of host memory that this process may take."""
    return int(SHARE * psutil.virtual_memory().available / int(environ.get("LOCAL_WORLD_SIZE", "1")))


def with_requested(spec: S, request: Any) -> tuple[S, bool]:
    """Return a spec with `host_memory` of a request; the rest is chosen for the step.

    Raises:
        PlanError: It is no size.
    """
    found = getattr(request, "host_memory", None)
    if found is None:
        return spec, False
    if isinstance(found, bool) or not isinstance(found, int | str):
        raise PlanError(f'host_memory={found!r} is not supported; allowed is a size such as "64GiB", or None')
    return replace(spec, host_memory=parse_bytes(str(found))), False
