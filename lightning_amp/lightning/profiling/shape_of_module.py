"""Read the shape of a module, and the profile of its data, for its plan."""

from dataclasses import fields, replace
from pathlib import Path

import torch
from torch import nn

from lightning_amp.costs import model_shape
from lightning_amp.costs.device_rates import Rates
from lightning_amp.costs.model_shape import ModelShape
from lightning_amp.data.loading.datamodule import SingleCellDataModule
from lightning_amp.installing.describe_decoder import unpredicted, with_unsupported
from lightning_amp.installing.describe_module import describe
from lightning_amp.models.glue import GLUE
from lightning_amp.planning.time.step_seconds import on_device
from lightning_amp.profiling.profile import Profile
from lightning_amp.profiling.read_profile import profile as read_profile

ADAM_SLOTS = 2
"""Optimiser values per weight, assumed for modules other than the reference model: optimisers do not exist yet."""
RMSPROP_SLOTS = 1


def read_shape(
    module: nn.Module,
    data: object,
    *,
    data_dir: str | Path | None,
    batch_size: int,
    queries: int | None,
    rates: Rates,
    profile: Profile | None = None,
) -> tuple[Profile, ModelShape, list[str]]:
    """Return the profile of the data, the shape of the module, and notes on what a prediction from it leaves out.

    Args:
        data: The data module; others than a SingleCellDataModule have no data directory.
        data_dir: Data directory instead of the data module's.
        batch_size: Cells per rank and modality.
        queries: Requested queries of a chunk of attention.
        rates: Rates of the device.
        profile: Profile of the data directory, if it has been read; `data` and `data_dir` are then not read.
    """
    data = data if isinstance(data, SingleCellDataModule) else None
    if data_dir is None and data is not None:
        data_dir = data.data_dir
    reference = isinstance(module, GLUE)
    shape = describe(module, batch_size=batch_size, optimizer_slots=RMSPROP_SLOTS if reference else ADAM_SLOTS)
    notes = list[str]()
    if shape.decoder:
        shape, notes = with_unsupported(module, shape), unpredicted(module, shape)
        # the reference model's activations outside its strata are known from its data
        shape = shape if reference else model_shape.with_counts(shape)
        decoder = replace(shape.decoder, threads=torch.get_num_threads(), queries=queries)
        shape = on_device(replace(shape, decoder=decoder), rates)
    if data_dir is None and profile is None:
        return model_shape.profile_of_module(shape), shape, notes
    if profile is None:
        profile = read_profile(data_dir, setting=getattr(data, "setting", None))  # type: ignore[arg-type]
    # only loaded modalities count, and they are decomposed only if the module has a decomposed decoder
    loaded, modalities = getattr(data, "modalities", None), []
    used = [m for m in profile.modalities if loaded is None or m.name in loaded]
    for modality in used:
        others = [m.features for m in used if m is not modality]
        scale = modality.features / max(others) if others else None
        own = modality.decomposition
        parts = replace(own, **model_shape.attention_of(shape.decoder)) if own and shape.decoder else None
        modalities.append(replace(modality, scale=scale, decomposition=parts))
    profile = replace(profile, modalities=tuple(modalities))
    if isinstance(module, GLUE):
        # add the layers of the reference model that are outside its strata
        settings = module.hparams
        names = [field.name for field in fields(model_shape.NetworkShape) if field.name in settings]
        network = model_shape.NetworkShape(**{name: settings[name] for name in names})
        dim = shape.decoder.dim or int(settings.get("latent_dim", model_shape.LATENT_DIM))
        shape = model_shape.outside_strata(shape, network, profile, latent_dim=dim)
    return profile, shape, notes
