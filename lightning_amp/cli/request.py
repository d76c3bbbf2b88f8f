"""Define flags shared by `profile`, `plan` and `simulate`; refuse wrong combinations; read the profile and rates."""

import argparse
from typing import TYPE_CHECKING, Any

from lightning_amp.errors import PlanError

if TYPE_CHECKING:
    from lightning_amp.costs.device_rates import Rates
    from lightning_amp.profiling.profile import Profile
    from lightning_amp.simulation.parse_shape import ShapeRequest

BATCH_SIZE = 64
OF_DATA = {"--latent-dim": "latent_dim", "--window": "window", "--setting": "setting", "--keys": "keys"}
"""Options that describe the model of a data directory, and thus are refused with `--shape`."""


def add_data(parser: argparse.ArgumentParser) -> None:
    """Add the flags that select the data."""
    parser.add_argument(
        "data_dir", metavar="DIR", nargs="?", help="a folder written by `lightning-amp prepare` or by HiGLUE"
    )
    parser.add_argument("--setting", help="which files to take where the folder has several settings")
    parser.add_argument(
        "--keys",
        choices=["attention", "full_attention", "convolution"],
        help="how the decoder builds its keys; attention is local, full_attention to all anchors",
    )
    parser.add_argument("--format", choices=["text", "json"], default="text", help="default: text")


def add_request(parser: argparse.ArgumentParser) -> None:
    """Add the flags of a planning request."""
    add_data(parser)
    parser.add_argument("--devices", type=int, help="ranks in all (default: 1)")
    parser.add_argument(
        "--device-memory", help="memory of one device, such as 24GiB, or of each, as 24GiB,80GiB (default: unknown)"
    )
    parser.add_argument("--policy", help="auto (default) or paper")
    parser.add_argument("--strategies", help="your own choice instead of the policy's, such as S1,S3")
    parser.add_argument("--batch-size", type=int, help=f"cells per rank and step (default: {BATCH_SIZE})")
    parser.add_argument("--latent-dim", type=int, default=None, help="latent dimension of the model (default: 64)")
    parser.add_argument("--window", type=int, default=None, help="attention window in bins (default: 20 per stratum)")
    parser.add_argument("--model-parallel-size", help='ranks of the model axis (default: "auto")')
    parser.add_argument(
        "--device",
        help="whose rates predict times, and whose memory is the budget unless one is given, such as H100, A100-80GB or"
        " cpu (default: one CPU core)",
    )
    parser.add_argument("--rates", metavar="FILE.json", help="rates that `calibrate` has measured, instead")
    parser.add_argument(
        "--shape",
        help="a decoder by itself instead of DIR: anchors=113505,dim=128,strata=32,batch=1"
        "[,window=640,variant=paper,chained=yes,key=convolution,n_batches=2,features=5400]",
    )


def request_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of the planner for `plan` and `simulate`."""
    size = arguments.model_parallel_size or "auto"
    return {
        "devices": 1 if arguments.devices is None else arguments.devices,
        "device_memory": arguments.device_memory,
        "policy": arguments.policy or "auto",
        "strategies": arguments.strategies,
        "batch_size": BATCH_SIZE if arguments.batch_size is None else arguments.batch_size,
        "model_parallel_size": int(size) if size.isdecimal() and len(size) < 10 else size,
    }


def latent_dim(arguments: argparse.Namespace) -> int:
    """Return the requested latent dimension, else the default of the reference model."""
    from lightning_amp.costs.model_shape import LATENT_DIM

    return LATENT_DIM if arguments.latent_dim is None else int(arguments.latent_dim)


def rates_of_request(arguments: argparse.Namespace, precision: str = "32-true") -> "Rates":
    """Return the rates in the file of `--rates`, else of `--device` at a precision, else of one CPU core."""
    from lightning_amp.costs.device_rates import CPU_CORE, Rates, products_under, rates_for

    if arguments.rates is not None and arguments.device is not None:
        raise PlanError(
            f"--rates {arguments.rates!r} cannot be used with --device {arguments.device!r}; give one of them"
        )
    if arguments.rates is not None:
        return Rates.read(arguments.rates)
    if arguments.device is None:
        return CPU_CORE
    return rates_for(arguments.device, products=products_under(precision))


def read(arguments: argparse.Namespace) -> "Profile":
    """Profile the data directory of the command line."""
    from lightning_amp.profiling.read_profile import profile

    attention: Any = {None: None, "attention": True, "full_attention": "full", "convolution": False}
    return profile(arguments.data_dir, setting=arguments.setting, attention=attention[arguments.keys])


def decoder_of_request(arguments: argparse.Namespace) -> "ShapeRequest | None":
    """Return the decoder of `--shape`; None if a data directory is given."""
    from lightning_amp.simulation.parse_shape import EXAMPLE, parse_shape

    shape, data_dir = arguments.shape, arguments.data_dir
    if (shape is None) == (data_dir is None):
        both = f"both DIR={data_dir!r} and shape={shape!r}"
        raise PlanError(
            f"got {'neither DIR nor --shape' if shape is None else both}; give one of them: a data directory"
            f" for the reference model, or --shape {EXAMPLE} for a decoder by itself"
        )
    if shape is None:
        return None
    refuse(arguments, f"--shape {shape!r}", OF_DATA, "which go with DIR: say dim, window and key in the shape")
    found = parse_shape(shape)
    if None not in (found.batch_size, arguments.batch_size):
        raise PlanError(
            f"batch={found.batch_size!r} in --shape cannot be used with --batch-size"
            f" {arguments.batch_size!r}; give one of them"
        )
    return found


def refuse(arguments: argparse.Namespace, name: str, options: dict[str, str], why: str) -> None:
    """Raise if options are given that do not apply together with `name`."""
    given = [name for name, attribute in options.items() if getattr(arguments, attribute) is not None]
    if given:
        raise PlanError(f"{name} cannot be used with {', '.join(given)}, {why}; leave them out")
