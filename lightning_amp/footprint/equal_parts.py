"""Let a count of bytes leave out parts of a computation that need the same memory as others.

A chunk of attention or of a likelihood is computed as often as there are chunks, with equal bytes. A count needs a few
of them, which takes a fraction of the time; in the time of a step one is counted for all (`standing_for`). A count that
is compared with a run, operator by operator, needs all.
"""

from contextlib import AbstractContextManager
from contextvars import ContextVar

from torch import Tensor

from lightning_amp._torch import has_no_values
from lightning_amp.holding import holding

_LEFT_OUT: ContextVar[bool] = ContextVar("whether parts with equal bytes are left out", default=False)


def leaves_out_equal(like: Tensor) -> bool:
    """Whether parts with equal bytes are left out: of tensors without values that are no fake ones, or in a count."""
    return like.is_meta or (_LEFT_OUT.get() and has_no_values(like))


def leaving_out_equal() -> AbstractContextManager[None]:
    """Leave out parts with equal bytes within the block."""
    return holding(_LEFT_OUT, True)
