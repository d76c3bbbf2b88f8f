"""`lightning-amp calibrate`: measure a training step, with --links also links between ranks; write a --rates file."""

import argparse
import json
import os
from dataclasses import asdict, replace
from pathlib import Path

from lightning_amp.data.files.directory import written_aside
from lightning_amp.errors import PlanError


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command."""
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
    with written_aside(Path(arguments.out)) as aside:
        aside.write_text(found.after.to_json() + "\n")
    as_json = arguments.format == "json"
    of_links = {} if links is None else {"links": asdict(links)}
    print(json.dumps(found.to_dict() | of_links, indent=2) if as_json else calibration_report(found))
    if links is not None and not as_json:
        print(f"\n{links.report()}")
    if not as_json:
        print(f"\nwrote {arguments.out}: use it with --rates, or AMPStrategy(rates={arguments.out!r})")


def check_target(option: str, name: str, example: str, *, overwrite: bool) -> None:
    """Raise if a file cannot be written, before its contents are computed."""
    path, asked, suffix = Path(name), f"{option} {name!r}", Path(example).suffix
    if path.is_dir() or path.suffix.lower() != suffix:
        kind = suffix[1:].upper()
        raise PlanError(f"{asked} is not supported; allowed is the name of a {kind} file, such as {example}")
    if not path.parent.is_dir():
        raise PlanError(f"{asked} cannot be written: its folder does not exist; make it first")
    if not all(os.access(place, os.W_OK) for place in (path.parent, path) if place.exists()):
        raise PlanError(f"{asked} cannot be written; choose another place")
    if path.exists() and not overwrite:
        raise PlanError(f"{asked} exists; choose another name, or add --overwrite")
