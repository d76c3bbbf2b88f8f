"""Run a step of a copy in the user's process: suppress its output, and restore what it changes.

    messages    warnings, log records, prints and questions of this thread; what a library says once, it can say later
    files       written anew they are in memory, and are read from there; no folder is changed
    settings    torch's, the environment, the current folder, signal handlers, random streams
    state       of the files and classes of the step (as_before.py)
    others      ranks, which do not run this step; hooks of all modules; dispatch modes that are active
    compilers   what torch.compile has wrapped runs as it was before

Known limits: what the step sends to other processes, as `wandb.log` called directly; files written by other means than
Python's `open` and torch's `save`; threads that it starts. While it runs, warnings of other threads are lost.
"""

import builtins
import io
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import WarningCache  # type: ignore[attr-defined]
from torch.backends import cudnn
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

from lightning_amp._torch import is_watched, unseen
from lightning_amp.footprint.copies.as_before import as_before, refill
from lightning_amp.holding import replacing
from lightning_amp.random_streams import isolated_random_streams

FOLDER_CHANGES = ("mkdir", "rmdir", "remove", "unlink", "rename", "replace", "symlink", "link")
"""Functions of `os`."""


@contextmanager
def as_guest(*owners: Any) -> Iterator[None]:
    """Let nothing of the user's notice what is done in this context; `owners` take part, as of `as_before`."""
    with (
        as_before(*owners),
        _settings_as_before(),
        isolated_random_streams(),
        _without_messages(),
        _without_files(),
        _without_others(),
        unseen(),
        # what torch.compile has wrapped runs as it was before, for nothing is compiled for a profile
        torch.compiler.set_stance("force_eager"),
    ):
        yield


def _matmul_precision() -> str | None:
    # an error where torch's newer setting is in use, which then is left as the step leaves it
    with suppress(RuntimeError):
        return torch.get_float32_matmul_precision()
    return None


def _set_matmul_precision(precision: str | None) -> None:
    if precision is not None:
        torch.set_float32_matmul_precision(precision)


def _set_handlers(handlers: dict[int, Any]) -> None:
    if threading.current_thread() is not threading.main_thread():
        # where a step cannot have set one
        return
    for number, handler in handlers.items():
        # None is a handler that is not Python's
        if handler is not None and signal.getsignal(number) != handler:
            signal.signal(number, handler)


SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_default_device, lambda device: torch.set_default_device(None if device.type == "cpu" else device)),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.is_warn_always_enabled, torch.set_warn_always),
    (_matmul_precision, _set_matmul_precision),
    *((partial(getattr, cudnn, name), partial(setattr, cudnn, name)) for name in ("benchmark", "deterministic")),
    (lambda: dict(os.environ), partial(refill, os.environ)),
    (os.getcwd, os.chdir),
    (lambda: {number: signal.getsignal(number) for number in signal.valid_signals()}, _set_handlers),
    (lambda: list(warnings.filters), lambda filters: refill(warnings.filters, filters)),
)
"""What reads a setting, and what sets it."""


@contextmanager
def _settings_as_before() -> Iterator[None]:
    before = [read() for read, _ in SETTINGS]
    try:
        yield
    finally:
        for (read, write), value in zip(SETTINGS, before, strict=True):
            if read() != value:
                write(value)


def _nothing(*_: Any, **__: Any) -> None:
    """What is done in the place of what a guest leaves out."""


def _elsewhere(function: Callable[..., Any], instead: Callable[..., Any] = _nothing) -> Callable[..., Any]:
    """What another function is for this thread, and what this one is for others."""
    here = threading.get_ident()

    def called(*args: Any, **kwargs: Any) -> Any:
        return (instead if threading.get_ident() == here else function)(*args, **kwargs)

    return called


class _OfOthers:
    """A stream that takes what other threads write."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.write = _elsewhere(stream.write, len)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _without_messages() -> Iterator[None]:
    """Neither say anything nor ask; what is said once in a process counts as not said."""
    streams = [name for name in ("stdout", "stderr") if getattr(sys, name) is not None]
    # put in by hand: whatever else changes filters lets Python forget what it has said before
    warnings.filters.insert(0, ("ignore", None, Warning, None, 0))  # type: ignore[attr-defined]
    # torch's kernels remember what they have said once, unless they say it always
    torch.set_warn_always(True)
    with (
        replacing(WarningCache, add=_nothing),
        replacing(logging.Logger, handle=_elsewhere(logging.Logger.handle), warning_once=_nothing),
        # who asks finds the end of a file, and goes on
        replacing(sys, stdin=io.StringIO(), breakpointhook=_nothing),
        replacing(sys, **{name: _OfOthers(getattr(sys, name)) for name in streams}),
    ):
        yield


class _Files:
    """What is written in the place of files, and what is read of them again."""

    def __init__(self) -> None:
        self._written: dict[str, bytes] = {}
        self._open, self._save = builtins.open, torch.save

    def open(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        """`open`; a file that has no name, or is changed in its middle, is opened itself."""
        named = not isinstance(file, int) and not kwargs.get("opener")
        name = str(Path(os.fsdecode(file)).resolve()) if named else ""
        writes = bool(set(mode) & set("wax"))
        if not named or not (writes or name in self._written):
            return self._open(file, mode, *args, **kwargs)
        raw = _Written(self._written, name) if writes else io.BytesIO(self._written[name])
        return raw if "b" in mode else io.TextIOWrapper(raw, encoding="utf-8")

    def save(self, what: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        """`torch.save`; in a step nothing, for fake tensors have no bytes."""
        if not is_watched():
            with self.open(file, "wb") if isinstance(file, str | os.PathLike) else nullcontext(file) as opened:
                self._save(what, opened, *args, **kwargs)


class _Written(io.BytesIO):
    """A file that is there once it is closed."""

    def __init__(self, written: dict[str, bytes], name: str) -> None:
        super().__init__()
        self._written, self._name = written, name

    def close(self) -> None:
        if not self.closed:
            self._written[self._name] = self.getvalue()
        super().close()


@contextmanager
def _without_files() -> Iterator[None]:
    """Leave files and folders as they are."""
    files = _Files()
    opened = _elsewhere(builtins.open, files.open)
    changes = {name: _elsewhere(getattr(os, name)) for name in FOLDER_CHANGES}
    with (
        replacing(builtins, open=opened),
        replacing(io, open=opened),
        replacing(os, **changes),
        replacing(torch, save=_elsewhere(torch.save, files.save)),
    ):
        yield


@contextmanager
def _without_others() -> Iterator[None]:
    """Put out of sight who else takes part in steps: other ranks, where a collective is an error then, and hooks of all
    modules and optimisers.
    """
    hooks = [
        value
        for file in (torch_module, torch_optimizer)
        for name, value in vars(file).items()
        if name.startswith("_global_") and isinstance(value, dict)
    ]
    before = [dict(registered) for registered in hooks]
    # without a world `torch.distributed.is_initialized()` is False, as in a run of one process
    world, dist.GroupMember.WORLD = dist.GroupMember.WORLD, None
    for registered in hooks:
        registered.clear()
    try:
        yield
    finally:
        dist.GroupMember.WORLD = world
        for registered, own in zip(hooks, before, strict=True):
            registered.clear()
            registered.update(own)
