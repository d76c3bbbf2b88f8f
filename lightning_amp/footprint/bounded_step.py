"""Count the bytes of a training step while it runs, and raise an error where it exceeds a budget."""

import time
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lightning_amp._torch import has_no_values
from lightning_amp.footprint.module_profile import ACTIVATIONS, FORWARD, KINDS, TEMPORARIES
from lightning_amp.footprint.step_recorder import StepRecorder
from lightning_amp.quantities import format_bytes

PATIENCE = 50
"""Milliseconds in which another thread lets go of a tensor that it is done with."""


class StepOverBudget(MemoryError):
    """A step needs more bytes than it may."""


class BoundedStep(StepRecorder):  # type: ignore[no-untyped-call]
    """Counts a step with values from its beginning to its end, and stops it where it exceeds a budget.

    Args:
        module: Whose step it is.
        budget_bytes: The most that may be alive: parameters, gradients, optimiser state, batch and what is made.

    Raises:
        StepOverBudget: By the operator whose result is too much; names it, its module, and what is held by kind.
    """

    def __init__(self, module: nn.Module, budget_bytes: int) -> None:
        super().__init__(module)
        self._budget, self._bounded = budget_bytes, False

    def start(self, batch: Any, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Begin a step, with what is there already, which is not refused."""
        super().start(batch, optimizers)
        self._bounded = True

    def unbound(self) -> None:
        """Refuse nothing from here on."""
        self._bounded = False

    def _count(self, tensors: Iterable[Tensor], given: Collection[int] = ()) -> None:
        # DTensor asks fake ones for the shape of a result when it meets an operator first; of a stage's
        # placeholders there are only shapes too
        super()._count((tensor for tensor in tensors if not has_no_values(tensor)), given)

    def _born(self, key: int, n_bytes: int, tensor: Tensor | None) -> None:
        super()._born(key, n_bytes, tensor)
        life = self._of_key[key]
        if self._bounded and self._exceeds(n_bytes):
            # one refusal: what follows it is the caller's
            self.unbound()
            raise StepOverBudget(
                f"{life.name} in {life.fqn or 'the module itself'} made a tensor {list(life.shape)}"
                f" {life.dtype} of {format_bytes(n_bytes)} in addition to {self._held(key)}; allowed are"
                f" {format_bytes(self._budget)}"
            )

    def _exceeds(self, n_bytes: int) -> bool:
        """Whether so many bytes more are too many; what the thread of a collective that has ended holds, is none."""
        for _ in range(PATIENCE):
            if self.current + n_bytes <= self._budget:
                return False
            time.sleep(0.001)
        return True

    def _held(self, but: int) -> str:
        """What is alive, by kind."""
        held = dict.fromkeys(KINDS, 0)
        for key, life in self._of_key.items():
            if key != but:
                made = ACTIVATIONS if self.work[life.birth][0] == FORWARD else TEMPORARIES
                held[life.kind or made] += life.n_bytes
        return ", ".join(f"{format_bytes(n)} of {kind}" for kind, n in held.items() if n)
