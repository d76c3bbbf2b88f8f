"""`lightning-amp`: demo, prepare, profile, plan, simulate, calibrate, verify, convert, fit, validate, test, predict.

The first four need no torch and start at once; the last four are Lightning's own command line and take its flags.
`simulate` and `calibrate` load torch once what was asked for is known to make sense.
"""

import argparse
import json
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_amp.cli.convert import add_convert
from lightning_amp.cli.verbs import PROGRAM, VERBS, described
from lightning_amp.cli.verify import add_verify
from lightning_amp.data.files.write_aside import FULL, cannot_write, written_aside
from lightning_amp.errors import STATUS_OF_INTERRUPT, AmpError, PlanError

if TYPE_CHECKING:
    from lightning_amp.planning.time.device_rates import Rates
    from lightning_amp.simulation.parse_shape import ShapeRequest

TRAINING = ("fit", "validate", "test", "predict")
BATCH_SIZE = 64
NOTHING_FITS = 3
"""Exit status of `plan` where nothing fits the memory that was named."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 2 after an error that the user can mend, 3 from `plan` where nothing
    fits the memory that was named, 130 after Ctrl-C.
    """
    words, status = list(sys.argv[1:] if argv is None else argv), 0
    # torch says it of a package that others have installed, when it is imported
    warnings.filterwarnings("ignore", message="The pynvml package is deprecated", category=FutureWarning)
    try:
        if words and words[0] in TRAINING:
            from lightning_amp.cli.train import train

            train(words)
        else:
            arguments = _parser().parse_args(words)
            status = arguments.run(arguments) or 0
        sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()  # the reader, such as `head`, has seen enough
    except KeyboardInterrupt:
        print("lightning-amp: interrupted", file=sys.stderr)
        return STATUS_OF_INTERRUPT
    except Exception as error:
        mistake = _mistake_in(error)
        if mistake is None:
            raise
        _drop_output()
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"lightning-amp: error: {mistake}", file=sys.stderr)
        return 2
    return status


def _drop_output() -> None:
    """Drop what standard output does not take; python complains of it once more when it ends."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _mistake_in(error: BaseException | None) -> BaseException | str | None:
    """The user's mistake that an error stands for: an AmpError or a full disk anywhere in its chain, for jsonargparse
    and torch wrap what was raised, a refusal of Lightning's, or a file that is missing or not to be opened.
    """
    first, seen = error, set()
    while error is not None and id(error) not in seen:
        if isinstance(error, AmpError):
            return error
        if isinstance(error, OSError) and error.errno in FULL:
            return cannot_write(error.filename, error)
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    refusal = type(first).__name__ == "MisconfigurationException"
    return first if refusal or isinstance(first, (FileNotFoundError, PermissionError)) else None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Train multi-modal single-cell Hi-C models within the memory you have.",
        epilog="fit, validate, test and predict take Lightning's flags: lightning-amp fit --help",
    )
    verbs = parser.add_subparsers(required=True, metavar="COMMAND")
    raw = argparse.RawDescriptionHelpFormatter
    parsers = {
        verb: verbs.add_parser(verb, help=words[0], formatter_class=raw, **described(verb))
        for verb, words in VERBS.items()
    }
    _add_demo(parsers["demo"])
    _add_prepare(parsers["prepare"])
    _add_profile(parsers["profile"])
    _add_plan(parsers["plan"])
    _add_simulate(parsers["simulate"])
    _add_calibrate(parsers["calibrate"])
    add_convert(parsers["convert"])
    add_verify(parsers["verify"])
    return parser


def _add_demo(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", default="demo", help="folder to write to (default: demo); replaced if a demo made it"
    )
    parser.add_argument("--devices", type=int, default=2, help="CPU ranks (default: 2)")
    parser.add_argument("--epochs", type=int, default=40, help="training epochs (default: 40)")
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
    parser.add_argument(
        "--chromosomes",
        help="chromosomes to keep, separated by commas (default: all but scaffolds and the mitochondrial one)",
    )
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
    from lightning_amp.cli.demo import run_demo

    for line in run_demo(Path(arguments.out), devices=arguments.devices, epochs=arguments.epochs):
        print(line, flush=True)


def _prepare(arguments: argparse.Namespace) -> None:
    from lightning_amp.cli.prepared import prepared_report
    from lightning_amp.data.prepare.prepare import prepare

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
    print(f"{prepared_report(directory)}\n")
    for path in (directory.hic, directory.rna, directory.graph):
        print(f"wrote {path}")


def _profile(arguments: argparse.Namespace) -> None:
    from lightning_amp.planning.reports.plan_report import profile_report

    profile = _read(arguments)
    print(json.dumps(profile.to_dict(), indent=2) if arguments.format == "json" else profile_report(profile))


def _plan(arguments: argparse.Namespace) -> int:
    from lightning_amp.planning.plan.decoder_only import profile_of_module, shape_of_decoder
    from lightning_amp.planning.plan.model_shape import LATENT_DIM, reference_shape
    from lightning_amp.planning.policies.make_plan import plan
    from lightning_amp.planning.policies.request import check_request
    from lightning_amp.planning.reports.plan_report import plan_report, profile_report

    if arguments.what_if is not None or arguments.recommend_devices:
        from lightning_amp.cli.plan_questions import outlook

        text, fits = outlook(arguments, rates=_rates(arguments), read=_read)
        print(text)
        return 0 if fits else NOTHING_FITS
    request = _request(arguments)
    check_request(**request)
    alone, rates = _alone(arguments), _rates(arguments)
    if alone is not None:
        request["batch_size"] = alone.batch_size or request["batch_size"]
        shape = shape_of_decoder(alone.decoder, batch_size=request["batch_size"])
        profile, of_data = profile_of_module(shape), ""
    else:
        profile = _read(arguments)
        shape = reference_shape(
            profile,
            batch_size=request["batch_size"],
            latent_dim=LATENT_DIM if arguments.latent_dim is None else arguments.latent_dim,
            window=arguments.window,
        )
        of_data = f"{profile_report(profile)}\n\n"
    made = plan(profile, **request, shape=shape, rates=rates)
    print(made.to_json() if arguments.format == "json" else f"{of_data}{plan_report(made)}")
    return NOTHING_FITS if made.fits is False else 0


def _alone(arguments: argparse.Namespace) -> "ShapeRequest | None":
    """The decoder by itself that was asked for instead of a data directory; None where that was named."""
    from lightning_amp.simulation.parse_shape import check_source, parse_shape

    of_data = {"--latent-dim": arguments.latent_dim, "--window": arguments.window}
    of_data |= {"--setting": arguments.setting, "--keys": arguments.keys}
    check_source(arguments.shape, arguments.data_dir, of_data=of_data)
    if arguments.shape is None:
        return None
    found = parse_shape(arguments.shape)
    if None not in (found.batch_size, arguments.batch_size):
        raise PlanError(
            f"batch={found.batch_size!r} was asked for in --shape, and --batch-size {arguments.batch_size!r} beside"
            " it; give one of them"
        )
    return found


def _simulate(arguments: argparse.Namespace) -> None:
    from lightning_amp.planning.policies.request import check_request

    request = _request(arguments)
    check_request(**request)
    alone, rates = _alone(arguments), _rates(arguments)
    if arguments.plot is not None:
        _check_target("--plot", arguments.plot, "memory.png", overwrite=True)
    profile: Any = None if alone is not None else _read(arguments)

    # late: torch takes seconds to load, and mistakes are told before
    from lightning_amp.simulation.draw_simulation import draw
    from lightning_amp.simulation.request import request_decoder, request_reference
    from lightning_amp.simulation.simulate import simulate_plan
    from lightning_amp.simulation.simulation_report import simulation_report

    of_model = {"latent_dim": arguments.latent_dim, "window": arguments.window}
    request |= {"rates": rates}
    if alone is not None:
        asked = request_decoder(alone, **request)
    else:
        asked = request_reference(profile, **of_model, **request)
    simulation = simulate_plan(asked.make, asked.plan)
    if arguments.plot is not None:
        with written_aside(Path(arguments.plot)) as aside:
            draw(aside, simulation)
    as_json = arguments.format == "json"
    print(json.dumps(simulation.to_dict(), indent=2) if as_json else simulation_report(simulation))


def _calibrate(arguments: argparse.Namespace) -> None:
    _check_target("--out", arguments.out, "rates.json", overwrite=arguments.overwrite)

    # late: torch takes seconds to load, and mistakes are told before
    from lightning_amp.simulation.calibrate import calibrate, calibration_report

    found = calibrate(arguments.device, index=arguments.device_index)
    with written_aside(Path(arguments.out)) as aside:
        aside.write_text(found.after.to_json() + "\n")
    as_json = arguments.format == "json"
    print(json.dumps(found.to_dict(), indent=2) if as_json else calibration_report(found))
    if not as_json:
        print(f"\nwrote {arguments.out}: use it with --rates, or AMPStrategy(rates={arguments.out!r})")


def _check_target(option: str, name: str, example: str, *, overwrite: bool) -> None:
    """Refuse a file that cannot be written, before the work that it would show."""
    path, asked, suffix = Path(name), f"{option} {name!r} was asked for", Path(example).suffix
    if path.is_dir() or path.suffix.lower() != suffix:
        kind = suffix[1:].upper()
        raise PlanError(f"{asked}; allowed is the name of a {kind} file, such as {example}")
    if not path.parent.is_dir():
        raise PlanError(f"{asked}, and its folder does not exist; make it first")
    if not all(os.access(place, os.W_OK) for place in (path.parent, path) if place.exists()):
        raise PlanError(f"{asked}, and may not be written; choose another place")
    if path.exists() and not overwrite:
        raise PlanError(f"{asked} and exists; choose another name, or add --overwrite")


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
    from lightning_amp.planning.time.device_rates import CPU_CORE, Rates, rates_for

    if arguments.rates is not None and arguments.device is not None:
        raise PlanError(
            f"--rates {arguments.rates!r} was asked for together with --device {arguments.device!r}; give one of them"
        )
    if arguments.rates is not None:
        return Rates.read(arguments.rates)
    return CPU_CORE if arguments.device is None else rates_for(arguments.device)


def _read(arguments: argparse.Namespace):  # type: ignore[no-untyped-def]
    from lightning_amp.profiling.read_profile import profile

    keys = arguments.keys
    return profile(
        arguments.data_dir, setting=arguments.setting, attention=None if keys is None else keys == "attention"
    )
