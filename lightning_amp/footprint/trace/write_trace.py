"""Choose the form of a file of a counted step by its name: torch's memory viewer, or Perfetto and Chrome."""

from collections.abc import Callable
from pathlib import Path

from lightning_amp.errors import PlanError
from lightning_amp.footprint.trace.memory_snapshot import memory_snapshot
from lightning_amp.footprint.trace.step_trace import StepTrace
from lightning_amp.footprint.trace.trace_events import trace_events

FORMS: dict[str, Callable[[StepTrace], bytes]] = {".pickle": memory_snapshot, ".json": trace_events}
"""Content of a file, by the ending of its name."""


def form_of(path: Path) -> Callable[[StepTrace], bytes]:
    """Return what makes the content of a file; the ending of its name decides.

    Raises:
        PlanError: The ending is none of `FORMS`.
    """
    if path.suffix not in FORMS:
        raise PlanError(
            f"a trace cannot be written to {str(path)!r}: its name ends in {path.suffix!r}; give .pickle for torch's"
            " memory viewer (pytorch.org/memory_viz), or .json for Perfetto (ui.perfetto.dev) and Chrome"
        )
    return FORMS[path.suffix]
