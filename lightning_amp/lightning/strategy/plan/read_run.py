"""Read the planner's inputs from Trainer and module: profile of the data, shape of the module, what is unknown."""

from dataclasses import fields, replace

import lightning.pytorch as pl
import torch

from lightning_amp.costs.model_shape import (
    LATENT_DIM,
    DecoderShape,
    ModelShape,
    NetworkShape,
    outside_strata,
    with_counts,
)
from lightning_amp.costs.profiled_step import ProfiledStep
from lightning_amp.installing.describe_module import describe, unpredicted, with_unsupported
from lightning_amp.lightning.profiling.cells_per_step import Cells
from lightning_amp.lightning.strategy.request import Request
from lightning_amp.models.glue import GLUE
from lightning_amp.planning.plan.decoder_only import attention_of, profile_of_module
from lightning_amp.profiling.profile import Profile
from lightning_amp.profiling.read_profile import profile as read_profile

ADAM_SLOTS = 2
"""Assumed for a module that is not the reference model: its optimisers do not exist yet."""
RMSPROP_SLOTS = 1


def read_run(
    request: Request, trainer: pl.Trainer, cells: Cells, seen: ProfiledStep | None, why: str
) -> tuple[Profile, ModelShape, list[str]]:
    """Profile and shape of the run, and what its prediction leaves out."""
    module, data = trainer.lightning_module, getattr(trainer, "datamodule", None)
    data_dir = request.data_dir_or(data)
    batch_size, unknown = cells
    if seen is not None:
        batch_size = seen.profile.batch_size or batch_size or 1
    notes = [unknown] if batch_size is None else []
    notes += [why] if why else []
    if seen is None and "mixed" in str(trainer.precision):
        notes.append(
            f"predicted without precision={trainer.precision!r}, which keeps some tensors in half the bytes"
        )
    slots = RMSPROP_SLOTS if isinstance(module, GLUE) else ADAM_SLOTS
    if seen is None and slots == ADAM_SLOTS:
        notes.append(
            "the optimiser state is counted as Adam's, twice the weights, for there are no optimisers yet"
        )
    shape = with_unsupported(module, describe(module, batch_size=batch_size or 1, optimizer_slots=slots))
    shape = replace(shape, profiled=seen is not None)
    shape = _with_threads(shape if isinstance(module, GLUE) else with_counts(shape))
    notes += unpredicted(module, shape)
    if data_dir is None:
        return profile_of_module(shape), shape, notes
    profile = read_profile(data_dir, setting=getattr(data, "setting", None))
    profile = _as_used(profile, getattr(data, "modalities", None), decoder=shape.decoder)
    if isinstance(module, GLUE):
        return profile, _with_base(shape, profile, module), notes
    if shape.decoder is not None:
        notes.append(
            "of the activations outside the decoder the counts and the inputs of layers that read them all are"
            " predicted: the others are those of another's model"
        )
    return profile, shape, notes


def _with_threads(shape: ModelShape) -> ModelShape:
    """With the threads that torch has on a CPU."""
    if shape.decoder is None:
        return shape
    return replace(shape, decoder=replace(shape.decoder, threads=torch.get_num_threads()))


def _as_used(profile: Profile, names: list[str] | None, *, decoder: DecoderShape | None) -> Profile:
    """The modalities that the data module loads; without a decomposed decoder in the module, none is decomposed."""
    used = [m for m in profile.modalities if names is None or m.name in names]
    modalities = []
    for modality in used:
        others = [m.features for m in used if m is not modality]
        scale = modality.features / max(others) if others else None
        parts = None if decoder is None else modality.decomposition
        if parts is not None and decoder is not None:
            parts = replace(parts, **attention_of(decoder))
        modalities.append(replace(modality, scale=scale, decomposition=parts))
    return replace(profile, modalities=tuple(modalities))


def _with_base(shape: ModelShape, profile: Profile, module: GLUE) -> ModelShape:
    """Add what lies outside the strata of the reference model."""
    settings = module.hparams
    names = [field.name for field in fields(NetworkShape)]
    network = NetworkShape(**{name: settings[name] for name in names if name in settings})
    dim = shape.decoder.dim if shape.decoder else int(settings.get("latent_dim", LATENT_DIM))
    return outside_strata(shape, network, profile, latent_dim=dim)
