"""Let a count of bytes leave out parts of a computation that need the same memory as others.

A chunk of attention or of a likelihood is computed as often as there are chunks, with equal bytes. A count of bytes
needs a few of them, which takes a fraction of the time. A count whose operators are timed needs all.
"""

from contextlib import AbstractContextManager
from contextvars import ContextVar

from torch import Tensor

from lightning_amp._torch import has_no_values
from lightning_amp.holding import holding

_BYTES_ALONE: ContextVar[bool] = ContextVar("whether bytes alone are counted", default=False)


def leaves_out_equal(like: Tensor) -> bool:
    """Whether parts with equal bytes are left out: of tensors without values that are no fake ones, or in a count."""
    return like.is_meta or (_BYTES_ALONE.get() and has_no_values(like))


def counting_bytes_alone() -> AbstractContextManager[None]:
    """Leave out parts with equal bytes within the block."""
    return holding(_BYTES_ALONE, True)
