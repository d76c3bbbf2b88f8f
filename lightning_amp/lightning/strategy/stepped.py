"""Install a technique whose steps take the place of the module's: its options, what it does not go together with."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import lightning.pytorch as pl
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp.dist.splits import MeshAxis
from lightning_amp.errors import PlanError
from lightning_amp.lightning.first_look.step_of_module import Steps
from lightning_amp.lightning.strategy.hardware import ThisRank
from lightning_amp.lightning.strategy.request import Request
from lightning_amp.parallel.contract.protocol import find_decoders
from lightning_amp.planning.plan.plan import Plan, Rule
from lightning_amp.planning.plan.specs import ShareBatchStatistics
from lightning_amp.planning.plan.strategies import STRATEGIES, parse_strategies, targets_of, with_steps


def with_options(plan: Plan, request: Request) -> Plan:
    """The plan with the options that a person has given, in the specs of techniques that read them.

    Raises:
        PlanError: A value outside what is allowed.
    """

    def asked(rule: Rule) -> Rule:
        read = STRATEGIES[rule.strategy].asked
        return rule if read is None else replace(rule, spec=read(rule.spec, request))

    return replace(plan, rules=tuple(map(asked, plan.rules)))


def dry_steps(request: Request, here: ThisRank) -> tuple[str, int, Steps] | None:
    """The technique that a request names, ranks of the model axis, and its steps for rank 0, which send nothing.

    Raises:
        PlanError: A value outside what is allowed.
    """
    if request.plan is not None:
        plan = request.plan if isinstance(request.plan, Plan) else Plan.read(request.plan)
        if not (name := with_steps(plan.strategies)):
            return None
        spec, ranks = _rule_of(name, plan.rules).spec, plan.mesh.model
    else:
        name = with_steps(parse_strategies(request.strategies or "S1"))
        row = STRATEGIES.get(name)
        if row is None or row.asked is None:
            return None
        size = request.model_parallel_size
        ranks = here.node_ranks if size == "auto" else int(size)
        ((_, spec),) = targets_of(name, None)  # type: ignore[arg-type]
        spec = row.asked(spec, request)
    axis = MeshAxis("model", ranks, 0, None, sent=[])
    return name, ranks, partial(steps_of, name=name, spec=spec, mesh=axis)


def steps_of(module: pl.LightningModule, *, name: str, spec: Any, mesh: Any) -> dict[str, Any]:
    """What takes the place of a module's steps.

    Args:
        name: The technique.
        spec: Of its rule.
        mesh: The ranks of the model axis.
    """
    found: dict[str, Any] = import_module(STRATEGIES[name].steps).install(module, spec, mesh)
    return found


def install_steps(module: pl.LightningModule, plan: Plan, mesh: DeviceMesh) -> Callable[[], None]:
    """Put the steps of a plan's technique in the place of a module's; returns what undoes it.

    Raises:
        PlanError: A technique of the plan that does not go together with it, or a module that it does not support.
    """
    name = with_steps(plan.strategies)
    if not name:
        return lambda: None
    others = [s for s in plan.strategies if s != name and s not in STRATEGIES[name].together]
    if others:
        raise PlanError(
            f"{name} was asked for together with {', '.join(others)}, which is not supported; it goes together with"
            f" {', '.join(STRATEGIES[name].together)}"
        )
    if decoders := list(find_decoders(module)):
        raise PlanError(
            f"{name} was asked for, and {decoders[0]!r} is a decomposed decoder; ask for 'nodes', which splits its"
            " anchors over the model axis"
        )
    if any(isinstance(rule.spec, ShareBatchStatistics) for rule in plan.rules):
        raise PlanError(
            f"{name} was asked for with a data axis of {plan.mesh.data} ranks and a module with BatchNorm, whose"
            " statistics are not exchanged over both axes yet; set share_batch_statistics=False"
        )
    changed = steps_of(module, name=name, spec=_rule_of(name, plan.rules).spec, mesh=mesh["model"])
    vars(module).update(changed)

    def undo() -> None:
        for step in changed:
            vars(module).pop(step, None)

    return undo


def _rule_of(name: str, rules: Iterable[Rule]) -> Rule:
    return next(rule for rule in rules if rule.strategy == name)
