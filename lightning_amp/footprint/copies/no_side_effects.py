"""Run a step of a copied module in the user's process without side effects: suppress output, and restore state.

    messages    warnings, logs, prints and prompts of this thread are suppressed; one-time messages can appear later
    files       that the step writes are in memory, and are read from there; folders do not change
    settings    of torch, environment, current folder, signal handlers and random states are restored
    state       of the step's files and classes is restored (restore_state.py)
    others      other ranks, global hooks and active dispatch modes do not take part in the step
    compilers   modules wrapped by torch.compile run uncompiled

Known limits: messages to other processes, such as a direct call of `wandb.log`; files that are written other than by
Python's `open` and `torch.save`, or in mode "r+"; threads that the step starts. Warnings of other threads are lost.
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
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
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
from lightning_amp.footprint.copies.restore_state import refill, restoring_state
from lightning_amp.holding import holding, replacing
from lightning_amp.random_streams import isolated_random_streams

FOLDER_CHANGES = ("mkdir", "rmdir", "remove", "unlink", "rename", "replace", "symlink", "link")
"""Functions of `os` that are disabled for the step."""
_ON_DISK: ContextVar[bool] = ContextVar("on_disk", default=False)


@contextmanager
def without_side_effects(*owners: Any, alone: bool = True) -> Iterator[None]:
    """Suppress and undo side effects of this context; `owners` take part in the step, as in `restoring_state`.

    Other ranks and global hooks take part if it is not `alone`.
    """
    with (
        restoring_state(*owners),
        _settings_as_before(),
        isolated_random_streams(),
        _without_messages(),
        _without_files(),
        _without_others() if alone else nullcontext(),
        unseen(),
        # compiled modules run uncompiled, because nothing is compiled for a profile
        torch.compiler.set_stance("force_eager"),
    ):
        yield


def _matmul_precision() -> str | None:
    # raises if torch's newer setting is in use, which then is not restored
    with suppress(RuntimeError):
        return torch.get_float32_matmul_precision()
    return None


def _set_matmul_precision(precision: str | None) -> None:
    if precision is not None:
        torch.set_float32_matmul_precision(precision)


def _set_handlers(handlers: dict[int, Any]) -> None:
    if threading.current_thread() is not threading.main_thread():
        # signal handlers can be set in the main thread only
        return
    for number, handler in handlers.items():
        # None is a handler that was not set by Python
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
"""Functions that read and set each setting."""


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
    """Do nothing, in place of a suppressed function."""


def _elsewhere(function: Callable[..., Any], instead: Callable[..., Any] = _nothing) -> Callable[..., Any]:
    """Return a function that calls `instead` in this thread, and `function` in all others."""
    here = threading.get_ident()

    def called(*args: Any, **kwargs: Any) -> Any:
        return (instead if threading.get_ident() == here else function)(*args, **kwargs)

    return called


def _unless_on_disk(function: Callable[..., Any], instead: Callable[..., Any] = _nothing) -> Callable[..., Any]:
    """Return a function as `_elsewhere` does, which calls `function` within `files_on_disk` too."""
    elsewhere = _elsewhere(function, instead)

    def called(*args: Any, **kwargs: Any) -> Any:
        return (function if _ON_DISK.get() else elsewhere)(*args, **kwargs)

    return called


class _OfOthers:
    """Stream that forwards only writes of other threads."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.write = _elsewhere(stream.write, len)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _without_messages() -> Iterator[None]:
    """Suppress messages and prompts, without marking one-time messages as shown."""
    streams = [name for name in ("stdout", "stderr") if getattr(sys, name) is not None]
    # inserted directly: the functions that change filters also reset Python's record of shown warnings
    warnings.filters.insert(0, ("ignore", None, Warning, None, 0))  # type: ignore[attr-defined]
    # torch's kernels record that a warning was shown, unless they always warn
    torch.set_warn_always(True)
    with (
        replacing(WarningCache, add=_nothing),
        replacing(logging.Logger, handle=_elsewhere(logging.Logger.handle), warning_once=_nothing),
        # a prompt reads the end of a file, and continues
        replacing(sys, stdin=io.StringIO(), breakpointhook=_nothing),
        replacing(sys, **{name: _OfOthers(getattr(sys, name)) for name in streams}),
    ):
        yield


class _Files:
    """In-memory files that replace files on disk."""

    def __init__(self) -> None:
        self._written: dict[str, bytes] = {}
        self._open, self._save = builtins.open, torch.save

    def open(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        """Replace `open`: writes go to memory, and are read from there; mode "r+" and descriptors open the file on
        disk.
        """
        # not in memory with "r+": `np.memmap` opens data sets so by default, and maps the descriptor
        named = not isinstance(file, int) and not kwargs.get("opener")
        name = str(Path(os.fsdecode(file)).resolve()) if named else ""
        writes = bool(set(mode) & set("wax"))
        if not named or not (writes or name in self._written):
            return self._open(file, mode, *args, **kwargs)
        raw = _Written(self._written, name) if writes else io.BytesIO(self._written[name])
        return raw if "b" in mode else io.TextIOWrapper(raw, encoding="utf-8")

    def save(self, what: Any, file: Any, *args: Any, **kwargs: Any) -> None:
        """Replace `torch.save`; do nothing in a step on fake tensors, which have no bytes."""
        if not is_watched():
            with self.open(file, "wb") if isinstance(file, str | os.PathLike) else nullcontext(file) as opened:
                self._save(what, opened, *args, **kwargs)


class _Written(io.BytesIO):
    """In-memory file that is stored when it is closed."""

    def __init__(self, written: dict[str, bytes], name: str) -> None:
        super().__init__()
        self._written, self._name = written, name

    def close(self) -> None:
        if not self.closed:
            self._written[self._name] = self.getvalue()
        super().close()


def files_on_disk() -> AbstractContextManager[None]:
    """Let a compiler's cache be written within a step that otherwise writes nothing to disk."""
    return holding(_ON_DISK, True)


@contextmanager
def _without_files() -> Iterator[None]:
    """Redirect writes of files to memory, and disable changes of folders."""
    files = _Files()
    opened = _unless_on_disk(builtins.open, files.open)
    changes = {name: _unless_on_disk(getattr(os, name)) for name in FOLDER_CHANGES}
    with (
        replacing(builtins, open=opened),
        replacing(io, open=opened),
        replacing(os, **changes),
        replacing(torch, save=_elsewhere(torch.save, files.save)),
    ):
        yield


@contextmanager
def _without_others() -> Iterator[None]:
    """Disable other ranks (collectives then raise an error), and global hooks of modules and optimizers."""
    hooks = [
        value
        for file in (torch_module, torch_optimizer)
        for name, value in vars(file).items()
        if name.startswith("_global_") and isinstance(value, dict)
    ]
    before = [dict(registered) for registered in hooks]
    # without a default group, `torch.distributed.is_initialized()` is False, as in a run of one process
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
