"""Trainer, data and module -> Plan, as the strategy needs it in `setup`: before optimisers exist, on rank 0 only."""

from dataclasses import fields, replace
from typing import TYPE_CHECKING

from torch import nn

from lightning_amp.lightning.hardware import device_budget
from lightning_amp.models.glue import GLUE
from lightning_amp.parallel.describe import describe
from lightning_amp.planning.plan import Plan
from lightning_amp.planning.policy import plan as make_plan
from lightning_amp.planning.shape import (
    LATENT_DIM,
    DecoderShape,
    ModelShape,
    NetworkShape,
    base_activations,
    other_decoders,
)
from lightning_amp.profiling.profile import DecompositionProfile, ModalityProfile, Profile
from lightning_amp.profiling.read import profile as read_profile

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_amp.lightning.strategy import AMPStrategy

ADAM_SLOTS = 2
"""Assumed for a module that is not the reference model: its optimisers do not exist yet."""
RMSPROP_SLOTS = 1


def plan_run(strategy: "AMPStrategy", trainer: "pl.Trainer") -> Plan:
    """Make the plan of one run.

    The data directory is the strategy's, else the data module's; without either the plan is made from the module
    alone, and says so.

    Raises:
        DataError: The data directory cannot be read.
        PlanError: No plan answers the request.
    """
    module = trainer.lightning_module
    data = getattr(trainer, "datamodule", None)
    data_dir = strategy.data_dir or getattr(data, "data_dir", None)
    batch_size = int(getattr(data, "batch_size", 0) or 0)
    shape = describe(
        module,
        batch_size=batch_size or 1,
        optimizer_slots=RMSPROP_SLOTS if isinstance(module, GLUE) else ADAM_SLOTS,
    )
    if data_dir is None:
        profile = profile_of_module(shape)
    else:
        attention = None if shape.decoder is None else shape.decoder.attention
        profile = read_profile(data_dir, setting=getattr(data, "setting", None), attention=attention)
        shape = _with_base(shape, profile, module)
    budget = strategy.device_memory or device_budget(strategy.root_device, local_ranks=strategy.num_processes)
    return make_plan(
        profile,
        devices=strategy.world_size,
        device_memory=budget,
        policy=strategy.policy,
        strategies=strategy.strategies,
        batch_size=batch_size or 1,
        model_parallel_size=strategy.model_parallel_size,
        shape=shape,
    )


def profile_of_module(shape: ModelShape) -> Profile:
    """A profile of what the module itself says, when no data directory is known."""
    modalities = () if shape.decoder is None else (_modality(shape.decoder),)
    return Profile(
        data_dir="(no data directory: planned from the module alone)", modalities=modalities, graph=None
    )


def _modality(decoder: DecoderShape) -> ModalityProfile:
    return ModalityProfile(
        name=decoder.fqn.rpartition(".")[2],
        file="",
        probability_model="HiCZINB",
        cells=0,
        features=sum(decoder.features),
        nonzero=None,
        scale=None,
        contact_spread=None,
        decomposition=DecompositionProfile(
            anchors=decoder.anchors,
            features=decoder.features,
            distances=decoder.distances,
            attention=decoder.attention,
        ),
    )


def _with_base(shape: ModelShape, profile: Profile, module: nn.Module) -> ModelShape:
    """Add what lies outside the strata; a module other than the reference model is taken to be of its kind."""
    settings = module.hparams if isinstance(module, GLUE) else {}
    names = [field.name for field in fields(NetworkShape)]
    network = NetworkShape(**{name: settings[name] for name in names if name in settings})
    dim = shape.decoder.dim if shape.decoder else int(settings.get("latent_dim", LATENT_DIM))
    return replace(
        shape,
        base_activation_bytes=base_activations(network, profile, batch_size=shape.batch_size, latent_dim=dim),
        other_decoder_bytes=other_decoders(profile, batch_size=shape.batch_size),
    )
