"""`lightning-amp profile`: print the profile of a data directory, or of a module's training step."""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from lightning_amp.cli.commands.calibrate import check_target
from lightning_amp.cli.configuration import add_named_class, named_step, of_shapes, use_step
from lightning_amp.cli.request import add_data, read, refuse
from lightning_amp.data.files.directory import written_aside
from lightning_amp.errors import PlanError

OF_STEP, OF_FOLDER = {"--batch-size": "batch_size"}, {"--setting": "setting", "--keys": "keys"}
"""Options for a training step only, and for a data directory only."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command; torch is imported for a module only."""
    add_data(parser)
    parser.add_argument(
        "--config", metavar="FILE.yaml", help="of `lightning-amp fit`: profile its model's step instead"
    )
    parser.add_argument("--batch-size", type=int, help="of a step: cells or samples of the batch")
    parser.add_argument("--plot", metavar="FILE.png", help="of a step: draw it by kind and module; replaces the file")
    parser.add_argument(
        "--trace",
        metavar="FILE.pickle|FILE.json",
        help="of a step: write it for torch's memory viewer (.pickle) or for Perfetto and Chrome (.json)",
    )
    add_named_class(parser)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    from lightning_amp.footprint.trace.write_trace import form_of
    from lightning_amp.planning.reports.module_report import module_report, trace_lines
    from lightning_amp.planning.reports.plan_report import profile_report

    named = named_step(arguments)
    if named is None and (arguments.config is None) == (arguments.data_dir is None):
        both = f"both DIR={arguments.data_dir!r} and --config {arguments.config!r}"
        raise PlanError(
            f"profile got {'neither DIR nor --config' if arguments.config is None else both}; give one of them: a data"
            " directory, or a configuration of `lightning-amp fit`; or MODULE:CLASS with --batch"
        )
    of_data = named is None and arguments.config is None
    if of_data:
        refuse(arguments, f"DIR={arguments.data_dir!r}", OF_STEP, "which is of a training step")
    else:
        refuse(arguments, "a training step", OF_FOLDER, "which are of a data directory")
    files = {"--plot": arguments.plot, "--trace": arguments.trace}
    for flag, file in files.items():
        if file is not None and of_data:
            raise PlanError(
                f"{flag} {file!r} does not support a data directory, which has no training step to"
                f" draw; give --config, or leave {flag} out"
            )
    if arguments.plot is not None:
        check_target("--plot", arguments.plot, "step.png", overwrite=True)
    if arguments.trace is not None:
        content = form_of(Path(arguments.trace))
        check_target("--trace", arguments.trace, f"step{Path(arguments.trace).suffix}", overwrite=True)
    if of_data:
        found: Any = read(arguments)
        text = profile_report(found)
    else:
        from lightning_amp.footprint.profile_module import profile_and_trace

        def profiled(module: Any, batch: Any, run_settings: Any, options: Any) -> Any:
            plain = replace(run_settings, frees_gradients=False)
            return profile_and_trace(module, batch, batch_size=arguments.batch_size, run_settings=plain)

        with of_shapes(arguments):
            found, trace = use_step(arguments, named, profiled)
        text = module_report(found)
        if arguments.plot is not None:
            with written_aside(Path(arguments.plot)) as aside:
                found.plot(aside)
        if arguments.trace is not None:
            with written_aside(Path(arguments.trace)) as aside:
                aside.write_bytes(content(trace))
            text += f"\n\n{trace_lines(arguments.trace, trace)}"
    print(json.dumps(found.to_dict(), indent=2) if arguments.format == "json" else text)
