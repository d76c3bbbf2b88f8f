"""Install `replay`: record the operators of the training step, and replay segments of it in the backward pass."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from types import MethodType
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn

from lightning_amp._torch import AnyBatchNorm, has_no_values, tree_map
from lightning_amp.costs.rule import Rule, Spec, changes_of
from lightning_amp.errors import AmpError
from lightning_amp.footprint.confirm_count import shapes_of
from lightning_amp.footprint.copies.noted_values import answers_now, before_count
from lightning_amp.footprint.module_profile import GRADIENTS
from lightning_amp.footprint.profile_module import counted_step
from lightning_amp.footprint.run.inner_run import EnoughSeen
from lightning_amp.footprint.step_recorder import StepRecorder
from lightning_amp.holding import replacing
from lightning_amp.own_operators import own_operators
from lightning_amp.techniques.checks.planned_order import PlannedOrder
from lightning_amp.techniques.contract.change import Change
from lightning_amp.techniques.contract.protocol import StepToPlan
from lightning_amp.techniques.put_methods import method_of, put_methods, refuse_unseen
from lightning_amp.techniques.replay.choose_cuts import Replays, Stretches
from lightning_amp.techniques.replay.row import ReplayOperators
from lightning_amp.techniques.replay.stretches import Look, stretches_of
from lightning_amp.techniques.replay.tape import Tape

RUNS_OTHERS = (
    "replay: the step runs other operators than the one that was counted for its plan; they differ first at operator"
    " {place}, where the step runs {found}, and the count {planned}. Results are exact, but segments end elsewhere, so"
    " that the peak may differ from the predicted one"
)


def install(module: nn.Module, spec: ReplayOperators, mesh: object) -> Change:
    """Replace the training step of a LightningModule by one whose segments are replayed."""
    refuse_unseen("replay", module)
    # the replays of the first call are compared with the saved values
    step, first = method_of(module, "training_step"), iter((True,))
    # operators after the last segment run once in any order
    planned = PlannedOrder(spec.operators, RUNS_OTHERS, first=max((end for end, _ in spec.segments), default=0))

    @wraps(step)
    def run(module: LightningModule, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return step(module, *args, **kwargs)
        begins = next(first, False)
        tape = Tape(spec.segments, keeps=spec.places_kept, views=spec.views, window=spec.window, compares=begins)
        # before the step, which may change its batch
        shapes = shapes_of((args, kwargs))
        with recorded(tape, module):
            loss = step(module, *args, **kwargs)
        # objects that a module makes only once are not part of the recorded step, nor of those after the first
        if not begins:
            planned.compare(shapes, tape.ran, lambda: any(map(has_no_values, module.parameters())))
        return loss

    return Change({}, methods={"training_step": run})


@contextmanager
def recorded(tape: Tape, module: nn.Module) -> Iterator[None]:
    """Record the operators of a module's step on a tape."""
    # on several ranks they share batch statistics, and run other operators than in the plan
    norms = [child for child in module.modules() if isinstance(child, AnyBatchNorm)]
    with ExitStack() as undo:
        for child in module.modules():
            if isinstance(child, LightningModule):
                undo.enter_context(replacing(child, log=partial(_log, child.log)))
        with tape.as_one(norms), tape, tape.hooks():
            yield


def _log(log: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Log a value, which Lightning keeps by other operators in a count, in which there is no logger."""
    with own_operators():
        log(*args, **kwargs)


def look(step: StepToPlan) -> Callable[[tuple[Rule, ...]], Replays]:
    """Return a function from rules to the choices of the step with these rules, recorded on first use."""
    known: dict[tuple[tuple[str, Spec], ...], Replays] = {}

    def replays(rules: tuple[Rule, ...]) -> Replays:
        return known.setdefault(changes_of(rules), Replays(partial(_stretches, step, rules)))

    return replays


def _begin_again() -> None:
    """Let a step run once more, with the values that it has in its next batch."""
    if (answers := answers_now()) is not None:
        answers.begin_batch()
        answers.begin_step()


def _stretches(step: StepToPlan, rules: tuple[Rule, ...]) -> Stretches | str:
    """Return bytes and times of the step's segments, or the reason why they are unknown."""
    found, n_runs = list[Stretches](), 0

    def count(module: LightningModule, batch: Any, **options: Any) -> None:
        refuse_unseen("replay", module)
        plain = method_of(module, "training_step")

        def run(module: LightningModule, args: Any, kwargs: Any, look: Look | None) -> Any:
            nonlocal n_runs
            n_runs += 1
            # a step may take its labels out of its batch
            own_args, own_kwargs = tree_map(lambda one: one, (args, kwargs))
            with nullcontext() if look is None else recorded(look, module):
                return plain(module, *own_args, **own_kwargs)

        @wraps(plain)
        def training_step(module: LightningModule, *args: Any, **kwargs: Any) -> Any:
            if before_count():
                return plain(module, *args, **kwargs)
            # the second run is recorded: objects that a module makes only once, such as position tables, are not part
            # of later steps. With manual optimization, optimizer state exists from the second step on
            if not n_runs:
                loss = run(module, args, kwargs, None)
                if not module.automatic_optimization:
                    return loss
                _begin_again()
            look = None
            while look is None or (look.views and look.writes_to_views):
                if look is not None:
                    _begin_again()
                trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
                look = Look(step.operator_rates(), trained, views=look is None)
                run(module, args, kwargs, look)
            shapes = shapes_of((args, kwargs))
            found.append(stretches_of(look, shapes, gradient_bytes=step.step().profile.by_kind[GRADIENTS]))
            raise EnoughSeen

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
