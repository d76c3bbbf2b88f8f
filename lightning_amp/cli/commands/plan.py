"""`lightning-amp plan`: print a plan, or with `--recommend-devices` the number of devices that pays.

The latter does not import torch.
"""

import argparse
import json

from lightning_amp.cli.configuration import (
    add_configuration,
    add_named_class,
    named_step,
    of_shapes,
    plan_of_configuration,
)
from lightning_amp.cli.request import (
    BATCH_SIZE,
    add_request,
    decoder_of_request,
    latent_dim,
    rates_of_request,
    read,
    refuse,
    request_of,
)
from lightning_amp.errors import DoesNotFitError, PlanError

RECOMMEND = {"--recommend-devices": "recommend_devices"}
DECIDED = {
    "--devices": "devices",
    "--policy": "policy",
    "--strategies": "strategies",
    "--model-parallel-size": "model_parallel_size",
    "--shape": "shape",
    "--device-speeds": "device_speeds",
}
"""Options that `--recommend-devices` sets itself, or does not support."""
NOTHING_FITS = DoesNotFitError.status
"""Exit status if no plan fits the device memory, or if that is unknown."""
NO_CODE = "# no block of this plan runs in chunks; --strategies chunk, or a smaller --device-memory, would ask for them"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    add_request(parser)
    add_configuration(parser)
    add_named_class(parser)
    parser.add_argument(
        "--recommend-devices",
        action="store_true",
        default=None,
        help="say how many devices are worth having for steps of --batch-size cells in all",
    )
    parser.add_argument(
        "--show-code",
        action="store_true",
        help="with --config or MODULE:CLASS: print what the blocks run that the plan computes in chunks, as Python",
    )
    parser.add_argument(
        "--host-memory",
        metavar="SIZE",
        help="with --config or MODULE:CLASS: most host memory that a rank takes, such as 64GiB (default: any)",
    )
    parser.add_argument(
        "--device-speeds",
        metavar="SPEED,...",
        help="speed of each device in any unit, by which they get stages and strata, such as 1,1,0.5 (default: equal)",
    )
    parser.add_argument(
        "--largest",
        metavar="NAME[:DIM]",
        help="with --config or MODULE:CLASS and --device-memory: say the largest length that fits of a dimension of the"
        " batch, by default 1, such as ids or image:2",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from lightning_amp.planning.base.plan_request import check_request
    from lightning_amp.planning.reports.plan_report import plan_as_json, plan_report, profile_report

    if arguments.show_code and arguments.format == "json":
        raise PlanError("--show-code cannot be used with --format json, which holds the plan alone; leave one out")
    named = named_step(arguments)
    if named is not None or arguments.config is not None:
        of = f"--config {arguments.config!r}" if named is None else repr(arguments.data_dir)
        refuse(arguments, of, RECOMMEND, "which is of a data directory")
        with of_shapes(arguments):
            made, found, code = plan_of_configuration(arguments, named)
        print(plan_as_json(made, found) if arguments.format == "json" else plan_report(made))
        if arguments.show_code:
            print(f"\n{code or NO_CODE}")
        unknown = made.fits is None and made.uncounted and made.budget_bytes is not None
        return NOTHING_FITS if made.fits is False or unknown else 0
    refuse(
        arguments,
        "a data directory or --shape",
        {"--tensor-grid": "tensor_grid", "--host-memory": "host_memory"},
        "which is of --config FILE.yaml or MODULE:CLASS",
    )
    if arguments.show_code:
        raise PlanError("--show-code requires --config FILE.yaml or MODULE:CLASS, whose blocks it would show; name one")
    if arguments.largest is not None:
        raise PlanError("--largest requires --config FILE.yaml or MODULE:CLASS, whose batch it would change; name one")
    if arguments.recommend_devices:
        return _recommend(arguments)
    request = request_of(arguments)
    check_request(**request)
    request["device_speeds"] = arguments.device_speeds
    requested, rates = decoder_of_request(arguments), rates_of_request(arguments)
    cells, of_data = request.pop("batch_size"), ""
    # torch takes seconds to import, and mistakes are reported before
    if requested is not None:
        from lightning_amp.simulation.plan_of_data import plan_of_shape

        made = plan_of_shape(requested.decoder, request, batch_size=requested.batch_size or cells, rates=rates)
    else:
        profile, of_model = read(arguments), {"latent_dim": latent_dim(arguments), "window": arguments.window}
        from lightning_amp.simulation.plan_of_data import plan_of_data

        made = plan_of_data(profile, request, batch_size=cells, **of_model, rates=rates)
        of_data = f"{profile_report(profile)}\n\n"
    print(plan_as_json(made, {}) if arguments.format == "json" else f"{of_data}{plan_report(made)}")
    return NOTHING_FITS if made.fits is False else 0


def _recommend(arguments: argparse.Namespace) -> int:
    from lightning_amp.costs.device_rates import budget_on
    from lightning_amp.costs.model_shape import reference_shape
    from lightning_amp.planning.policies.recommend_devices import recommend_devices
    from lightning_amp.planning.reports.step_report import recommendation_report
    from lightning_amp.quantities import parse_bytes

    refuse(arguments, "--recommend-devices", DECIDED, "which it decides, or cannot use")
    if arguments.data_dir is None:
        raise PlanError("--recommend-devices requires DIR, the folder of the data; name it")
    rates = rates_of_request(arguments)
    # of several devices, so that NCCL's buffers count
    requested = None if arguments.device_memory is None else parse_bytes(arguments.device_memory)
    budget = budget_on(rates, requested, 2)[0]
    profile, dim = read(arguments), latent_dim(arguments)
    found = recommend_devices(
        profile,
        lambda n: reference_shape(profile, batch_size=n, latent_dim=dim, window=arguments.window),
        cells=BATCH_SIZE if arguments.batch_size is None else arguments.batch_size,
        budget=budget,
        rates=rates,
    )
    as_json = arguments.format == "json"
    print(json.dumps(found.to_dict(), indent=2) if as_json else recommendation_report(found))
    return NOTHING_FITS if found.devices is None else 0
