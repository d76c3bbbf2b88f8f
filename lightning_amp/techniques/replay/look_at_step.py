"""Record the operators of a training step, with other techniques installed, to find what may be replayed."""

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

from lightning.pytorch import LightningModule

from lightning_amp.costs.rule import Rule, Spec
from lightning_amp.errors import AmpError
from lightning_amp.footprint.inner_run import EnoughSeen
from lightning_amp.footprint.profile_module import counted_step
from lightning_amp.footprint.step_recorder import StepRecorder
from lightning_amp.techniques.contract.step_to_plan import StepToPlan
from lightning_amp.techniques.put_methods import method_of, put_methods, refuse_unseen
from lightning_amp.techniques.replay.choose_cuts import Replays, Stretches
from lightning_amp.techniques.replay.install import recorded
from lightning_amp.techniques.replay.look import Look, stretches_of


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
