"""`lightning-amp plan --what-if` and `--recommend-devices`: plans of what is not there yet, as text or JSON.

Neither needs torch.
"""

import argparse
import json
from dataclasses import replace
from functools import partial

from lightning_amp.cli.request import BATCH_SIZE, OF_DATA, latent_dim, rates_asked, read, refuse
from lightning_amp.costs.model_shape import ModelShape, reference_shape
from lightning_amp.errors import PlanError
from lightning_amp.planning.plan.decoder_only import profile_of_module, shape_of_decoder
from lightning_amp.planning.questions.parse_questions import Questions, parse_questions
from lightning_amp.planning.questions.recommend_devices import recommend_devices
from lightning_amp.planning.questions.what_if import Source, to_dict, what_if
from lightning_amp.planning.reports.answers_report import recommendation_report, what_if_report
from lightning_amp.profiling.profile import Profile
from lightning_amp.quantities import parse_bytes
from lightning_amp.simulation.parse_shape import ShapeRequest, parse_shape

DECIDED = {
    "--devices": "devices",
    "--policy": "policy",
    "--strategies": "strategies",
    "--model-parallel-size": "model_parallel_size",
}
"""Options that both decide by themselves."""
ASKED = {"--device-memory": "device_memory", "--batch-size": "batch_size"}
"""Options that stand in the questions of --what-if."""


def outlook(arguments: argparse.Namespace) -> tuple[str, bool]:
    """The text to print, and whether a number of devices fits the memory that was named; what-if names many."""
    both = arguments.what_if is not None and arguments.recommend_devices
    if both:
        raise PlanError("--what-if and --recommend-devices were asked for; give one of them")
    if arguments.recommend_devices:
        return _recommendation(arguments)
    return _what_if(arguments), True


def _recommendation(arguments: argparse.Namespace) -> tuple[str, bool]:
    refuse(
        arguments, "--recommend-devices", DECIDED | {"--shape": "shape"}, "which it decides, or cannot use"
    )
    if arguments.data_dir is None:
        raise PlanError("--recommend-devices was asked for without DIR; name the folder of the data")
    budget = None if arguments.device_memory is None else parse_bytes(arguments.device_memory)
    cells = BATCH_SIZE if arguments.batch_size is None else arguments.batch_size
    profile = read(arguments)
    shape_of = partial(_reference, profile, latent_dim=latent_dim(arguments), window=arguments.window)
    found = recommend_devices(profile, shape_of, cells=cells, budget=budget, rates=rates_asked(arguments))
    as_json = arguments.format == "json"
    text = json.dumps(found.to_dict(), indent=2) if as_json else recommendation_report(found)
    return text, found.devices is not None


def _reference(profile: Profile, cells: int, *, latent_dim: int, window: int | None) -> ModelShape:
    return reference_shape(profile, batch_size=cells, latent_dim=latent_dim, window=window)


def _what_if(arguments: argparse.Namespace) -> str:
    refuse(arguments, "--what-if", DECIDED, "which it decides")
    refuse(arguments, "--what-if", ASKED, "which are among its questions: say batch=... and memory=...")
    if (arguments.shape is None) == (arguments.data_dir is None):
        raise PlanError(
            f"--what-if was asked for with DIR={arguments.data_dir!r} and --shape {arguments.shape!r}; give one of"
            " them. A DIR right after --what-if reads as a question: write it before"
        )
    asked = parse_questions(arguments.what_if)
    if arguments.shape is None:
        source = _of_data(arguments, read(arguments))
    else:
        refuse(arguments, "--shape", OF_DATA, "which go with DIR: say dim, window and key in the shape")
        source, asked = _of_shape(parse_shape(arguments.shape), asked, words=arguments.what_if)
    answers = what_if(source, asked, rates=rates_asked(arguments))
    return json.dumps(to_dict(answers), indent=2) if arguments.format == "json" else what_if_report(answers)


def _of_data(arguments: argparse.Namespace, profile: Profile) -> Source:
    if not any(m.decomposition is not None for m in profile.modalities):
        raise PlanError(
            f"--what-if was asked for with {arguments.data_dir!r}, which has no modality with strata (Hi-C); name a"
            " folder with one, or give --shape"
        )
    return Source(profile=profile, latent_dim=latent_dim(arguments), window=arguments.window)


def _of_shape(found: ShapeRequest, asked: Questions, *, words: list[str]) -> tuple[Source, Questions]:
    if found.batch_size is not None:
        if any(word.startswith("batch=") for word in words):
            raise PlanError(
                f"batch={found.batch_size!r} was asked for in --shape, and another in --what-if; give one of them"
            )
        asked = replace(asked, batch_sizes=(found.batch_size,))
    profile = profile_of_module(shape_of_decoder(found.decoder, batch_size=1))
    return Source(profile=profile, decoder=found.decoder, latent_dim=found.decoder.dim), asked
