"""Find out whether a user's code checkpoints itself, as transformers' layers do if the user has switched that on.

A checkpoint of this package is no part of it.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning_amp._torch import CheckpointFrame
from lightning_amp.holding import replacing

CHECKPOINTS = (
    "runs under torch.utils.checkpoint by itself; switch that off, as by gradient_checkpointing_disable(), and"
    " recompute can be planned for it"
)
"""Why such a block's forward is not run in chunks."""


@contextmanager
def watching_checkpoints(seen: Callable[[], Any]) -> Iterator[None]:
    """Call `seen` where code of others begins a non-reentrant checkpoint in this context."""
    begin = CheckpointFrame.__init__

    def begun(*args: Any, **kwargs: Any) -> None:
        if _is_of_others():
            seen()
        begin(*args, **kwargs)

    with replacing(CheckpointFrame, __init__=begun):
        yield


def _is_of_others() -> bool:
    """Whether the first function outside of torch on the stack is not of this package."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "torch":
        frame = frame.f_back
    return not frame.f_globals.get("__name__", "").startswith("lightning_amp.")
