"""Plan a data directory: as a fit of the reference model on it, by a count of a step without values."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

from lightning.pytorch import LightningModule

from lightning_amp.costs.device_rates import Rates, budget_on
from lightning_amp.costs.model_shape import check_sizes
from lightning_amp.data.sparse_counts import SparseCounts
from lightning_amp.footprint.inner_run import UNDER_AMP
from lightning_amp.footprint.target_device import settings_of
from lightning_amp.holding import replacing
from lightning_amp.lightning.profiling.plan_of_module import PLANNING, plan_of_module, plan_with_decoder
from lightning_amp.lightning.profiling.shape_of_module import read_shape
from lightning_amp.lightning.profiling.step_of_module import StepOfModule
from lightning_amp.models.inputs import HIC
from lightning_amp.planning.modules.on_device import Device, made_for, on_device
from lightning_amp.planning.plan.plan import Explanation, Plan
from lightning_amp.profiling.profile import Profile
from lightning_amp.progress import shown_if_long
from lightning_amp.quantities import memory_of_ranks
from lightning_amp.simulation.models_without_values import reference_subject, share_of
from lightning_amp.techniques.hic.scores import nonzero_counts

ANY = {"devices": 1, "device_memory": None, "policy": "auto", "strategies": None, "model_parallel_size": "auto"}
"""A request that leaves all to the policy."""


@shown_if_long(PLANNING)
def plan_of_data(
    profile: Profile,
    request: Mapping[str, Any],
    *,
    batch_size: int,
    latent_dim: int,
    window: int | None,
    rates: Rates,
    node_devices: int | None = None,
    beyond: bool = True,
) -> Plan:
    """Plan the reference model for some data.

    Args:
        request: `devices`, `device_memory`, `policy`, `strategies` and `model_parallel_size`, as in `make_plan.plan`.
        batch_size: Cells per rank and modality.
        latent_dim, window: Options of the reference model.
        rates: Rates of one device.
        node_devices: Devices of one node; None means that all are on one.
        beyond: Whether the policy may choose techniques beyond the decoder's.

    Raises:
        PlanError: Sizes that no model can have, or the request cannot be planned.
    """
    check_sizes(profile, latent_dim=latent_dim, window=window)
    subject = reference_subject(profile, batch_size=batch_size, latent_dim=latent_dim, window=window, device="cpu")
    module, batch = cast(LightningModule, subject.module), subject.batch
    asked, devices = request["device_memory"], request["devices"]
    hic = profile.modality(HIC)
    if hic is None:
        rates = rates.on_nodes_of(node_devices)
        return plan_of_module(
            module, batch, around=UNDER_AMP, rates=rates, request=request, options={}, of_data=profile
        ).plan
    data, shape, notes = read_shape(
        module, None, data_dir=None, batch_size=batch_size, queries=None, rates=rates, profile=profile
    )
    step = StepOfModule(module, lambda: batch, around=UNDER_AMP)
    device, (memory, budget_notes) = Device.of(rates.memory, asked, devices), budget_on(rates, asked, devices)
    budgets = () if memory is None else memory_of_ranks(memory, devices)

    def made(less: int) -> Plan:
        fewer = [max(1, budget - less) for budget in budgets]
        named = {"device_memory": fewer[0] if len(fewer) == 1 else fewer or None, "node_devices": node_devices}
        plan = plan_with_decoder(step, shape, data, {**request, **named}, rates=rates, beyond=beyond)
        return on_device(plan, device, step.as_planned(plan))

    with settings_of(rates.device_type), replacing(nonzero_counts.ASSUMED, share=share_of(hic), in_counts=True):
        plan = made_for(made)
    assumed = list(map(Explanation, _assumed(plan, share_of(hic), sparse=isinstance(batch[HIC]["x"], SparseCounts))))
    return replace(plan, notes=(*plan.notes, *notes, *assumed, *budget_notes))


def _assumed(plan: Plan, share: float, *, sparse: bool) -> Iterator[str]:
    """Yield what the count assumes of the data, of which a profile has only sizes."""
    if sparse or "sparse" in plan.strategies:
        yield f"counted with {100 * share:.1f} % of the contacts of a batch not zero, as in the whole file"
    if "nodes" in plan.strategies:
        yield "counted as if every edge of the graph joined neighbours: other edges bring a rank more rows of others"
