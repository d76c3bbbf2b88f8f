"""`lightning-amp`: demo, prepare, profile, plan, simulate, calibrate, verify, convert, fit, validate, test, predict.

The first four need no torch and start at once; the last four are Lightning's own command line and take its flags.
`simulate` and `calibrate` load torch once what was asked for is known to make sense.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_amp.convert import add_convert
from lightning_amp.errors import AmpError, PlanError
from lightning_amp.verification.command import add_verify

if TYPE_CHECKING:
    from lightning_amp.planning.rates import Rates

TRAINING = ("fit", "validate", "test", "predict")
BATCH_SIZE = 64
STATUS_OF_INTERRUPT = 130
"""Of a process that SIGINT has ended, as shells have it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 2 after an error that the user can mend, 130 after Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words and words[0] in TRAINING:
            from lightning_amp.lightning.training_cli import train

            train(words)
        else:
            arguments = _parser().parse_args(words)
            arguments.run(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        # the reader, such as `head`, has seen enough; without this python complains once more when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        print("lightning-amp: interrupted", file=sys.stderr)
        return STATUS_OF_INTERRUPT
    except Exception as error:
        mistake = _mistake_in(error)
        if mistake is None:
            raise
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"lightning-amp: error: {mistake}", file=sys.stderr)
        return 2
    return 0


def _mistake_in(error: BaseException | None) -> BaseException | None:
    """The user's mistake that an error stands for: an AmpError anywhere in its chain, for jsonargparse wraps what
    constructors raise, a refusal of Lightning's, or a missing file.
    """
    first, seen = error, set()
    while error is not None and id(error) not in seen:
        if isinstance(error, AmpError):
            return error
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    refusal = type(first).__name__ == "MisconfigurationException"
    return first if refusal or isinstance(first, FileNotFoundError) else None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-amp",
        description="Train multi-modal single-cell Hi-C models within the memory you have.",
        epilog="fit, validate, test and predict take Lightning's flags: lightning-amp fit --help",
    )
    verbs = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_demo(verbs.add_parser("demo", help="make a small data set, plan, train on two CPU ranks, predict"))
    _add_prepare(verbs.add_parser("prepare", help="write a data directory from .scool, .h5ad and genes"))
    _add_profile(verbs.add_parser("profile", help="say what a data directory holds"))
    _add_plan(verbs.add_parser("plan", help="say where memory will end, and what to do about it"))
    _add_simulate(
        verbs.add_parser(
            "simulate", help="count a training step's bytes on any number of ranks, without a GPU"
        )
    )
    _add_calibrate(
        verbs.add_parser("calibrate", help="measure a step on this device, so that predicted times fit it")
    )
    add_convert(
        verbs.add_parser("convert", help="write a sharded checkpoint as the plain one, a single file")
    )
    add_verify(verbs.add_parser("verify", help="compare several ranks with one process on your own model"))
    for verb in TRAINING:
        verbs.add_parser(
            verb, help=f"Lightning's {verb}, with strategy amp: lightning-amp {verb} --config FILE.yaml"
        )
    return parser


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", default="demo", help="folder to write to (default: demo); replaced if a demo made it"
    )
    parser.add_argument("--devices", type=int, default=2, help="CPU ranks (default: 2)")
    parser.add_argument("--epochs", type=int, default=30, help="training epochs (default: 30)")
    parser.set_defaults(run=_demo)


def _add_prepare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hic", required=True, help="single-cell Hi-C, .scool")
    parser.add_argument("--rna", required=True, help="RNA, .h5ad with raw counts in X or layers['counts']")
    parser.add_argument("--genes", required=True, help="gene positions, GTF or BED, plain or .gz")
    parser.add_argument("--strata", required=True, type=int, help="bin distances to keep: 0 to STRATA - 1")
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument("--labels", help="SCORE's table: cell, depth, batch, cluster")
    parser.add_argument("--resolution", help="check: the bin size that the file must have, such as 500kb")
    parser.add_argument(
        "--min-depth", type=int, default=0, help="drop cells with fewer contacts (default: 0)"
    )
    parser.add_argument(
        "--n-genes", type=int, default=2000, help="most variable genes to keep (default: 2000)"
    )
    parser.add_argument("--trans", action="store_true", help="keep pairs that cross a chromosome's end")
    parser.add_argument("--chromosomes", help="chromosomes to keep, separated by commas (default: all)")
    parser.add_argument(
        "--loop-quantile", type=float, default=0.98, help="pseudobulk quantile of graph edges"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing folder")
    parser.set_defaults(run=_prepare)


def _add_profile(parser: argparse.ArgumentParser, *, needs_dir: bool = True) -> None:
    parser.add_argument(
        "data_dir",
        metavar="DIR",
        nargs=None if needs_dir else "?",
        help="a folder written by `lightning-amp prepare` or by HiGLUE",
    )
    parser.add_argument("--setting", help="which files to take where the folder has several settings")
    parser.add_argument(
        "--keys", choices=["attention", "convolution"], help="how the decoder builds its keys"
    )
    parser.add_argument("--format", choices=["text", "json"], default="text", help="default: text")
    parser.set_defaults(run=_profile)


def _add_request(parser: argparse.ArgumentParser) -> None:
    _add_profile(parser, needs_dir=False)
    parser.add_argument("--devices", type=int, help="ranks in all (default: 1)")
    parser.add_argument("--device-memory", help="memory of one device, such as 24GiB (default: unknown)")
    parser.add_argument("--policy", help="auto (default) or paper")
    parser.add_argument("--strategies", help="your own choice instead of the policy's, such as S1,S3")
    parser.add_argument("--batch-size", type=int, help=f"cells per rank and step (default: {BATCH_SIZE})")
    parser.add_argument(
        "--latent-dim", type=int, default=None, help="latent dimension of the model (default: 64)"
    )
    parser.add_argument(
        "--window", type=int, default=None, help="attention window in bins (default: 20 per stratum)"
    )
    parser.add_argument("--model-parallel-size", help='ranks of the model axis (default: "auto")')
    parser.add_argument(
        "--device", help="whose rates predict times, such as A100, H100 or cpu (default: one CPU core)"
    )
    parser.add_argument("--rates", metavar="FILE.json", help="rates that `calibrate` has measured, instead")
    parser.add_argument(
        "--shape",
        help="a decoder by itself instead of DIR: anchors=113505,dim=128,strata=32,batch=1"
        "[,window=640,variant=paper,chained=yes,key=convolution,n_batches=2,features=5400]",
    )


def _add_plan(parser: argparse.ArgumentParser) -> None:
    _add_request(parser)
    parser.add_argument(
        "--recommend-devices",
        action="store_true",
        help="say how many devices are worth having for steps of --batch-size cells in all",
    )
    parser.add_argument(
        "--what-if",
        nargs="*",
        metavar="NAME=VALUES",
        help="say what other data would need, auto beside paper: bin=1mb,500kb,100kb,50kb strata=10,32 batch=1,64,256"
        " memory=8GiB,24GiB,80GiB (these are the defaults; with --shape anchors=... instead of bin)",
    )
    parser.set_defaults(run=_plan)


def _add_calibrate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", required=True, metavar="FILE.json", help="file to write, for --rates")
    parser.add_argument("--device", help="cpu or cuda (default: cuda where there is one)")
    parser.add_argument("--device-index", type=int, default=0, help="of several GPUs, which (default: 0)")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing file")
    parser.add_argument("--format", choices=["text", "json"], default="text", help="default: text")
    parser.set_defaults(run=_calibrate)


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    _add_request(parser)
    parser.add_argument(
        "--plot", metavar="FILE.png", help="draw memory after each stratum; replaces the file"
    )
    parser.set_defaults(run=_simulate)


def _demo(arguments: argparse.Namespace) -> None:
    from lightning_amp.demo import run_demo

    for line in run_demo(Path(arguments.out), devices=arguments.devices, epochs=arguments.epochs):
        print(line, flush=True)


def _prepare(arguments: argparse.Namespace) -> None:
    from lightning_amp.data.prepare import prepare

    directory = prepare(
        hic=arguments.hic,
        rna=arguments.rna,
        genes=arguments.genes,
        strata=arguments.strata,
        out=arguments.out,
        labels=arguments.labels,
        resolution=arguments.resolution,
        min_depth=arguments.min_depth,
        n_genes=arguments.n_genes,
        cis_only=not arguments.trans,
        chromosomes=arguments.chromosomes.split(",") if arguments.chromosomes else None,
        loop_quantile=arguments.loop_quantile,
        overwrite=arguments.overwrite,
    )
    for path in (directory.hic, directory.rna, directory.graph):
        print(f"wrote {path}")


def _profile(arguments: argparse.Namespace) -> None:
    from lightning_amp.planning.report import profile_report

    profile = _read(arguments)
    print(json.dumps(profile.to_dict(), indent=2) if arguments.format == "json" else profile_report(profile))


def _plan(arguments: argparse.Namespace) -> None:
    from lightning_amp.planning.policy import plan
    from lightning_amp.planning.report import plan_report, profile_report
    from lightning_amp.planning.request import check_request
    from lightning_amp.planning.shape import LATENT_DIM, reference_shape

    if arguments.what_if is not None or arguments.recommend_devices:
        from lightning_amp.outlook import outlook

        print(outlook(arguments, rates=_rates(arguments), read=_read))
        return
    request = _request(arguments)
    check_request(**request)
    rates = _rates(arguments)
    if arguments.shape is not None or arguments.data_dir is None:
        raise PlanError(
            f"a plan was asked for with DIR={arguments.data_dir!r} and --shape {arguments.shape!r}; give DIR: a decoder"
            " by itself is for `simulate` and for --what-if"
        )
    profile = _read(arguments)
    shape = reference_shape(
        profile,
        batch_size=request["batch_size"],
        latent_dim=LATENT_DIM if arguments.latent_dim is None else arguments.latent_dim,
        window=arguments.window,
    )
    made = plan(profile, **request, shape=shape, rates=rates)
    print(
        made.to_json() if arguments.format == "json" else f"{profile_report(profile)}\n\n{plan_report(made)}"
    )


def _simulate(arguments: argparse.Namespace) -> None:
    from lightning_amp.planning.request import check_request
    from lightning_amp.simulation.shape_text import check_source, parse_shape

    request = _request(arguments)
    check_request(**request)
    of_data = {"--latent-dim": arguments.latent_dim, "--window": arguments.window}
    of_data |= {"--setting": arguments.setting, "--keys": arguments.keys}
    check_source(arguments.shape, arguments.data_dir, of_data=of_data)
    rates = _rates(arguments)
    alone = arguments.shape is not None
    if arguments.plot is not None:
        _check_plot(arguments.plot)
    found: Any = parse_shape(arguments.shape) if alone else _read(arguments)
    if alone and None not in (found.batch_size, arguments.batch_size):
        raise PlanError(
            f"batch={found.batch_size!r} was asked for in --shape, and --batch-size {arguments.batch_size!r} beside"
            " it; give one of them"
        )

    # late: torch takes seconds to load, and mistakes are told before
    from lightning_amp.simulation.picture import draw
    from lightning_amp.simulation.report import simulation_report
    from lightning_amp.simulation.request import request_decoder, request_reference
    from lightning_amp.simulation.simulate import simulate_plan

    of_model = {"latent_dim": arguments.latent_dim, "window": arguments.window}
    request |= {"rates": rates}
    asked = request_decoder(found, **request) if alone else request_reference(found, **of_model, **request)
    simulation = simulate_plan(asked.make, asked.plan)
    if arguments.plot is not None:
        draw(Path(arguments.plot), simulation)
    as_json = arguments.format == "json"
    print(json.dumps(simulation.to_dict(), indent=2) if as_json else simulation_report(simulation))


def _calibrate(arguments: argparse.Namespace) -> None:
    _check_target(arguments.out, overwrite=arguments.overwrite)

    # late: torch takes seconds to load, and mistakes are told before
    from lightning_amp.simulation.calibration import calibrate, calibration_report

    found = calibrate(arguments.device, index=arguments.device_index)
    Path(arguments.out).write_text(found.after.to_json() + "\n")
    as_json = arguments.format == "json"
    print(json.dumps(found.to_dict(), indent=2) if as_json else calibration_report(found))
    if not as_json:
        print(f"\nwrote {arguments.out}: use it with --rates, or AMPStrategy(rates={arguments.out!r})")


def _check_target(out: str, *, overwrite: bool) -> None:
    """Refuse a file that cannot be written, before the step is measured."""
    path = Path(out)
    if path.is_dir() or path.suffix.lower() != ".json":
        raise PlanError(
            f"--out {out!r} was asked for; allowed is the name of a JSON file, such as rates.json"
        )
    if not path.parent.is_dir():
        raise PlanError(f"--out {out!r} was asked for, and its folder does not exist; make it first")
    if path.exists() and not overwrite:
        raise PlanError(f"--out {out!r} was asked for and exists; choose another name, or add --overwrite")


def _check_plot(plot: str) -> None:
    """Refuse what no picture can be written to, before the work that it would show."""
    path = Path(plot)
    if path.suffix.lower() != ".png" or path.is_dir():
        raise PlanError(
            f"--plot {plot!r} was asked for; allowed is the name of a PNG file, such as memory.png"
        )
    if not path.parent.is_dir():
        raise PlanError(f"--plot {plot!r} was asked for, and its folder does not exist; make it first")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PlanError(f"--plot {plot!r} was asked for, and may not be written; choose another place")


def _request(arguments: argparse.Namespace) -> dict[str, Any]:
    """What `plan` and `simulate` ask of the policy."""
    size = arguments.model_parallel_size or "auto"
    return {
        "devices": 1 if arguments.devices is None else arguments.devices,
        "device_memory": arguments.device_memory,
        "policy": arguments.policy or "auto",
        "strategies": arguments.strategies,
        "batch_size": BATCH_SIZE if arguments.batch_size is None else arguments.batch_size,
        "model_parallel_size": int(size) if size.isdecimal() and len(size) < 10 else size,
    }


def _rates(arguments: argparse.Namespace) -> "Rates":
    """Of the device or the file that was asked for, else of one CPU core."""
    from lightning_amp.planning.rates import CPU_CORE, Rates, rates_for

    if arguments.rates is not None and arguments.device is not None:
        raise PlanError(
            f"--rates {arguments.rates!r} was asked for together with --device {arguments.device!r}; give one of them"
        )
    if arguments.rates is not None:
        return Rates.read(arguments.rates)
    return CPU_CORE if arguments.device is None else rates_for(arguments.device)


def _read(arguments: argparse.Namespace):  # type: ignore[no-untyped-def]
    from lightning_amp.profiling.read import profile

    keys = arguments.keys
    return profile(
        arguments.data_dir, setting=arguments.setting, attention=None if keys is None else keys == "attention"
    )


if __name__ == "__main__":
    sys.exit(main())
