"""Trainer, data and module -> Plan, as the strategy needs it in `setup`: before optimisers exist, made on rank 0."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING

from lightning_amp.errors import PlanError
from lightning_amp.lightning._compat import rank_zero_info, rank_zero_warn
from lightning_amp.lightning.same_on_ranks.replicas import decide_on_rank_zero
from lightning_amp.lightning.strategy.cells_per_step import Cells, cells_per_step
from lightning_amp.lightning.strategy.hardware import device_budget, device_rates, with_threads
from lightning_amp.lightning.strategy.same_plan import make_sure_of_same_plan
from lightning_amp.models.glue import GLUE
from lightning_amp.parallel.describe_module import describe, unpredicted
from lightning_amp.parallel.supported import with_unsupported
from lightning_amp.planning.memory.peak_model import predict
from lightning_amp.planning.plan.decoder_only import profile_of_module
from lightning_amp.planning.plan.model_shape import (
    LATENT_DIM,
    DecoderShape,
    ModelShape,
    NetworkShape,
    outside_strata,
    with_counts,
)
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.policies.balance_cells import too_few_cells
from lightning_amp.planning.policies.build_rules import (
    with_balance,
    with_shared_statistics,
    without_shared_statistics,
)
from lightning_amp.planning.policies.make_plan import plan as make_plan
from lightning_amp.planning.reports.plan_report import plan_report, shortfall
from lightning_amp.planning.time.device_rates import Rates
from lightning_amp.planning.time.model_seconds import decoder_seconds, rest_seconds
from lightning_amp.profiling.profile import Profile
from lightning_amp.profiling.read_profile import profile as read_profile
from lightning_amp.quantities import parse_bytes

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_amp.lightning.strategy.strategy import AMPStrategy

ADAM_SLOTS = 2
"""Assumed for a module that is not the reference model: its optimisers do not exist yet."""
RMSPROP_SLOTS = 1


def plan_in_force(
    strategy: "AMPStrategy",
    trainer: "pl.Trainer",
    *,
    notes: Sequence[str] = (),
    given: Plan | None = None,
    cells: Cells | None = None,
) -> Plan:
    """The plan of one run, the same on every rank: the given one, or one made on rank 0; as the user wishes it.

    Args:
        strategy: With the user's wishes.
        trainer: Of the run.
        notes: What is to be said of the module, in the plan or in the refusal to make one.
        given: A plan to carry out instead of the user's wishes.
        cells: As `cells_per_step` tells, where it was asked already.

    Raises:
        AmpError: What rank 0 was told when it made the plan.
        PlanError: The plan is for another number of ranks, or ranks differ in what it is made of.
    """

    told = cells_per_step(trainer) if cells is None else cells

    def decide() -> Plan:
        asked = strategy.asked_plan if given is None else given
        if asked is None:
            return plan_run(strategy, trainer, told)
        read = asked if isinstance(asked, Plan) else Plan.read(asked)
        return predict_anew(read, strategy, trainer, told)

    try:
        plan = decide_on_rank_zero(decide, rank=strategy.global_rank, broadcast=strategy.broadcast)
    except PlanError as error:
        raise (PlanError(f"{error}. {'; '.join(notes)}") if notes else error) from None
    make_sure_of_same_plan(strategy, trainer)
    plan = replace(plan, notes=(*plan.notes, *(note for note in notes if note not in plan.notes)))
    if plan.mesh.data * plan.mesh.model != strategy.world_size:
        raise PlanError(
            f"a plan for {plan.mesh.data} x {plan.mesh.model} ranks (data x model) was asked for, the run"
            f" has {strategy.world_size} ranks; make a plan for as many, or change `devices` of the Trainer"
        )
    if not strategy.share_batch_statistics:
        plan = without_shared_statistics(plan)
    wish = getattr(getattr(trainer, "datamodule", None), "balance", None)
    wish = strategy.asked_balance if wish is None else wish
    return plan if wish == "auto" else with_balance(plan, balance=bool(wish))


def announce(plan: Plan, *, unfit: str) -> None:
    """Show the plan before training starts, on rank 0; where it is predicted not to fit, refuse it or warn.

    Args:
        plan: The plan in force.
        unfit: What to do then: "refuse" or "train".

    Raises:
        PlanError: It does not fit and is refused; on all ranks.
    """
    rank_zero_info(f"\n{plan_report(plan)}\n")
    if plan.fits is not False:
        return
    if unfit == "refuse":
        raise PlanError(
            f"{shortfall(plan)}. Nothing was trained: AMPStrategy(unfit='train'), in YAML `unfit: train`, trains anyway"
        )
    rank_zero_warn(shortfall(plan))


def plan_run(strategy: "AMPStrategy", trainer: "pl.Trainer", cells: Cells) -> Plan:
    """Make the plan of one run.

    The data directory is the strategy's, else the data module's; without either the plan is made from the module
    alone, and says so.

    Args:
        strategy: With the user's wishes.
        trainer: Of the run.
        cells: As `cells_per_step` tells.

    Raises:
        DataError: The data directory cannot be read.
        PlanError: No plan answers the request.
    """
    profile, shape, notes = _read(strategy, trainer, cells)
    rates, note = _rates(strategy)
    made = make_plan(
        profile,
        devices=strategy.world_size,
        device_memory=_budget(strategy),
        policy=strategy.policy,
        strategies=strategy.strategies,
        batch_size=shape.batch_size,
        model_parallel_size=strategy.model_parallel_size,
        shape=shape,
        rates=rates,
        node_devices=strategy.num_processes,
    )
    return replace(made, notes=(*made.notes, *note, *notes))


def predict_anew(plan: Plan, strategy: "AMPStrategy", trainer: "pl.Trainer", cells: Cells) -> Plan:
    """A given plan with the prediction and the budget of this run: its own were for the model that it was made for."""
    profile, shape, notes = _read(strategy, trainer, cells)
    rates, note = _rates(strategy)
    notes += note + too_few_cells(profile, plan.mesh, shape.batch_size)
    if shape.batch_norms:
        # the plan may be of a model without
        plan = with_shared_statistics(plan)
    predicted = predict(shape, plan.strategies, model_ranks=plan.mesh.model, axes=plan.axes)
    return replace(
        plan,
        batch_size=shape.batch_size,
        predicted_base_bytes=predicted.base_bytes,
        predicted_stratum_bytes=predicted.mean_stratum_bytes,
        predicted_peak_bytes=predicted.peak_bytes,
        strata_bytes=predicted.strata_bytes,
        budget_bytes=_budget(strategy),
        notes=(*(note for note in plan.notes if note not in notes), *notes),
        predicted_step_seconds=decoder_seconds(shape, plan.axes, plan.mesh, rates),
        predicted_rest_seconds=rest_seconds(shape, plan.mesh, rates),
        rates_device="" if shape.decoder is None else rates.device,
        candidates=(),
    )


def _read(
    strategy: "AMPStrategy", trainer: "pl.Trainer", cells: Cells
) -> tuple[Profile, ModelShape, list[str]]:
    """Profile and shape of the run, and what its prediction leaves out."""
    module, data = trainer.lightning_module, getattr(trainer, "datamodule", None)
    data_dir = getattr(data, "data_dir", None) if strategy.data_dir is None else strategy.data_dir
    batch_size, unknown = cells
    notes = [unknown] if batch_size is None else []
    if "mixed" in str(trainer.precision):
        notes.append(
            f"predicted without precision={trainer.precision!r}, which keeps some tensors in half the bytes"
        )
    slots = RMSPROP_SLOTS if isinstance(module, GLUE) else ADAM_SLOTS
    if slots == ADAM_SLOTS:
        notes.append(
            "the optimiser state is counted as Adam's, twice the weights, for there are no optimisers yet"
        )
    shape = with_unsupported(module, describe(module, batch_size=batch_size or 1, optimizer_slots=slots))
    shape = with_threads(shape if isinstance(module, GLUE) else with_counts(shape), strategy.root_device)
    notes += unpredicted(module, shape)
    if data_dir is None:
        return profile_of_module(shape), shape, notes
    attention = None if shape.decoder is None else shape.decoder.attention
    profile = read_profile(data_dir, setting=getattr(data, "setting", None), attention=attention)
    profile = _as_used(profile, getattr(data, "modalities", None), decoder=shape.decoder)
    if isinstance(module, GLUE):
        return profile, _with_base(shape, profile, module), notes
    if shape.decoder is not None:
        notes.append(
            "of the activations outside the decoder the counts and the inputs of layers that read them all are"
            " predicted: the others are those of another's model"
        )
    return profile, shape, notes


def _rates(strategy: "AMPStrategy") -> tuple[Rates, list[str]]:
    """Of the file that was asked for, else of the device, with a note where it is not known."""
    if strategy.rates is not None:
        return Rates.read(strategy.rates).on_nodes_of(strategy.num_processes), []
    found, note = device_rates(strategy.root_device)
    return found.on_nodes_of(strategy.num_processes), [note] if note else []


def _budget(strategy: "AMPStrategy") -> int:
    if strategy.device_memory is not None:
        return parse_bytes(strategy.device_memory)
    return device_budget(strategy.root_device, local_ranks=strategy.num_processes)


def _as_used(profile: Profile, names: list[str] | None, *, decoder: DecoderShape | None) -> Profile:
    """The modalities that the data module loads; without a decomposed decoder in the module, none is decomposed."""
    used = [m for m in profile.modalities if names is None or m.name in names]
    modalities = []
    for modality in used:
        others = [m.features for m in used if m is not modality]
        scale = modality.features / max(others) if others else None
        parts = None if decoder is None else modality.decomposition
        modalities.append(replace(modality, scale=scale, decomposition=parts))
    return replace(profile, modalities=tuple(modalities))


def _with_base(shape: ModelShape, profile: Profile, module: GLUE) -> ModelShape:
    """Add what lies outside the strata of the reference model."""
    settings = module.hparams
    names = [field.name for field in fields(NetworkShape)]
    network = NetworkShape(**{name: settings[name] for name in names if name in settings})
    dim = shape.decoder.dim if shape.decoder else int(settings.get("latent_dim", LATENT_DIM))
    return outside_strata(shape, network, profile, latent_dim=dim)
