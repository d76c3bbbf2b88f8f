"""`lightning-amp plan`: a plan, or, in plan_questions.py, answers about plans of what is not there yet."""

import argparse

from lightning_amp.cli.configuration import add_configuration, plan_of_configuration
from lightning_amp.cli.named_class import add_named_class, named_step, of_shapes
from lightning_amp.cli.request import (
    add_request,
    decoder_asked,
    latent_dim,
    rates_asked,
    read,
    refuse,
    request_of,
)
from lightning_amp.errors import PlanError

OUTLOOKS = {"--what-if": "what_if", "--recommend-devices": "recommend_devices"}
NOTHING_FITS = 3
"""Exit status where nothing fits the memory that was named, or where that is not known."""
NO_CODE = "# no block of this plan runs in chunks; --strategies chunk, or a smaller --device-memory, would ask for them"


def add_plan(parser: argparse.ArgumentParser) -> None:
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
        "--what-if",
        nargs="*",
        metavar="NAME=VALUES",
        help="say what other data would need, auto beside paper: bin=1mb,500kb,100kb,50kb strata=10,32 batch=1,64,256"
        " memory=8GiB,24GiB,80GiB (these are the defaults; with --shape anchors=... instead of bin)",
    )
    parser.add_argument(
        "--show-code",
        action="store_true",
        help="with --config or MODULE:CLASS: print what the blocks run that the plan computes in chunks, as Python",
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from lightning_amp.costs.model_shape import reference_shape
    from lightning_amp.planning.plan.decoder_only import profile_of_module, shape_of_decoder
    from lightning_amp.planning.policies.make_plan import plan
    from lightning_amp.planning.policies.request import check_request
    from lightning_amp.planning.reports.plan_report import plan_report, profile_report

    if arguments.show_code and arguments.format == "json":
        raise PlanError(
            "--show-code was asked for with --format json, which holds the plan alone; leave one out"
        )
    named = named_step(arguments)
    if named is not None or arguments.config is not None:
        of = f"--config {arguments.config!r}" if named is None else repr(arguments.data_dir)
        refuse(arguments, of, OUTLOOKS, "which plan other data")
        with of_shapes(arguments):
            made, code = plan_of_configuration(arguments, named)
        print(made.to_json() if arguments.format == "json" else plan_report(made))
        if arguments.show_code:
            print(f"\n{code or NO_CODE}")
        unknown = made.fits is None and made.uncounted and made.budget_bytes is not None
        return NOTHING_FITS if made.fits is False or unknown else 0
    refuse(
        arguments,
        "a data directory or --shape",
        {"--tensor-grid": "tensor_grid"},
        "which is of --config FILE.yaml or MODULE:CLASS",
    )
    if arguments.show_code:
        raise PlanError(
            "--show-code was asked for without --config FILE.yaml or MODULE:CLASS, whose blocks it would show; name one"
        )
    if arguments.what_if is not None or arguments.recommend_devices:
        from lightning_amp.cli.plan_questions import outlook

        text, fits = outlook(arguments)
        print(text)
        return 0 if fits else NOTHING_FITS
    request = request_of(arguments)
    check_request(**request)
    decoder, rates = decoder_asked(arguments), rates_asked(arguments)
    if decoder is not None:
        request["batch_size"] = decoder.batch_size or request["batch_size"]
        shape = shape_of_decoder(decoder.decoder, batch_size=request["batch_size"])
        profile, of_data = profile_of_module(shape), ""
    else:
        profile = read(arguments)
        shape = reference_shape(
            profile,
            batch_size=request["batch_size"],
            latent_dim=latent_dim(arguments),
            window=arguments.window,
        )
        of_data = f"{profile_report(profile)}\n\n"
    made = plan(profile, **request, shape=shape, rates=rates)
    print(made.to_json() if arguments.format == "json" else f"{of_data}{plan_report(made)}")
    return NOTHING_FITS if made.fits is False else 0
