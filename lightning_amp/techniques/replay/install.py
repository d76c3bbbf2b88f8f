"""Install `replay`: the training step runs with its operators recorded, first once to find what may be replayed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from types import MethodType
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_amp._torch import AnyBatchNorm
from lightning_amp.costs.rule import Rule, Spec
from lightning_amp.errors import AmpError
from lightning_amp.footprint.inner_run import EnoughSeen
from lightning_amp.footprint.profile_module import counted_step
from lightning_amp.footprint.step_recorder import StepRecorder
from lightning_amp.techniques.contract.change import Change
from lightning_amp.techniques.contract.step_to_plan import StepToPlan
from lightning_amp.techniques.put_methods import method_of, put_methods, refuse_unseen
from lightning_amp.techniques.replay.choose_cuts import Replays, Stretches
from lightning_amp.techniques.replay.look import Look, stretches_of
from lightning_amp.techniques.replay.spec import ReplayOperators
from lightning_amp.techniques.replay.tape import Tape


def install(module: nn.Module, spec: ReplayOperators, mesh: object) -> Change:
    """Replace the training step of a LightningModule by one whose segments are replayed.

    Raises:
        InstallError: As of `refuse_unseen`.
    """
    refuse_unseen("replay", module)
    return Change({}, methods={"training_step": replayed(method_of(module, "training_step"), spec)})


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


def look(step: StepToPlan) -> Callable[[tuple[Rule, ...]], Replays]:
    """Rules -> the choices of the step with these rules installed, recorded when they are read first."""
    known: dict[tuple[tuple[str, Spec], ...], Replays] = {}

    def replays(rules: tuple[Rule, ...]) -> Replays:
        key = tuple((rule.fqn, rule.spec) for rule in rules)
        return known.setdefault(key, Replays(partial(_stretches, step, rules)))

    return replays


def _stretches(step: StepToPlan, rules: tuple[Rule, ...]) -> Stretches | str:
    """What stretches of the step hold and take, or why it is not known."""
    found = list[Stretches]()

    def count(module: LightningModule, batch: Any, **options: Any) -> None:
        refuse_unseen("replay", module)
        plain = method_of(module, "training_step")

        def training_step(module: LightningModule, *args: Any, **kwargs: Any) -> Any:
            automatic = module.automatic_optimization
            if automatic:
                # what a module makes once, as tables of positions, is no part of later steps
                plain(module, *args, **kwargs)
            look = Look(step.operator_rates())
            with recorded(look, module):
                loss = plain(module, *args, **kwargs)
            found.append(stretches_of(look))
            # one that optimises by itself has the state of its optimisers in the second step
            if automatic or len(found) == 2:
                raise EnoughSeen
            return loss

        undo = put_methods(module, {"training_step": MethodType(training_step, module)})
        try:
            counted_step(module, batch, make=StepRecorder, **options)
        finally:
            undo()

    try:
        step.run_with(rules, count)
    except AmpError as error:
        return str(error)
    return found[-1]
