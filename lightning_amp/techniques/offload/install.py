"""Install `offload` around the training step of a LightningModule, and count a step in which tensors leave."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import wraps
from types import MethodType
from typing import Any, TypeVar

import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_amp.costs.rule import Rule, Spec
from lightning_amp.data.batch import tensors_in
from lightning_amp.footprint.copies.noted_values import before_count
from lightning_amp.footprint.inner_run import EnoughSeen
from lightning_amp.footprint.profile_module import counted_step, profile_module
from lightning_amp.footprint.step_recorder import StepRecorder
from lightning_amp.techniques.contract.change import Change
from lightning_amp.techniques.contract.protocol import StepToPlan
from lightning_amp.techniques.host_memory.limit import free_bytes
from lightning_amp.techniques.offload.moves import Moves
from lightning_amp.techniques.offload.row import NAME, ON_CPU, UNPROVED, Offload
from lightning_amp.techniques.offload.unseen_writes import UnseenWrites
from lightning_amp.techniques.put_methods import method_of, put_methods, refuse_unseen

T = TypeVar("T")


def install(module: nn.Module, spec: Offload, mesh: object) -> Change:
    """Replace the training step of a LightningModule by one whose saved tensors wait in host memory."""
    refuse_unseen(NAME, module)
    limit = spec.host_memory if spec.host_memory is not None else free_bytes()
    moves = Moves(least_bytes=spec.least_bytes, most=spec.leaves, window=spec.window, limit=limit)
    step, first = method_of(module, "training_step"), iter((True,))

    @wraps(step)
    def run(module: LightningModule, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return step(module, *args, **kwargs)
        held = [*module.parameters(), *module.buffers(), *tensors_in((args, kwargs))]
        with moves.step(held), UnseenWrites(moves) if next(first, False) else nullcontext():
            return step(module, *args, **kwargs)

    run.moves = moves  # type: ignore[attr-defined]
    return Change({}, methods={"training_step": run})


def moves_of(module: nn.Module) -> Moves | None:
    """Return the moves of a module on which `offload` is installed; None for another module."""
    put = vars(module).get("training_step")
    found: Moves | None = getattr(getattr(put, "__func__", put), "moves", None)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class CountedMoves:
    """A counted step.

    Attributes:
        peak_bytes: Peak of the device.
        host_bytes: Bytes of the pool.
        left_bytes, came_bytes: Bytes that leave, and come back.
        n_left: Number of storages that leave.
    """

    peak_bytes: int
    host_bytes: int
    left_bytes: int
    came_bytes: int
    n_left: int


class Look:
    """Counts of a step with other rules and a spec; raises an AmpError where it cannot be counted."""

    def __init__(self, step: StepToPlan) -> None:
        self._step = step
        self._known: dict[Any, CountedMoves] = {}
        self._sizes: dict[Any, list[int]] = {}
        self._plain: dict[Any, int] = {}

    def plain_bytes(self, rules: tuple[Rule, ...]) -> int:
        """Return the peak without the technique."""
        return _once(self._plain, _key(rules), lambda: self._step.run_with(rules, profile_module).larger_peak_bytes)

    def sizes(self, rules: tuple[Rule, ...]) -> list[int]:
        """Return the bytes of all storages that could leave, in the order in which autograd saves them."""
        return _once(self._sizes, _key(rules), lambda: self._step.run_with((*rules, _rule(ALL)), _sizes))

    def count(self, rules: tuple[Rule, ...], spec: Offload) -> CountedMoves:
        """Return the counted step."""
        # what a plan says of the host does not change the step
        spec = replace(spec, host_bytes=0, moved_bytes=0)
        return _once(self._known, (_key(rules), spec), lambda: self._step.run_with((*rules, _rule(spec)), _moved))


ALL = Offload(least_bytes=1)


def look(step: StepToPlan) -> Look | str:
    """Return the counts of a step, made when a draft asks for them; or why only its name installs it."""
    if NAME in step.requested:
        return Look(step)
    return UNPROVED if step.launches else ON_CPU


def _once(known: dict[Any, T], key: Any, make: Callable[[], T]) -> T:
    if key not in known:
        known[key] = make()
    return known[key]


def _key(rules: tuple[Rule, ...]) -> tuple[tuple[str, Spec], ...]:
    return tuple((rule.fqn, rule.spec) for rule in rules)


def _rule(spec: Offload) -> Rule:
    return Rule(fqn="", spec=spec, strategy=NAME, why="counted")


def _moved(module: LightningModule, batch: Any, **options: Any) -> CountedMoves:
    profile, moves = profile_module(module, batch, **options), moves_of(module)
    assert moves is not None, "the rule is installed"
    return CountedMoves(
        peak_bytes=profile.larger_peak_bytes,
        host_bytes=moves.pool.n_bytes,
        left_bytes=sum(moves.sizes),
        came_bytes=moves.came_bytes,
        n_left=len(moves.sizes),
    )


def _sizes(module: LightningModule, batch: Any, **options: Any) -> list[int]:
    moves, step = moves_of(module), method_of(module, "training_step")
    assert moves is not None, "the rule is installed"

    @wraps(step)
    def run(module: LightningModule, *args: Any, **kwargs: Any) -> Any:
        found = step(module, *args, **kwargs)
        if before_count():
            return found
        raise EnoughSeen

    undo = put_methods(module, {"training_step": MethodType(run, module)})
    try:
        counted_step(module, batch, make=StepRecorder, **options)
    finally:
        undo()
    return list(moves.sizes)
