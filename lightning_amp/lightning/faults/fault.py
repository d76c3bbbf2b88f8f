"""Define `Fault`: which rank ended the run, on which machine, and what it was doing."""

import os
import platform
import re
from dataclasses import dataclass

import torch
from torch.distributed import DistError

LONGEST = 600
"""Characters of an error's text that are passed on."""

OF_COMMUNICATION = re.compile(
    r"gloo|nccl|c10d|connection (closed|reset|refused)|broken pipe|socket|process group", re.IGNORECASE
)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One rank's end.

    Attributes:
        rank, host: The rank, its machine and process.
        what: What happened to it, as the rest of a sentence.
        asked: Whether a person has ended the run, who waits for it.
    """

    rank: int
    host: str
    what: str
    asked: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host}) {self.what}"


def this_host() -> str:
    """Machine and process."""
    return f"{platform.node()}, process {os.getpid()}"


def text_of(exception: BaseException) -> str:
    """Kind and text of an error, not endlessly long."""
    text = f"{type(exception).__name__}: {exception}".strip().rstrip(":")
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def is_of_communication(exception: BaseException) -> bool:
    """Whether an error may be nothing but the consequence of another rank's end."""
    if isinstance(exception, DistError):
        return True
    return isinstance(exception, RuntimeError | OSError) and bool(OF_COMMUNICATION.search(str(exception)))


def is_out_of_memory(exception: BaseException) -> bool:
    """Whether an error says that memory could not be had, on whichever device."""
    if isinstance(exception, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(exception, RuntimeError) and "allocate memory" in str(exception)
