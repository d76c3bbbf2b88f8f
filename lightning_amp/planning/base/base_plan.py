"""Make the plan of a module without a Hi-C decoder before its step is counted: data parallelism, and named techniques.

The other techniques are chosen by a count of the step (planning/modules/). The bytes here are those that are kept
between steps, which stand in a plan whose step cannot be counted.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from lightning_amp.costs.model_shape import ModelShape
from lightning_amp.costs.rule import Rule
from lightning_amp.errors import PlanError
from lightning_amp.planning.base.choose_mesh import choose_mesh
from lightning_amp.planning.base.plan_request import PlanRequest
from lightning_amp.planning.base.rules import build_rules, too_few_cells
from lightning_amp.planning.plan.mesh_shape import MeshShape
from lightning_amp.planning.plan.plan import Axes, Plan
from lightning_amp.techniques.table import STRATEGIES, conflicts, in_order, targets_of


def plan_without_decoder(request: PlanRequest) -> Plan:
    """Make the plan.

    Raises:
        PlanError: This number of devices, or a module without a decoder, cannot run the strategies.
    """
    shape = request.shape
    chosen, notes = data_parallel(request) if request.strategies is None else (tuple(request.strategies), [])
    mesh = choose_mesh(chosen, request)
    if needing := [s for s in chosen if STRATEGIES[s].choice is not None]:
        raise PlanError(
            f"{', '.join(needing)} {'requires' if len(needing) == 1 else 'require'} a decoder of strata, and none was"
            " detected in the module; use S1 or a technique of any module (recompute, chunk, replay), or give the"
            " module a decoder with the protocol in docs/architecture.md"
        )
    refuse_conflicts(chosen, conflicts(chosen))
    unpredicted = [] if shape.profiled else ["activations of a module without a detected decoder cannot be predicted"]
    refuse_unsuited(chosen, shape)

    def peak_bytes(names: tuple[str, ...]) -> int:
        found: int = kept_bytes(shape, names, mesh)["predicted_peak_bytes"]
        return found

    return plan_of(
        chosen,
        request,
        mesh,
        axes=Axes(),
        rules=build_rules(
            chosen, request, mesh, targets=lambda strategy: targets_of(strategy, shape), peak_bytes=peak_bytes
        ),
        fields=kept_bytes(shape, chosen, mesh),
        notes=(notes, unpredicted, []),
    )


def plan_of(
    chosen: tuple[str, ...],
    request: PlanRequest,
    mesh: MeshShape,
    *,
    axes: Axes,
    rules: tuple[Rule, ...],
    fields: dict[str, Any],
    notes: tuple[list[str], list[str], list[str]],
) -> Plan:
    """Return the plan of the chosen strategies.

    Args:
        fields: Other fields of the plan, such as those on bytes and seconds.
        notes: Notes that come first, after those on the strategies, and before that on too few cells.
    """
    diagnosis, shape, node = request.diagnosis, request.shape, request.node
    across = list[str]()
    if node is not None and node % mesh.model:
        across = [
            f"the model axis of {mesh.model} ranks crosses nodes of {node}: what its ranks send each other passes the"
            " slower network between nodes"
        ]
    first, then, last = notes
    return Plan(
        policy=request.chosen_by,
        signals=diagnosis.signals,
        evidence=tuple(f"{f.signal}: {f.evidence}" for f in diagnosis.findings),
        strategies=chosen,
        mesh=mesh,
        axes=axes,
        rules=rules,
        batch_size=shape.batch_size,
        budget_bytes=request.budget,
        notes=(
            *first,
            *_uncounted(chosen, shape),
            *then,
            *across,
            *last,
            *too_few_cells(request.data, mesh, shape.batch_size),
        ),
        **fields,
    )


def kept_bytes(shape: ModelShape, strategies: Sequence[str], mesh: MeshShape) -> dict[str, Any]:
    """Return the fields of a plan on the bytes of a module without a decoder, and its seconds, which are not known."""
    shape = shape_with(shape, strategies, mesh.model)
    # weights and the last step's gradients, then the optimiser's copies
    held = shape.buffer_bytes + shape.parameter_bytes * (2 + shape.optimizer_slots) + shape.base_activation_bytes
    return {
        "predicted_base_bytes": held,
        "predicted_stratum_bytes": 0,
        "predicted_peak_bytes": held + max(shape.other_decoder_bytes, shape.edge_bytes),
        "strata_bytes": (),
        "predicted_step_seconds": None,
        "predicted_rest_seconds": None,
        "rates_device": "",
    }


def shape_with(shape: ModelShape, strategies: Iterable[str], model_ranks: int) -> ModelShape:
    """Return the shape as registered strategies change it.

    Raises:
        PlanError: `shape_after` of a registered strategy did not return a shape.
    """
    for strategy in strategies:
        after = STRATEGIES[strategy].shape_after
        shape = shape if after is None else after(shape, model_ranks)
        if not isinstance(shape, ModelShape):
            raise PlanError(
                f"shape_after of {strategy} returned {shape!r}; allowed is a ModelShape: return"
                " dataclasses.replace(shape, ...) with the sizes that it changes"
            )
    return shape


def refuse_conflicts(chosen: tuple[str, ...], found: Iterable[str]) -> None:
    """Raise a PlanError if there are reasons why the strategies cannot be combined."""
    if reasons := list(found):
        raise PlanError(
            f"strategies={','.join(chosen)!r} cannot be combined: {'; '.join(reasons)}. Leave one of them out"
        )


def refuse_unsuited(chosen: tuple[str, ...], shape: ModelShape) -> None:
    """Raise a PlanError for a strategy that does not suit the model or the other strategies."""
    for name in chosen:
        row = STRATEGIES[name]
        if row.unsuited is not None and (why := row.unsuited(shape, chosen)):
            raise PlanError(why)


def data_parallel(request: PlanRequest) -> tuple[tuple[str, ...], list[str]]:
    """Return the strategies of a module without a decomposed decoder, with notes, one of them if it was not profiled.

    Other techniques of a profiled module are chosen by a count of its step (planning/modules/).
    """
    own, notes = registered(request)
    chosen = in_order(own | ({"S1"} if request.devices > 1 else set()))
    if request.devices > 1 and not request.shape.profiled:
        only = ", ".join(chosen) if own else "data parallelism (S1)"
        notes = [f"no decomposed decoder was detected: {only} only", *notes]
    return chosen, notes


def registered(request: PlanRequest) -> tuple[set[str], list[str]]:
    """Return registered strategies whose signal is raised, and a sentence for each that is left out nevertheless."""
    own, notes = set(), []
    for strategy, row in STRATEGIES.items():
        if not row.registered or row.signal not in request.diagnosis.signals:
            continue
        if row.model_axis and request.devices == 1:
            notes.append(f"{strategy} is left out: it splits over the model axis, which one device has not")
        elif not targets_of(strategy, request.shape):
            notes.append(f"{strategy} is left out: it finds nothing to change in this model")
        else:
            own.add(strategy)
    return own, notes


def _uncounted(chosen: tuple[str, ...], shape: ModelShape) -> list[str]:
    """Return a note for each strategy whose savings the prediction leaves out."""
    notes = []
    for strategy in in_order(chosen):
        row = STRATEGIES[strategy]
        looked_for = bool(row.look or row.read_step) and row.choice is None
        if (row.registered and row.shape_after is None) or (looked_for and not shape.profiled):
            notes.append(f"the prediction does not count what {strategy} ({row.title}) saves: {row.shrinks}")
    return notes
