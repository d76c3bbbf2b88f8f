"""`lightning-amp simulate`: run a training step of a plan without values, and print its bytes on each rank."""

import argparse
import json
from pathlib import Path

from lightning_amp.cli.commands.calibrate import check_target
from lightning_amp.cli.configuration import add_configuration, plan_of_configuration
from lightning_amp.cli.request import add_request, decoder_of_request, rates_of_request, read, refuse, request_of
from lightning_amp.data.files.directory import written_aside


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    add_request(parser)
    add_configuration(parser)
    parser.add_argument(
        "--plot",
        metavar="FILE.png",
        help="draw memory after each stratum, or the schedule of a pipeline; replaces the file",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    from lightning_amp.planning.base.plan_request import check_request
    from lightning_amp.planning.reports.plan_report import plan_report
    from lightning_amp.profiling.profile import Profile

    if arguments.config is not None:
        if arguments.plot is not None:
            check_target("--plot", arguments.plot, "schedule.png", overwrite=True)
        # the plan's count of one rank is enough: all ranks run the same step, or are stages of it
        made = plan_of_configuration(arguments).plan
        if arguments.plot is not None:
            from lightning_amp.planning.reports.stages_report import Panel, schedule_chart, schedule_title, timeline_of

            if not made.stages:
                why = (
                    "which draws the schedule of a pipeline, and the plan has none (--strategies pipeline asks for one)"
                )
                refuse(arguments, f"--config {arguments.config!r}", {"--plot": "plot"}, why)
            # time of each pass on each stage of a pipeline
            panel = Panel("predicted", timeline_of(made), made.stages[-1].rest_seconds)
            with written_aside(Path(arguments.plot)) as aside:
                schedule_chart(aside, panels=[panel], title=schedule_title(made))
        print(made.to_json() if arguments.format == "json" else plan_report(made))
        return
    refuse(arguments, "a data directory or --shape", {"--tensor-grid": "tensor_grid"}, "which is of --config FILE.yaml")
    request = request_of(arguments)
    check_request(**request)
    requested, rates = decoder_of_request(arguments), rates_of_request(arguments)
    if arguments.plot is not None:
        check_target("--plot", arguments.plot, "memory.png", overwrite=True)
    source = requested or read(arguments)

    # imported late: torch takes seconds to import, and mistakes are reported before
    from lightning_amp.simulation.simulate import request_decoder, request_reference, simulate_plan
    from lightning_amp.simulation.simulation_report import draw, simulation_report

    if isinstance(source, Profile):
        of_model = {"latent_dim": arguments.latent_dim, "window": arguments.window}
        make, plan = request_reference(source, **of_model, **request, rates=rates)
    else:
        make, plan = request_decoder(source, **request, rates=rates)
    simulation = simulate_plan(make, plan, device_type=rates.device_type)
    if arguments.plot is not None:
        with written_aside(Path(arguments.plot)) as aside:
            draw(aside, simulation)
    as_json = arguments.format == "json"
    print(json.dumps(simulation.to_dict(), indent=2) if as_json else simulation_report(simulation))
