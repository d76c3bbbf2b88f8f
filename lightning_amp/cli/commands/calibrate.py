"""`lightning-amp calibrate`: measure a training step, on request also a module's operators and the links between ranks.

It writes a file for `--rates`.
"""

import argparse
import json
import os
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_amp.cli.configuration import EXAMPLE, add_named_class, named_step, of_shapes, use_step
from lightning_amp.data.files.directory import written_aside
from lightning_amp.errors import PlanError

if TYPE_CHECKING:
    from lightning_amp.costs.device_rates import Rates
    from lightning_amp.simulation.calibrate_operators import OperatorCalibration


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
    parser.add_argument(
        "data_dir",
        nargs="?",
        metavar="MODULE:CLASS",
        help="with --batch: measure the operators of this class's training step too",
    )
    parser.add_argument("--config", metavar="FILE.yaml", help="of `lightning-amp fit`: the same for its model's step")
    add_named_class(parser)
    parser.add_argument("--out", required=True, metavar="FILE.json", help="file to write, for --rates")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda where there is one")
    parser.add_argument("--device-index", type=int, default=0, help="number of the GPU (default: 0)")
    parser.add_argument(
        "--links",
        action="store_true",
        help="measure the links between ranks too: of two processes here, or, under torchrun, of its ranks",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")
    parser.add_argument("--format", choices=["text", "json"], default="text", help="default: text")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> None:
    check_target("--out", arguments.out, "rates.json", overwrite=arguments.overwrite)
    named = named_step(arguments)
    if arguments.data_dir is not None and named is None:
        raise PlanError(f"{arguments.data_dir!r} was named without --batch, its shapes; write for example {EXAMPLE}")

    # imported late: torch takes seconds to import, and mistakes in the flags are reported before that
    from lightning_amp.simulation.calibrate import calibrate, calibration_report

    links = None
    if arguments.links:
        from lightning_amp.simulation.calibrate_links import known_links, measure_links

        links = measure_links(known_links(arguments.device), arguments.device)
        if links is None:
            # not rank 0, which alone writes the file
            return
    found = calibrate(arguments.device, index=arguments.device_index)
    if links is not None:
        memory = found.after.memory and links.with_nccl(found.after.memory)
        found = replace(found, after=replace(found.after, links=links.links, memory=memory))
    operators = None
    if named is not None or arguments.config is not None:
        with of_shapes(arguments):
            operators = use_step(arguments, named, partial(_operators, arguments, found.after))
        found = replace(found, after=replace(found.after, operators=operators.operators))
    with written_aside(Path(arguments.out)) as aside:
        aside.write_text(found.after.to_json() + "\n")
    as_json = arguments.format == "json"
    more = {} if links is None else {"links": asdict(links)}
    more |= {} if operators is None else {"operators": asdict(operators)}
    print(json.dumps(found.to_dict() | more, indent=2) if as_json else calibration_report(found))
    if operators is not None and not as_json:
        from lightning_amp.simulation.calibrate_operators import operators_report

        print(f"\n{operators_report(operators)}")
    if links is not None and not as_json:
        print(f"\n{links.report()}")
    if not as_json:
        print(f"\nwrote {arguments.out}: use it with --rates, or AMPStrategy(rates={arguments.out!r})")


def _operators(
    arguments: argparse.Namespace, rates: "Rates", module: Any, batch: Any, run_settings: Any, _: Any
) -> "OperatorCalibration":
    from lightning_amp.simulation.calibrate import device_of
    from lightning_amp.simulation.calibrate_operators import calibrate_operators

    place = device_of(arguments.device, arguments.device_index)
    return calibrate_operators(module, batch, run_settings=run_settings, rates=rates, device=place)


def check_target(option: str, name: str, example: str, *, overwrite: bool) -> None:
    """Raise if a file cannot be written, before its contents are computed."""
    path, given, suffix = Path(name), f"{option} {name!r}", Path(example).suffix
    if path.is_dir() or path.suffix.lower() != suffix:
        kind = suffix[1:].upper()
        raise PlanError(f"{given} is not supported; allowed is the name of a {kind} file, such as {example}")
    if not path.parent.is_dir():
        raise PlanError(f"{given} cannot be written: its folder does not exist; make it first")
    if not all(os.access(place, os.W_OK) for place in (path.parent, path) if place.exists()):
        raise PlanError(f"{given} cannot be written; choose another place")
    if path.exists() and not overwrite:
        raise PlanError(f"{given} exists; choose another name, or add --overwrite")
