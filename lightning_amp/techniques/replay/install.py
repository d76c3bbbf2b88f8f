"""Install `replay`: the training step runs with its operators recorded."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_amp._torch import AnyBatchNorm
from lightning_amp.techniques.contract.change import Change
from lightning_amp.techniques.put_methods import method_of, refuse_unseen
from lightning_amp.techniques.replay.spec import ReplayOperators
from lightning_amp.techniques.replay.tape import Tape


def replay_operators(module: nn.Module, spec: ReplayOperators) -> dict[str, Callable[..., Any]]:
    """What a LightningModule runs instead of its methods, by name, so that segments of its step are replayed.

    Raises:
        InstallError: As of `refuse_unseen`.
    """
    refuse_unseen("replay", module)
    return {"training_step": replayed(method_of(module, "training_step"), spec)}


def install(module: nn.Module, spec: ReplayOperators, mesh: object) -> Change:
    """Replace the training step of a LightningModule."""
    return Change({}, methods=replay_operators(module, spec))


@contextmanager
def recorded(tape: Tape, module: nn.Module) -> Iterator[None]:
    """Record what a module's step does on a tape."""
    # on several ranks they share the statistics of their batches, and compute by other operators
    norms = [child for child in module.modules() if isinstance(child, AnyBatchNorm)]
    with tape.as_one(norms), tape, tape.hooks():
        yield


def replayed(step: Callable[..., Any], spec: ReplayOperators) -> Callable[..., Any]:
    """A training step that runs in the segments of a spec; the replays of its first call are compared."""
    first = iter((True,))

    @wraps(step)
    def run(module: LightningModule, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return step(module, *args, **kwargs)
        with recorded(Tape(spec.segments, compares=next(first, False)), module):
            return step(module, *args, **kwargs)

    return run
