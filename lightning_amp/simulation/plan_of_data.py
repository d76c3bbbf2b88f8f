"""Plan a data directory, or a decoder by its sizes: as a fit plans, by a count of a step without values."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from lightning_amp.costs.device_rates import Rates, budget_on
from lightning_amp.costs.model_shape import DecoderShape, check_sizes, profile_of_module
from lightning_amp.data.batch import tensors_in
from lightning_amp.data.sparse_counts import SparseCounts
from lightning_amp.footprint.equal_parts import leaving_out_equal
from lightning_amp.footprint.run.run_settings import UNDER_AMP
from lightning_amp.holding import replacing
from lightning_amp.installing.describe_module import describe
from lightning_amp.lightning.profiling.plan_of_module import PLANNING, Planner, Sizes
from lightning_amp.lightning.profiling.shape_of_module import read_shape
from lightning_amp.models.inputs import HIC
from lightning_amp.planning.plan.plan import Explanation, Plan
from lightning_amp.planning.time.step_seconds import on_device
from lightning_amp.profiling.profile import Profile
from lightning_amp.progress import shown_if_long
from lightning_amp.simulation.models_without_values import Subject, decoder_subject, reference_subject
from lightning_amp.techniques.hic.scores import nonzero_counts

Check = Callable[[Plan], None]
LEFT_OPEN = {"devices": 1, "device_memory": None, "policy": "auto", "strategies": None, "model_parallel_size": "auto"}


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
    sizes = read_shape(
        subject.module, None, data_dir=None, batch_size=batch_size, queries=None, rates=rates, profile=profile
    )
    sparse = profile.modality(HIC) is not None and isinstance(subject.batch[HIC]["x"], SparseCounts)
    return _planned(subject, sizes, request, rates=rates, check=check, sparse=sparse, source=", as in the whole file")


@shown_if_long(PLANNING)
def plan_of_shape(
    decoder: DecoderShape, request: Mapping[str, Any], *, batch_size: int, rates: Rates, check: Check | None = None
) -> Plan:
    """Plan a decoder by itself, with latents of cells and anchors; arguments and errors as of `plan_of_data`."""
    subject = decoder_subject(decoder, batch_size=batch_size)
    kept = sum(tensor.nbytes for tensor in tensors_in(subject.batch))
    shape = on_device(describe(subject.module, batch_size=batch_size, base_activation_bytes=kept), rates)
    # no run has this step, by which it would be compared operator by operator
    with leaving_out_equal():
        return _planned(subject, (profile_of_module(shape), shape, []), request, rates=rates, check=check)


def _planned(
    subject: Subject,
    sizes: Sizes,
    request: Mapping[str, Any],
    *,
    rates: Rates,
    check: Check | None,
    sparse: bool = False,
    source: str = "",
) -> Plan:
    """Plan a module without values.

    Args:
        sparse: Whether its batch has sparse counts.
        source: Where the share of the counts that are not zero is from.
    """
    request, rates = {**LEFT_OPEN, **request}, rates.on_nodes_of(request.get("node_devices"))
    with replacing(nonzero_counts.ASSUMED, share=subject.share, in_counts=True):
        planner = Planner(subject.module, subject.batch, UNDER_AMP, rates, request, {}, None, sizes=sizes, check=check)
        plan = planner.made_on(request["devices"]).plan
    share = f"{100 * subject.share:.1f} % of the contacts of a batch not zero{source}"
    assumed = map(Explanation, _assumed(plan, share, sparse=sparse or "sparse" in plan.strategies))
    _, notes = budget_on(rates, request["device_memory"], request["devices"])
    return replace(plan, notes=(*plan.notes, *assumed, *notes))


def _assumed(plan: Plan, share: str, *, sparse: bool) -> Iterator[str]:
    """Yield what the count assumes of the data, of which a profile has only sizes."""
    if sparse:
        yield f"counted with {share}"
    if "nodes" in plan.strategies:
        yield "counted as if every edge of the graph joined neighbours: other edges bring a rank more rows of others"
