"""Diagnosis and hardware -> Plan.

Policy "auto" compares all legal plans (auto.py). Policy "paper" is AMP's fixed mapping (Zhang et al. 2026, Section 3.3
and Table 4):

    one device                     single-device execution, nothing is installed
    no 3D modality                 S1
    it fits under S1               S1 (Section 4.1: lightweight configurations run under S1 only)
    HIGH_INPUT_DIMENSIONALITY      S2 and S4
    ATTENTION_DECODER              S3
    HEAVY_DECOMPOSITION            S5, when the EPM under the strategies above still exceeds the memory of a device
    a signal from outside          its strategies, whatever the memory and on one device too

The paper maps signals independently of memory, yet its lightweight configurations, which raise the same signals, run
under S1 only (Table 6); the third row is how both can be true. Which signal asks for which strategy stands in
`strategies.py`. Registered strategies count as chosen before the memory is looked at.
"""

from collections.abc import Collection

from lightning_amp.diagnosis.diagnose import diagnose
from lightning_amp.diagnosis.diagnosis import Diagnosis
from lightning_amp.errors import PlanError
from lightning_amp.planning.auto import candidates
from lightning_amp.planning.balance import decide_balance
from lightning_amp.planning.byte_size import format_bytes, parse_bytes
from lightning_amp.planning.candidate import Candidate
from lightning_amp.planning.conflicts import conflicts
from lightning_amp.planning.plan import Axes, MeshShape, Plan
from lightning_amp.planning.prediction import predict
from lightning_amp.planning.rates import CPU_CORE, Rates
from lightning_amp.planning.request import check_request
from lightning_amp.planning.rules import build_rules
from lightning_amp.planning.shape import ModelShape, reference_shape
from lightning_amp.planning.strategies import STRATEGIES, in_order, parse_strategies, targets_of
from lightning_amp.planning.work import step_seconds
from lightning_amp.profiling.profile import Profile


def plan(
    profile: Profile,
    *,
    devices: int = 1,
    device_memory: str | int | None = None,
    policy: str = "auto",
    strategies: str | list[str] | tuple[str, ...] | None = None,
    batch_size: int = 64,
    model_parallel_size: int | str = "auto",
    shape: ModelShape | None = None,
    rates: Rates = CPU_CORE,
) -> Plan:
    """Decide what to install.

    Args:
        profile: The data.
        devices: Ranks in all, over all nodes.
        device_memory: Budget of one device, a number of bytes or a text such as "24GiB"; None means unknown.
        policy: "auto" takes the fastest plan that fits, "paper" AMP's fixed mapping.
        strategies: The user's own choice from the library instead of the policy's; still checked and predicted.
        batch_size: Cells per rank and modality.
        model_parallel_size: Ranks of the model axis, or "auto".
        shape: The model; None means the reference model with its default sizes.
        rates: What one device reaches, for the predicted times.

    Raises:
        PlanError: A request outside what is allowed, or strategies that this number of devices cannot run.
    """
    check_request(
        devices=devices,
        device_memory=device_memory,
        policy=policy,
        strategies=strategies,
        batch_size=batch_size,
        model_parallel_size=model_parallel_size,
    )
    budget = None if device_memory is None else parse_bytes(device_memory)
    diagnosis = diagnose(profile)
    shape = shape or reference_shape(profile, batch_size=batch_size)
    notes: list[str] = []
    compared: tuple[Candidate, ...] = ()
    if strategies is not None:
        chosen = parse_strategies(strategies)
    elif policy == "auto" and shape.decoder is not None:
        size = model_parallel_size if isinstance(model_parallel_size, int) else None
        own, notes = _registered(diagnosis, shape, devices=devices)
        base = frozenset(own | ({"S1"} if devices > 1 else set()))
        compared = candidates(
            shape, devices=devices, budget=budget, rates=rates, own=base, model_parallel_size=size
        )
    else:
        chosen, notes = _mapped(
            diagnosis, shape, devices=devices, budget=budget, model_parallel_size=model_parallel_size
        )
    if compared:
        chosen, model_parallel_size = compared[0].strategies, compared[0].model
    mesh = _mesh(chosen, shape, devices=devices, model_parallel_size=model_parallel_size)
    _check_decoder(chosen, shape)
    predicted = predict(shape, chosen, model_ranks=mesh.model)
    asked = "strategies" if strategies is not None else policy
    balance, balance_note = decide_balance(profile, mesh, batch_size)
    notes += _notes(chosen, shape) + balance_note
    return Plan(
        policy=asked,
        signals=diagnosis.signals,
        evidence=tuple(f"{f.signal}: {f.evidence}" for f in diagnosis.findings),
        strategies=chosen,
        mesh=mesh,
        axes=Axes.of(chosen),
        rules=build_rules(chosen, shape, mesh, diagnosis, balance=balance, policy=asked),
        batch_size=shape.batch_size,
        predicted_base_bytes=predicted.base_bytes,
        predicted_stratum_bytes=predicted.mean_stratum_bytes,
        predicted_peak_bytes=predicted.peak_bytes,
        strata_bytes=predicted.strata_bytes,
        budget_bytes=budget,
        balance_cells=balance,
        notes=tuple(notes),
        predicted_step_seconds=_step_seconds(shape, chosen, mesh, rates),
        candidates=compared,
    )


def _step_seconds(shape: ModelShape, chosen: tuple[str, ...], mesh: MeshShape, rates: Rates) -> float | None:
    if shape.decoder is None:
        return None
    return step_seconds(
        shape.decoder,
        Axes.of(chosen),
        mesh,
        cells=shape.batch_size,
        rates=rates,
        element_bytes=shape.element_bytes,
    )


def _mapped(
    diagnosis: Diagnosis,
    shape: ModelShape,
    *,
    devices: int,
    budget: int | None,
    model_parallel_size: int | str,
) -> tuple[tuple[str, ...], list[str]]:
    """The mapping's strategies, with a sentence that says which row of it applied."""

    def peak(chosen: set[str]) -> int:
        ranks = _model_ranks(chosen, shape, devices=devices, model_parallel_size=model_parallel_size)
        return predict(shape, in_order(chosen), model_ranks=ranks).peak_bytes

    own, notes = _registered(diagnosis, shape, devices=devices)
    if devices == 1:
        first = "one device: single-device execution (the paper's mapping prescribes nothing)"
        return in_order(own), [first, *notes]
    base = {"S1", *own}
    under = ", ".join(in_order(base))
    if shape.decoder is None:
        only = under if own else "data parallelism (S1)"
        return in_order(base), [f"no decomposed decoder was recognised: {only} only", *notes]
    whole = peak(base)
    if budget is None or whole <= budget:
        limit = "no memory budget is known" if budget is None else f"it fits in {format_bytes(budget)}"
        first = f"{format_bytes(whole)} per device under {under} and {limit}: {under} only"
        return in_order(base), [first, *notes]
    asked = {s for s, row in STRATEGIES.items() if row.signal in diagnosis.signals and not row.from_outside}
    chosen = base | (asked - {"S5"})
    if "S5" in asked and peak(chosen) > budget:
        chosen.add("S5")
    first = f"{format_bytes(whole)} per device under {under} exceeds {format_bytes(budget)}"
    return in_order(chosen), [first, *notes]


def _registered(diagnosis: Diagnosis, shape: ModelShape, *, devices: int) -> tuple[set[str], list[str]]:
    """Strategies from outside whose signal is raised, and a sentence for each that is left out all the same."""
    own, notes = set(), []
    for strategy, row in STRATEGIES.items():
        if not row.from_outside or row.signal not in diagnosis.signals:
            continue
        if row.model_axis and devices == 1:
            notes.append(f"{strategy} is left out: it splits over the model axis, which one device has not")
        elif not targets_of(strategy, shape):
            notes.append(f"{strategy} is left out: it finds nothing to change in this model")
        else:
            own.add(strategy)
    return own, notes


def _model_ranks(
    chosen: Collection[str], shape: ModelShape, *, devices: int, model_parallel_size: int | str
) -> int:
    """Ranks of the model axis, unless the user says how many: all (the paper's same-batch execution), or as many as
    there are channels for.
    """
    if isinstance(model_parallel_size, int):
        return model_parallel_size
    if not any(STRATEGIES[s].model_axis for s in chosen):
        return 1
    most = shape.decoder.hidden_parts if "S5" in chosen and shape.decoder is not None else devices
    return max(n for n in range(1, min(devices, most) + 1) if devices % n == 0)


def _mesh(
    chosen: tuple[str, ...], shape: ModelShape, *, devices: int, model_parallel_size: int | str
) -> MeshShape:
    """All ranks on the model axis where a strategy needs it, else on data."""
    sharding = [s for s in chosen if STRATEGIES[s].model_axis]
    model = _model_ranks(chosen, shape, devices=devices, model_parallel_size=model_parallel_size)
    if devices % model:
        raise PlanError(
            f"model_parallel_size={model!r} was asked for with {devices} devices; it must divide them, choose one of"
            f" {[n for n in range(1, devices + 1) if devices % n == 0]}"
        )
    if sharding and model < 2:
        raise PlanError(
            f"{', '.join(sharding)} split a module over the model axis, which has {model} rank with devices={devices};"
            " use two devices or more, or leave these strategies out"
        )
    if model > 1 and not sharding:
        raise PlanError(
            f"model_parallel_size={model} was asked for, but {', '.join(chosen)} split nothing over the model axis;"
            ' use model_parallel_size="auto", or add S2 or S5'
        )
    if "S5" in chosen and shape.decoder is not None and model > shape.decoder.hidden_parts:
        raise PlanError(
            f"S5 was asked for with {model!r} ranks on the model axis, and D={shape.decoder.dim!r} can be dealt to"
            f" {shape.decoder.hidden_parts!r} at most; choose a smaller model_parallel_size, or leave S5 out"
        )
    return MeshShape(data=devices // model, model=model)


def _check_decoder(chosen: tuple[str, ...], shape: ModelShape) -> None:
    needing = [s for s in chosen if STRATEGIES[s].choice is not None]
    if shape.decoder is None and needing:
        raise PlanError(
            f"{', '.join(needing)} change a decomposed decoder, and none was recognised in the module; use S1, or"
            " give the module a decoder with the protocol in docs/architecture.md"
        )
    attending = [s for s in ("S3", "fused", "nodes") if s in chosen]
    if shape.decoder is not None and attending and not shape.decoder.attention:
        raise PlanError(
            f"{', '.join(attending)} change attention, but {shape.decoder.fqn!r} builds its keys without attention;"
            f" leave {', '.join(attending)} out"
        )
    found = list(conflicts(chosen))
    if found:
        raise PlanError(
            f"strategies {', '.join(chosen)} were asked for: {'; '.join(found)}. Leave one of them out"
        )


def _notes(chosen: tuple[str, ...], shape: ModelShape) -> list[str]:
    notes = [
        f"the prediction does not count what {strategy} ({row.title}) saves: {row.shrinks}"
        for strategy, row in STRATEGIES.items()
        if strategy in chosen and row.from_outside and row.shape_after is None
    ]
    if shape.decoder is None:
        notes.append("activations of a module without a recognised decoder cannot be predicted")
    return notes
