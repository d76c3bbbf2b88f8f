"""Plan a Hi-C decoder: signals, devices and their memory decide what to install where.

Policy "auto" compares all legal plans (auto.py), "paper" is AMP's fixed mapping (paper.py). If auto chooses another
plan than the mapping, a note compares peak and time of both.
"""

from dataclasses import replace
from typing import Any

from lightning_amp.costs.device_rates import CPU_CORE, Rates
from lightning_amp.costs.model_shape import ModelShape, reference_shape
from lightning_amp.errors import PlanError
from lightning_amp.planning.base.base_plan import (
    plan_of,
    plan_without_decoder,
    refuse_conflicts,
    refuse_unsuited,
    registered,
)
from lightning_amp.planning.base.choose_mesh import check_divides, choose_mesh, model_ranks_of
from lightning_amp.planning.base.plan_request import PlanRequest
from lightning_amp.planning.memory.peak_model import predict
from lightning_amp.planning.plan.mesh_shape import MeshShape
from lightning_amp.planning.plan.plan import Axes, Candidate, Explanation, Plan
from lightning_amp.planning.policies.auto import LOCAL_ATTENTION_ONLY, candidates
from lightning_amp.planning.policies.build_rules import decide_balance, rules_of_decoder
from lightning_amp.planning.policies.paper import mapped
from lightning_amp.planning.time.step_seconds import decoder_seconds, on_device, predicted_times
from lightning_amp.profiling.profile import Profile
from lightning_amp.quantities import format_bytes, format_seconds, memory_of_ranks
from lightning_amp.techniques.table import STRATEGIES, conflicts, parse_strategies

COMPILED = "the prediction is that of strata that are not compiled: torch's compiler decides what is fused and kept"


def plan(
    profile: Profile,
    *,
    batch_size: int = 64,
    shape: ModelShape | None = None,
    rates: Rates = CPU_CORE,
    devices: int = 1,
    device_memory: Any = None,
    strategies: Any = None,
    **asked: Any,
) -> Plan:
    """Make a plan by closed forms alone.

    Args:
        batch_size: Cells per rank and modality.
        shape: The model; None means the reference model with its default sizes.
        device_memory: Budget of one device, a number of bytes or a text such as "24GiB", or a list of them.
        **asked: Fields of `PlanRequest`, as are the others.

    Raises:
        PlanError: An argument is not allowed, or this number of devices cannot run the strategies.
    """
    request = PlanRequest(
        data=profile,
        shape=on_device(shape or reference_shape(profile, batch_size=batch_size), rates),
        rates=rates.on_nodes_of(asked.get("node_devices")),
        devices=devices,
        memory=() if device_memory is None else memory_of_ranks(device_memory, devices),
        strategies=None if strategies is None else parse_strategies(strategies),
        **asked,
    )
    return plan_of_decoder(request) if request.shape.decoder else plan_without_decoder(request)


def plan_of_decoder(request: PlanRequest) -> Plan:
    """Make the plan of a module with a Hi-C decoder.

    Raises:
        PlanError: This number of devices, or the decoder, cannot run the strategies.
    """
    shape, notes, compared = request.shape, list[str](), tuple[Candidate, ...]()
    if request.strategies is not None:
        chosen = tuple(request.strategies)
    elif request.policy == "paper":
        chosen, notes = mapped(request)
    else:
        own, notes = registered(request)
        size = request.model_parallel_size
        check_divides(size, request.devices)
        compared = candidates(
            shape,
            devices=request.devices,
            budget=request.budget,
            rates=request.rates,
            own=frozenset(own | ({"S1"} if request.devices > 1 else set())),
            model_parallel_size=size if isinstance(size, int) else None,
            node_devices=request.node,
        )
        if not compared:
            raise PlanError(
                f"model_parallel_size={size!r} is not supported: no strategies can share this model"
                ' among so many ranks; choose fewer, or model_parallel_size="auto"'
            )
        chosen = compared[0].strategies
        if size == "auto":
            notes = notes + _of_paper(compared[0], request)
        request = replace(request, model_parallel_size=compared[0].model)
    mesh, axes = choose_mesh(chosen, request), Axes.of(chosen)
    _check_decoder(chosen, shape)
    refuse_unsuited(chosen, shape)
    balance, balance_note = decide_balance(request.data, mesh, shape.batch_size)
    compiled = [COMPILED] if axes.kernels == "compiled" else []
    return plan_of(
        chosen,
        request,
        mesh,
        axes=axes,
        rules=rules_of_decoder(chosen, request, mesh, balance=balance),
        fields=predicted_fields(shape, chosen, axes, mesh, request.rates)
        | {"balance_cells": balance, "candidates": compared},
        notes=(notes, compiled, balance_note),
    )


def predicted_fields(
    shape: ModelShape,
    strategies: tuple[str, ...],
    axes: Axes,
    mesh: MeshShape,
    rates: Rates,
    *,
    ends: tuple[int, ...] = (),
) -> dict[str, Any]:
    """Return the fields of a plan on bytes and seconds, by closed forms; arguments as of `predict`."""
    found = predict(shape, strategies, model_ranks=mesh.model, axes=axes, ends=ends)
    return {
        "predicted_base_bytes": found.base_bytes,
        "predicted_stratum_bytes": found.mean_stratum_bytes,
        "predicted_peak_bytes": found.peak_bytes,
        "strata_bytes": found.strata_bytes,
        **predicted_times(shape, axes, mesh, rates),
    }


def _of_paper(best: Candidate, request: PlanRequest) -> list[str]:
    """Return a note on the peak and the time of AMP's fixed mapping, if that is another plan."""
    shape = request.shape
    chosen, _ = mapped(request)
    model = model_ranks_of(chosen, request)
    mesh = MeshShape(data=request.devices // model, model=model)
    seconds = decoder_seconds(shape, Axes.of(chosen), mesh, request.rates)
    if (chosen, model) == (best.strategies, best.model):
        return []
    cell = format_seconds(seconds / (mesh.data * shape.batch_size))
    peak = format_bytes(predict(shape, chosen, model_ranks=model).peak_bytes)
    return [
        Explanation(
            f"policy paper would take {', '.join(chosen) or 'none of them'} on {mesh.data} x {model}: a peak of {peak}"
            f" and {cell} per cell in the decoder, here {format_bytes(best.peak_bytes)} and"
            f" {format_seconds(best.cell_seconds)}"
        )
    ]


def _check_decoder(chosen: tuple[str, ...], shape: ModelShape) -> None:
    """Raise a PlanError for strategies that conflict, or that the decoder excludes."""
    decoder = shape.decoder
    attending = [s for s in ("S3", "fused", "sdpa", "nodes") if s in chosen]
    if attending and not decoder.attention:
        raise PlanError(
            f"{', '.join(attending)} change attention, but {decoder.fqn!r} builds its keys without attention;"
            f" leave {', '.join(attending)} out"
        )
    local = [s for s in chosen if s in LOCAL_ATTENTION_ONLY]
    if decoder.full and local:
        raise PlanError(
            f"local attention is required by {', '.join(local)}, and that of {decoder.fqn!r} is full"
            f" ({decoder.known_from}); it is computed in torch's fused kernels as it is: leave"
            f" {', '.join(local)} out, or use 'nodes', which splits its anchors over ranks"
        )
    reasons = [STRATEGIES[name].no_decoder for name in chosen]
    refuse_conflicts(
        chosen, list(conflicts(chosen)) or [f"{why}, as those of {decoder.fqn!r} here" for why in reasons if why]
    )
