"""`lightning-amp verify`: compare one process with several ranks on the model and data of a `fit` configuration."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from lightning_amp.errors import PlanError
from lightning_amp.techniques.table import options_of_techniques

OF_THE_PLAN = ("policy", "strategies", "plan", "model_parallel_size")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the command; torch is imported when it runs."""
    parser.add_argument("--config", required=True, metavar="FILE.yaml", help="what `lightning-amp fit` is given")
    parser.add_argument("--devices", type=int, default=2, help="CPU ranks (default: 2)")
    parser.add_argument("--steps", type=int, default=3, help="batches to train on (default: 3)")
    parser.add_argument("--policy", choices=["auto", "paper"], help="default: the configuration's")
    parser.add_argument("--strategies", help="your own choice instead of the policy's, such as S1,S3")
    parser.add_argument("--plan", metavar="PLAN.json", help="a plan instead of a policy")
    parser.add_argument("--model-parallel-size", type=int, help="ranks of the model axis")
    parser.add_argument("--precision", choices=["float32", "float64"], help="default: both")
    parser.add_argument("--format", choices=["text", "json"], default="text", help="default: text")
    parser.set_defaults(run=_verify)


def _verify(arguments: argparse.Namespace) -> None:
    if not Path(arguments.config).is_file():
        raise PlanError(f"verify found no file --config {arguments.config!r}; give the YAML of `lightning-amp fit`")

    # imported late: torch takes seconds to import, and mistakes are reported before
    from lightning_amp.verification.read_configuration import read_configuration
    from lightning_amp.verification.verify import verify

    module, data, options = read_configuration(arguments.config)
    found = verify(
        module,
        data,
        devices=arguments.devices,
        steps=arguments.steps,
        precisions=[arguments.precision] if arguments.precision else ["float32", "float64"],
        **_decided(options, arguments),
    )
    print(json.dumps(found.to_dict(), indent=2) if arguments.format == "json" else found)
    if not found.ok:
        sys.stdout.flush()
        raise SystemExit(1)


def _decided(options: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the configuration's plan options, or those of the command line; only the model axis may be combined."""
    requested = {name: getattr(arguments, name) for name in OF_THE_PLAN if getattr(arguments, name) is not None}
    dropped = {*OF_THE_PLAN, *options_of_techniques()}
    if not {*requested} - {"model_parallel_size"}:
        # options that fix a size, which would override the requested one
        dropped = {"plan", "tensor_grid"} if requested else set()
    kept = {name: value for name, value in options.items() if name not in dropped}
    return kept | requested
