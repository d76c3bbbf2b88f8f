"""Plan a data directory, or a decoder by its sizes: as a fit plans, by a count of a step without values."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_amp.costs.device_rates import Rates, budget_on
from lightning_amp.costs.model_shape import DecoderShape, ModelShape, check_sizes, profile_of_module
from lightning_amp.costs.ordered_runs import speeds_of_ranks
from lightning_amp.data.batch import tensors_in
from lightning_amp.data.sparse_counts import SparseCounts
from lightning_amp.footprint.equal_parts import leaving_out_equal
from lightning_amp.footprint.run.run_settings import UNDER_AMP
from lightning_amp.footprint.target_device import settings_of
from lightning_amp.holding import replacing
from lightning_amp.installing.describe_module import describe
from lightning_amp.lightning.profiling.make_step_plan import PlanInputs, base_plan, make_step_plan
from lightning_amp.lightning.profiling.plan_of_module import PLANNING
from lightning_amp.lightning.profiling.shape_of_module import read_shape
from lightning_amp.lightning.profiling.step_of_module import StepOfModule
from lightning_amp.models.inputs import HIC
from lightning_amp.planning.modules.on_device import Device, made_for, on_device
from lightning_amp.planning.modules.plan_decoder import split_by_decoder
from lightning_amp.planning.plan.plan import Explanation, Plan
from lightning_amp.planning.time.step_seconds import on_device as on_device_of
from lightning_amp.profiling.profile import Profile
from lightning_amp.progress import shown_if_long
from lightning_amp.quantities import memory_of_ranks
from lightning_amp.simulation.models_without_values import Subject, decoder_subject, reference_subject
from lightning_amp.techniques.hic.scores import nonzero_counts
from lightning_amp.techniques.table import parse_strategies

Check = Callable[[Plan], None]
AS_IN_FILE = ", as in the whole file"


@shown_if_long(PLANNING)
def plan_of_data(
    profile: Profile,
    request: Mapping[str, Any],
    *,
    batch_size: int,
    latent_dim: int,
    window: int | None,
    rates: Rates,
    check: Check | None = None,
) -> Plan:
    """Plan the reference model for some data.

    Args:
        request: `devices`, `node_devices`, `device_memory`, `device_speeds`, `policy`, `strategies` and
            `model_parallel_size`, as for `lightning_amp.plan`; those that are left out are left to the policy.
        batch_size: Cells per rank and modality.
        latent_dim, window: Options of the reference model.
        rates: Rates of one device.
        check: Gets a plan by closed forms before a step is counted, and may raise.

    Raises:
        PlanError: Sizes that no model can have, or the request cannot be planned.
    """
    check_sizes(profile, latent_dim=latent_dim, window=window)
    subject = reference_subject(profile, batch_size=batch_size, latent_dim=latent_dim, window=window)
    data, shape, notes = read_shape(
        subject.module, None, data_dir=None, batch_size=batch_size, queries=None, rates=rates, profile=profile
    )
    sparse = profile.modality(HIC) is not None and isinstance(subject.batch[HIC]["x"], SparseCounts)
    return _planned(
        subject, data, shape, request, rates=rates, check=check, notes=notes, sparse=sparse, source=AS_IN_FILE
    )


@shown_if_long(PLANNING)
def plan_of_shape(
    decoder: DecoderShape, request: Mapping[str, Any], *, batch_size: int, rates: Rates, check: Check | None = None
) -> Plan:
    """Plan a decoder by itself, with latents of cells and anchors; arguments and errors as of `plan_of_data`."""
    subject = decoder_subject(decoder, batch_size=batch_size)
    kept = sum(tensor.nbytes for tensor in tensors_in(subject.batch))
    shape = on_device_of(describe(subject.module, batch_size=batch_size, base_activation_bytes=kept), rates)
    # no run has this step, by which it would be compared operator by operator
    with leaving_out_equal():
        return _planned(subject, profile_of_module(shape), shape, request, rates=rates, check=check)


def _planned(
    subject: Subject,
    data: Profile,
    shape: ModelShape,
    request: Mapping[str, Any],
    *,
    rates: Rates,
    check: Check | None,
    notes: Sequence[str] = (),
    sparse: bool = False,
    source: str = "",
) -> Plan:
    """Plan a module without values.

    Args:
        sparse: Whether its batch has sparse counts.
        source: Where the share of the counts that are not zero is from.
    """
    named, devices, strategies = request.get("device_memory"), request.get("devices", 1), request.get("strategies")
    rates = rates.on_nodes_of(request.get("node_devices"))
    device, (memory, budget_notes) = Device.of(rates.memory, named, devices), budget_on(rates, named, devices)
    step = StepOfModule(subject.module, lambda: subject.batch, run_settings=UNDER_AMP)
    given = PlanInputs(
        data=data,
        shape=replace(shape, profiled=not shape.decoder),
        rates=rates,
        devices=devices,
        node_devices=request.get("node_devices"),
        memory=() if memory is None else memory_of_ranks(memory, devices),
        memory_named=named is not None,
        policy=request.get("policy", "auto"),
        strategies=None if strategies is None else parse_strategies(strategies),
        model_parallel_size=request.get("model_parallel_size", "auto"),
        speeds=speeds_of_ranks(request.get("device_speeds"), devices),
        shared_statistics=devices > 1,
        notes=tuple(notes),
    )

    def made(less: int) -> Plan:
        fewer = replace(given, memory=tuple(max(1, n - less) for n in given.memory))
        planned = make_step_plan(fewer, step, seen)
        return on_device(planned.plan, device, (planned.step or step).as_planned(planned.plan))

    if check is not None and shape.decoder:
        of_decoder, _ = split_by_decoder(given.strategies, policy=given.policy)
        check(base_plan(given, of_decoder, given.model_parallel_size))
    with settings_of(rates.device_type), replacing(nonzero_counts.ASSUMED, share=subject.share, in_counts=True):
        seen = None if shape.decoder else step.profiled(rates, shared_statistics=devices > 1)
        plan = made_for(made)
    share = f"{100 * subject.share:.1f} % of the contacts of a batch not zero{source}"
    assumed = map(Explanation, _assumed(plan, share, sparse=sparse or "sparse" in plan.strategies))
    return replace(plan, notes=(*plan.notes, *assumed, *budget_notes))


def _assumed(plan: Plan, share: str, *, sparse: bool) -> Iterator[str]:
    """Yield what the count assumes of the data, of which a profile has only sizes."""
    if sparse:
        yield f"counted with {share}"
    if "nodes" in plan.strategies:
        yield "counted as if every edge of the graph joined neighbours: other edges bring a rank more rows of others"
