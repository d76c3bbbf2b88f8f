"""Count a training step's bytes while it runs, stop it above a budget, and describe why and where a step failed."""

import linecache
import os
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from traceback import walk_tb
from typing import Any

import lightning
import torch
from torch import Tensor, nn

from lightning_amp._torch import has_no_values
from lightning_amp.footprint.module_profile import ACTIVATIONS, BATCH, FORWARD, HELD, KINDS, STATE, TEMPORARIES
from lightning_amp.footprint.step_recorder import StepRecorder
from lightning_amp.quantities import format_bytes

PATIENCE = 50
"""Milliseconds to wait for another thread to release tensors."""


class StepOverBudget(MemoryError):
    """A step exceeds its memory budget."""


class BoundedStep(StepRecorder):  # type: ignore[no-untyped-call]
    """Recorder of a step with values that stops the step when it exceeds a budget.

    Args:
        module: Module that runs the step.
        budget_bytes: Most bytes alive: parameters, gradients, optimizer state, batch, activations and temporaries.

    Raises:
        StepOverBudget: Raised in the operator whose result exceeds the budget; names it, its module, and bytes by kind.
    """

    # it counts tensors with values only
    counts_repeated = False

    def __init__(self, module: nn.Module, budget_bytes: int) -> None:
        super().__init__(module)
        self._budget, self._bounded = budget_bytes, False

    def start(
        self,
        batch: Any,
        optimizers: Iterable[torch.optim.Optimizer],
        *,
        after: "BoundedStep | None" = None,
        averaged: Iterable[tuple[str, Tensor]] = (),
    ) -> None:
        """Start recording; storages that exist already never raise.

        Args:
            after: Step whose remaining tensors count too.
            averaged: Tensors that callbacks hold, with names.
        """
        self._hold(averaged, STATE)
        super().start(batch, optimizers)
        if after is not None:
            self.inherit(after)
        self._bounded = True

    def kept_bytes(self, optimizers: Iterable[torch.optim.Optimizer]) -> int:
        """Return the bytes that the step leaves beside what every step keeps, and beside its batch."""
        self.hold_gradients()
        self.hold_state(optimizers)
        return sum(life.n_bytes for life in self._of_key.values() if life.kind not in HELD and life.name != BATCH)

    def unbound(self) -> None:
        """Stop enforcing the budget."""
        self._bounded = False

    def _count(self, tensors: Iterable[Tensor], given: Collection[int] = ()) -> None:
        # DTensor computes the shape of an operator's result on fake tensors, and placeholders of a pipeline stage have
        # shapes only
        super()._count((tensor for tensor in tensors if not has_no_values(tensor)), given)

    def _born(self, key: int, n_bytes: int, tensor: Tensor | None) -> None:
        super()._born(key, n_bytes, tensor)
        if not self._bounded:
            return
        for _ in range(PATIENCE):
            # `_count` adds the bytes of a storage after `_born`, so they are not in `current` yet
            if self.current + n_bytes <= self._budget:
                return
            # the thread of a finished collective releases its tensors soon
            time.sleep(0.001)
        # raise once: later operators may belong to the caller's handling of the error
        self.unbound()
        new, held = self._of_key[key], dict.fromkeys(KINDS, 0)
        for other, life in self._of_key.items():
            if other != key:
                made = ACTIVATIONS if self.work[life.birth][0] == FORWARD else TEMPORARIES
                held[life.kind or made] += life.n_bytes
        there = ", ".join(f"{format_bytes(n)} of {kind}" for kind, n in held.items() if n)
        raise StepOverBudget(
            f"{new.name} in {new.fqn or 'the module itself'} made a tensor {list(new.shape)} {new.dtype} of"
            f" {format_bytes(n_bytes)} in addition to {there}; allowed are {format_bytes(self._budget)}"
        )


# absolute folders, because a user's own folder may be called lightning
OURS = str(Path(__file__).parents[1])
FOLDERS = (*torch.__path__, *lightning.__path__, OURS)
# torch's and lightning's without a separator: torchmetrics and lightning_utilities are library code too
LIBRARIES = (*torch.__path__, *lightning.__path__, f"{OURS}{os.sep}")
"""Prefixes of library code, which is skipped when an error is traced to the user's code."""
READS = ("DataDependent", "_local_scalar_dense", ".item()", ".numpy()", "data-dependent")
SHAPES = ("DynamicOutputShape",)
UNREAD = "known_values.Unread"
DISTRIBUTIONS = "/torch/distributions/"
CHECKS = (":__init__", ":_validate_sample", ":check")
"""Functions of `torch.distributions` that read values; QuickFakes lets most of its checks pass."""
TRANSFORM = "/torch/_functorch/"


def why_values(error: Exception) -> str:
    """Describe why a step cannot run on tensors that have a shape and no values."""
    said, at = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]:.120}", users_line(error)
    if UNREAD in said:
        # an operator in C++ was given a placeholder (known_values.py)
        said = ".item() of a tensor is the argument of an operator"
    place = f" ({at:.80})" if at else ""
    if any(DISTRIBUTIONS in place and place.endswith(CHECKS) for place in _functions(error)):
        return (
            f"torch.distributions checks the values of its arguments{place}: validate_args=False leaves the check out"
            f" [{said}]"
        )
    if any(word in said for word in READS):
        return f"it reads the value of a tensor, as by .item() or `if tensor:`{place} [{said}]"
    if any(word in said for word in SHAPES):
        return f"the shape of a tensor depends on values, as of x[mask]{place} [{said}]"
    return f"it fails on tensors without values{place} [{said}]"


def of_transform(error: Exception) -> bool:
    """Whether an error was raised in a function that torch.func has transformed."""
    return any(TRANSFORM in place for place in _functions(error))


def _functions(error: Exception) -> list[str]:
    """Return the functions of an error's traceback, as "torch/nn/functional.py:relu"."""
    codes = [frame.f_code for frame, _ in walk_tb(error.__traceback__)]
    return [f"{code.co_filename}:{code.co_name}".replace("\\", "/") for code in codes]


def users_line(error: BaseException) -> str:
    """Return the user's last line in a traceback, as "model.py:41: scores = q @ k"; "" if there is none."""
    lines = [(frame.f_code.co_filename, number) for frame, number in walk_tb(error.__traceback__)]
    own = [(file, number) for file, number in lines if not file.startswith((*LIBRARIES, "<"))]
    if not own:
        return ""
    file, number = own[-1]
    return f"{Path(file).name}:{number}: {linecache.getline(file, number).strip()}"
