"""Policy "paper": AMP's fixed mapping from signals to strategies (Zhang et al. 2026, Section 3.3 and Table 4).

    one device                     single-device execution, nothing is installed
    no 3D modality                 S1
    it fits under S1               S1 (Section 4.1: lightweight configurations run under S1 only)
    HIGH_INPUT_DIMENSIONALITY      S2 and S4
    ATTENTION_DECODER              S3
    HEAVY_DECOMPOSITION            S5, if the EPM under the strategies above still exceeds the memory of a device
    with full attention            nothing instead of S3, because fused kernels are used; nodes instead of S5
    a registered signal            its strategies, whatever the memory, and on one device too

The paper maps signals independently of memory, yet its lightweight configurations, which raise the same signals, run
under S1 only (Table 6); the third row reconciles the two. `techniques/table.py` defines which signal requires which
strategy. Registered strategies are chosen before memory is considered.
"""

from collections.abc import Collection
from dataclasses import dataclass

from lightning_amp.costs.device_rates import Rates
from lightning_amp.costs.model_shape import ModelShape
from lightning_amp.diagnosis import Diagnosis
from lightning_amp.planning.memory.peak_model import predict
from lightning_amp.planning.plan.plan import Explanation
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.table import STRATEGIES, in_order, targets_of


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRequest:
    """Inputs of a plan, as in `make_plan.plan`; the budget in bytes, and the rates with the links between nodes."""

    diagnosis: Diagnosis
    shape: ModelShape
    devices: int
    budget: int | None
    rates: Rates
    model_parallel_size: int | str
    node_devices: int | None


def mapped(request: PlanRequest) -> tuple[tuple[str, ...], list[str]]:
    """Return the strategies of the mapping, and a sentence that says which row of it applied."""
    shape, budget = request.shape, request.budget

    def peak(chosen: set[str]) -> int:
        ranks = model_ranks_of(chosen, request)
        # with the ranks that these strategies would have, because the mesh is decided after them
        return predict(shape, in_order(chosen), model_ranks=ranks).peak_bytes

    own, notes = registered(request.diagnosis, shape, devices=request.devices)
    if request.devices == 1:
        first = "one device: single-device execution (the paper's mapping prescribes nothing)"
        return in_order(own), [Explanation(first), *notes]
    base = {"S1", *own}
    under = ", ".join(in_order(base))
    whole = peak(base)
    if budget is None or whole <= budget:
        limit = "no memory budget is known" if budget is None else f"it fits in {format_bytes(budget)}"
        first = f"{format_bytes(whole)} per device under {under} and {limit}: {under} only"
        return in_order(base), [Explanation(first), *notes]
    requested = {s for s, row in STRATEGIES.items() if row.signal in request.diagnosis.signals and not row.registered}
    # the paper's S3 and S5 are for local attention; for full attention it names sequence parallelism (Section 5)
    split = "nodes" if shape.decoder.full else "S5"
    chosen = base | (requested - {"S5"} - ({"S3"} if shape.decoder.full else set()))
    if "S5" in requested and peak(chosen) > budget:
        chosen.add(split)
    first = f"{format_bytes(whole)} per device under {under} exceeds {format_bytes(budget)}"
    return in_order(chosen), [Explanation(first), *notes]


def without_strata(request: PlanRequest) -> tuple[tuple[str, ...], list[str]]:
    """Return the strategies of a module without a decomposed decoder, with notes, one of them if it was not profiled.

    Other techniques of a profiled module are chosen by a count of its step (planning/modules/).
    """
    own, notes = registered(request.diagnosis, request.shape, devices=request.devices)
    chosen = in_order(own | ({"S1"} if request.devices > 1 else set()))
    if request.devices > 1 and not request.shape.profiled:
        only = ", ".join(chosen) if own else "data parallelism (S1)"
        notes = [f"no decomposed decoder was detected: {only} only", *notes]
    return chosen, notes


def registered(diagnosis: Diagnosis, shape: ModelShape, *, devices: int) -> tuple[set[str], list[str]]:
    """Return registered strategies whose signal is raised, and a sentence for each that is left out nevertheless."""
    own, notes = set(), []
    for strategy, row in STRATEGIES.items():
        if not row.registered or row.signal not in diagnosis.signals:
            continue
        if row.model_axis and devices == 1:
            notes.append(f"{strategy} is left out: it splits over the model axis, which one device has not")
        elif not targets_of(strategy, shape):
            notes.append(f"{strategy} is left out: it finds nothing to change in this model")
        else:
            own.add(strategy)
    return own, notes


def model_ranks_of(chosen: Collection[str], request: PlanRequest) -> int:
    """Return the model axis size: the user's number, or all devices of a node (the paper's same-batch execution),
    but no more than there are channels, anchor buckets or strata.
    """
    if isinstance(request.model_parallel_size, int):
        return request.model_parallel_size
    if not any(STRATEGIES[s].model_axis for s in chosen):
        return 1
    node = request.node_devices or request.devices
    most = min(node, *(request.shape.decoder.parts.get(strategy, node) for strategy in chosen))
    return max(n for n in range(1, most + 1) if node % n == 0)
