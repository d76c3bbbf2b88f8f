"""`plan --config` and `simulate --config`: a plan of any module that a configuration of `fit` trains; loads torch."""

import argparse
from dataclasses import replace
from functools import partial
from typing import Any

from lightning_amp.cli.request import OF_DATA, rates_asked, refuse, request_of
from lightning_amp.errors import PlanError
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.quantities import parse_bytes

ALONE = OF_DATA | {"DIR": "data_dir", "--shape": "shape"}
"""Options that a configuration has no use for."""


def add_configuration(parser: argparse.ArgumentParser) -> None:
    """Add the flag."""
    parser.add_argument(
        "--config",
        metavar="FILE.yaml",
        help="of `lightning-amp fit`: plan its model, which may be any, by a profile of its step",
    )
    parser.add_argument(
        "--tensor-grid",
        metavar="X,Y,Z",
        help="with --config and --strategies tensor3d: its grid of ranks (default: the fastest that fits)",
    )


def plan_of_configuration(arguments: argparse.Namespace) -> tuple[Plan, str]:
    """The plan, with answers to two questions where a memory is named: the largest batch and the fewest devices.

    Returns:
        Beside it, what its blocks in chunks run, as Python; "" where there are none, and where it is not asked for.

    Raises:
        AmpError: The module has a Hi-C decoder, its step cannot be profiled, or nothing can be planned as asked.
    """
    # late: torch takes seconds to load
    from lightning_amp.lightning.first_look.dry_steps import DrySteps, with_spec
    from lightning_amp.lightning.first_look.step_of_module import StepOfModule
    from lightning_amp.parallel.contract.protocol import find_decoders
    from lightning_amp.parallel.describe_module import describe
    from lightning_amp.planning.modules.plan_module import told_apart
    from lightning_amp.planning.modules.plan_step import Counted, plan_step
    from lightning_amp.planning.modules.questions import answers
    from lightning_amp.planning.plan.specs import FullyShard
    from lightning_amp.planning.plan.strategies import STRATEGIES, parse_strategies
    from lightning_amp.planning.policies.build_rules import without_shared_statistics
    from lightning_amp.verification.read_configuration import read_step

    refuse(arguments, f"--config {arguments.config!r}", ALONE, "which are of other models")
    module, batch, around, options = read_step(arguments.config, arguments.batch_size)
    if find_decoders(module):
        raise PlanError(
            f"--config {arguments.config!r} was asked for, whose model has a decoder of strata, which is planned by its"
            " data: name their folder, lightning-amp plan DIR"
        )
    told = _asked(arguments, options)
    request = request_of(told)
    if told.plan is not None:
        raise PlanError(
            f"--config {arguments.config!r} was asked for, whose strategy carries out plan={told.plan!r}: there is"
            " nothing to plan; name --policy or --strategies to plan it otherwise"
        )
    _, named = told_apart(request["strategies"], policy=request["policy"])
    rates, memory = rates_asked(told), request["device_memory"]

    size = request["model_parallel_size"]
    given = argparse.Namespace(**{name: value for name, value in options.items() if value is not None})
    given.model_parallel_size, grid = size, getattr(arguments, "tensor_grid", None)
    if grid is not None:
        given.tensor_grid = _grid(grid, request["strategies"])
    ranks = request["devices"] if size == "auto" else size
    of_run = {"run_ranks": request["devices"], "budget": None if memory is None else parse_bytes(memory)}
    steps = DrySteps.asked(parse_strategies(request["strategies"] or "S1"), given, ranks, **of_run)
    if steps is not None:
        steps.check_ranks()

    def step_at(batch_size: int | None) -> StepOfModule:
        return StepOfModule(module, lambda: batch, around=around, batch_size=batch_size, steps=steps)

    step = step_at(arguments.batch_size)
    fsdp = None
    if "fsdp" in (named or ()):
        # the configuration's may be of other strategies
        fsdp = FullyShard(shard_ranks=options.get("fsdp_ranks"), offload=bool(options.get("fsdp_offload")))
    share = options.get("share_batch_statistics") is not False
    shared = share and request["devices"] > 1
    look = partial(StepOfModule.seen, rates=rates, fsdp=fsdp, shared_statistics=shared)
    seen = look(step)
    if steps is not None and STRATEGIES[steps.name].data_axis:
        # of its grid, which may have been chosen
        request["model_parallel_size"] = steps.ranks
    shape = replace(describe(module, batch_size=seen.profile.batch_size or 1), profiled=True)
    del request["batch_size"]
    made = plan_step(
        Counted(seen=seen, shape=shape),
        **request,
        micro_batches=options.get("micro_batches"),
        schedule=options.get("schedule"),
        count=step.count,
    )
    made = with_spec(made, steps, "")
    if not share:
        made = without_shared_statistics(made)
    code = step.code(made.rules) if getattr(arguments, "show_code", False) else ""
    if memory is None or steps is not None:
        return made, code
    found = answers(
        lambda n: look(step_at(n)),
        seen,
        ranks=made.mesh.data * made.mesh.model,
        budget=parse_bytes(memory),
    )
    return replace(made, notes=(*made.notes, *found)), code


def _grid(text: str, strategies: Any) -> tuple[int, ...]:
    """The sizes of a grid that were written as "2,1,2"."""
    from lightning_amp.lightning.strategy.request import Request

    sizes = tuple(int(part) if part.strip().isdecimal() else part for part in text.split(","))
    # checked as AMPStrategy does
    return Request(strategies=strategies, tensor_grid=sizes).tensor_grid  # type: ignore[arg-type,return-value]


def _asked(arguments: argparse.Namespace, options: dict[str, Any]) -> argparse.Namespace:
    """What is asked for on the command line, else by the configuration's AMPStrategy."""
    asked = argparse.Namespace(**vars(arguments))
    chosen = arguments.policy is not None or arguments.strategies is not None
    others = {"policy", "strategies"} if chosen else set()
    others |= {"rates"} if arguments.device is not None else set()
    asked.plan = None if chosen else options.get("plan")
    for name in {"device_memory", "policy", "strategies", "model_parallel_size", "rates"} - others:
        if getattr(asked, name) is None:
            setattr(asked, name, options.get(name))
    if asked.model_parallel_size is not None:
        asked.model_parallel_size = str(asked.model_parallel_size)
    return asked
