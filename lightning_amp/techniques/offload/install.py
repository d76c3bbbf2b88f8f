"""Install `offload` around the training step of a LightningModule, and count a step in which tensors leave."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import wraps
from os import environ
from typing import Any

import psutil
import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_amp.costs.rule import Rule, Spec
from lightning_amp.data.batch import tensors_in
from lightning_amp.errors import AmpError
from lightning_amp.footprint.profile_module import profile_module
from lightning_amp.techniques.contract.change import Change
from lightning_amp.techniques.contract.protocol import StepToPlan
from lightning_amp.techniques.offload.moves import Moves
from lightning_amp.techniques.offload.row import Offload
from lightning_amp.techniques.offload.unseen_writes import UnseenWrites
from lightning_amp.techniques.put_methods import method_of, refuse_unseen

SHARE = 0.8
"""Share of the host's free memory that the ranks of a node take at most."""


def install(module: nn.Module, spec: Offload, mesh: object) -> Change:
    """Replace the training step of a LightningModule by one whose saved tensors wait in host memory."""
    refuse_unseen("offload", module)
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


def free_bytes() -> int:
    """Return the bytes of host memory that this process may take for the pool."""
    return int(SHARE * psutil.virtual_memory().available / int(environ.get("LOCAL_WORLD_SIZE", "1")))


@dataclass(frozen=True, kw_only=True, slots=True)
class CountedMoves:
    """A counted step.

    Attributes:
        peak_bytes: Peak of the device.
        host_bytes: Bytes of the pool.
        sizes: Bytes of the storages that leave, in this order.
        came_bytes: Bytes that come back.
    """

    peak_bytes: int
    host_bytes: int = 0
    sizes: tuple[int, ...] = ()
    came_bytes: int = 0


Counted = Callable[[tuple[Rule, ...], Offload | None], CountedMoves | str]


def look(step: StepToPlan) -> Counted:
    """Return a function from other rules and a spec to the counted step, or to why it cannot be counted."""
    known: dict[tuple[tuple[tuple[str, Spec], ...], Offload | None], CountedMoves | str] = {}

    def counted(rules: tuple[Rule, ...], spec: Offload | None) -> CountedMoves | str:
        # what a plan says of the host does not change the step
        spec = None if spec is None else replace(spec, host_bytes=0, moved_bytes=0)
        key = tuple((rule.fqn, rule.spec) for rule in rules), spec
        if key not in known:
            known[key] = _counted(step, rules, spec)
        return known[key]

    return counted


def _counted(step: StepToPlan, rules: tuple[Rule, ...], spec: Offload | None) -> CountedMoves | str:
    def count(module: LightningModule, batch: Any, **options: Any) -> CountedMoves:
        profile, moves = profile_module(module, batch, **options), moves_of(module)
        peak = max(profile.peak_bytes, profile.first_bytes)
        if moves is None:
            return CountedMoves(peak_bytes=peak)
        sizes = tuple(moves.sizes)
        return CountedMoves(peak_bytes=peak, host_bytes=moves.pool.n_bytes, sizes=sizes, came_bytes=moves.came_bytes)

    own = () if spec is None else (Rule(fqn="", spec=spec, strategy="offload", why="counted"),)
    try:
        return step.run_with((*rules, *own), count)
    except AmpError as error:
        return str(error)
