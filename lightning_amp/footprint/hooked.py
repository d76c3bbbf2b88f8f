"""List the hooks of a module for error messages."""

from collections.abc import Iterable
from typing import Any

from torch import nn

OF_PROFILER = "PyTorchProfiler's hooks (PyTorchProfiler(record_module_names=False) has none)"


def hooked(parts: Iterable[nn.Module], kinds: Iterable[str]) -> list[str]:
    """Kinds of hooks that some modules have; of Lightning's PyTorchProfiler, which hangs them on all, its name.

    Args:
        parts: The modules.
        kinds: Names of the tables that a module has of its hooks.
    """
    found = {
        kind.strip("_"): hook for part in parts for kind in kinds for hook in getattr(part, kind).values()
    }
    return [OF_PROFILER] if any(_is_of_profiler(hook) for hook in found.values()) else list(found)


def _is_of_profiler(hook: Any) -> bool:
    owner = getattr(getattr(hook, "func", None), "__self__", None)
    return type(owner).__name__ == "RegisterRecordFunction"
