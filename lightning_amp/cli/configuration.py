"""`plan --config`, `plan MODULE:CLASS` and `simulate --config`: a plan of any module; loads torch."""

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lightning_amp.cli.request import OF_DATA, rates_asked, refuse, request_of
from lightning_amp.errors import PlanError
from lightning_amp.planning.plan.plan import Plan

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

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


def plan_of_configuration(
    arguments: argparse.Namespace, named: "tuple[LightningModule, Any] | None" = None
) -> tuple[Plan, str]:
    """The plan, with answers to two questions where a memory is named: the largest batch and the fewest devices.

    Args:
        arguments: Of the command.
        named: The module and the batch that were named instead of a configuration.

    Returns:
        Besides, what its blocks in chunks run, as Python; "" where there are none, and where it is not asked for.

    Raises:
        AmpError: The module has a Hi-C decoder, its step cannot be profiled, or nothing can be planned as asked.
    """
    # late: torch takes seconds to load
    from lightning_amp.footprint.inner_run import BY_ITSELF
    from lightning_amp.lightning.profiling.plan_of_module import plan_of_module
    from lightning_amp.techniques.contract.protocol import find_decoders
    from lightning_amp.verification.read_configuration import read_step

    if named is None:
        model = f"--config {arguments.config!r}"
        refuse(arguments, model, ALONE, "which are of other models")
        module, batch, around, options = read_step(arguments.config, arguments.batch_size)
    else:
        model, around, options = repr(arguments.data_dir), BY_ITSELF, dict[str, Any]()
        refuse(arguments, model, OF_DATA | {"--shape": "shape"}, "which are of other models")
        module, batch = named
    if find_decoders(module):
        raise PlanError(
            f"{model} is not supported: its model has a decoder of strata, which is planned by its data:"
            " name their folder, lightning-amp plan DIR"
        )
    told = _asked(arguments, options)
    request = request_of(told)
    if told.plan is not None:
        raise PlanError(
            f"{model} has a strategy that carries out plan={told.plan!r}: there is nothing to plan; name"
            " --policy or --strategies to plan it otherwise"
        )
    grid = getattr(arguments, "tensor_grid", None)
    if grid is not None:
        options["tensor_grid"] = _grid(grid, request["strategies"])
    del request["batch_size"]
    made = plan_of_module(
        module,
        batch,
        around=around,
        rates=rates_asked(told),
        request=request,
        options=options,
        batch_size=arguments.batch_size,
    )
    code = made.code() if getattr(arguments, "show_code", False) else ""
    return replace(made.plan, notes=(*made.plan.notes, *made.answers())), code


def _grid(text: str, strategies: Any) -> tuple[int, ...]:
    """The sizes of a grid that were written as "2,1,2"."""
    from lightning_amp.lightning.strategy.request import Request

    sizes = tuple(int(part) if part.strip().isdecimal() else part for part in text.split(","))
    # checked as AMPStrategy does
    return Request(strategies=strategies, tensor_grid=sizes).tensor_grid  # type: ignore[arg-type,return-value]


def _asked(arguments: argparse.Namespace, options: dict[str, Any]) -> argparse.Namespace:
    """What is requested on the command line, else by the configuration's AMPStrategy."""
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
