"""Find a block whose forward checkpoints itself, as transformers' layers do if the user has switched that on.

A graph of such a forward has the operators and no checkpoint, so in chunks the block would keep what it does not keep
by itself. A checkpoint of this package is no part of it.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from lightning_amp._torch import CheckpointFrame
from lightning_amp.holding import replacing

WHY = (
    "runs under torch.utils.checkpoint by itself; switch that off, as by gradient_checkpointing_disable(), and"
    " recompute can be planned for it"
)


@contextmanager
def refusing_checkpoints(refuse: Callable[..., Any]) -> Iterator[None]:
    """Call `refuse` where code of others begins a checkpoint in this context."""
    begin = CheckpointFrame.__init__

    def begun(*args: Any, **kwargs: Any) -> None:
        (refuse if _is_of_others() else begin)(*args, **kwargs)

    with replacing(CheckpointFrame, __init__=begun):
        yield


def _is_of_others() -> bool:
    """Whether the first function outside of torch on the stack is not of this package."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "torch":
        frame = frame.f_back
    return not frame.f_globals.get("__name__", "").startswith("lightning_amp.")
