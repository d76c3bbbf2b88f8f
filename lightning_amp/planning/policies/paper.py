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

from lightning_amp.planning.base.base_plan import registered
from lightning_amp.planning.base.choose_mesh import model_ranks_of
from lightning_amp.planning.base.plan_request import PlanRequest
from lightning_amp.planning.memory.peak_model import predict
from lightning_amp.planning.plan.plan import Explanation
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.table import STRATEGIES, in_order


def mapped(request: PlanRequest) -> tuple[tuple[str, ...], list[str]]:
    """Return the strategies of the mapping, and a sentence that says which row of it applied."""
    shape, budget = request.shape, request.budget

    def peak(chosen: set[str]) -> int:
        ranks = model_ranks_of(chosen, request)
        # with the ranks that these strategies would have, because the mesh is decided after them
        return predict(shape, in_order(chosen), model_ranks=ranks).peak_bytes

    own, notes = registered(request)
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
