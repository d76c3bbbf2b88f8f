"""Diagnosis and hardware -> Plan: AMP's fixed mapping (Zhang et al. 2026, Section 3.3 and Table 4).

    one device                     single-device execution, nothing is installed
    no 3D modality                 S1
    it fits under S1               S1 (Section 4.1: lightweight configurations run under S1 only)
    HIGH_INPUT_DIMENSIONALITY      S2 and S4
    ATTENTION_DECODER              S3
    HEAVY_DECOMPOSITION            S5, when the EPM under the strategies above still exceeds the memory of a device

The paper maps signals independently of memory, yet its lightweight configurations, which raise the same signals, run
under S1 only; the third row is how both can be true.
"""

from lightning_amp.diagnosis.diagnose import (
    ATTENTION_DECODER,
    HEAVY_DECOMPOSITION,
    HIGH_INPUT_DIMENSIONALITY,
    diagnose,
)
from lightning_amp.diagnosis.diagnosis import Diagnosis
from lightning_amp.errors import PlanError
from lightning_amp.planning.balance import decide_balance
from lightning_amp.planning.byte_size import format_bytes, parse_bytes
from lightning_amp.planning.memory import estimate
from lightning_amp.planning.plan import Axes, MeshShape, Plan
from lightning_amp.planning.request import check_request
from lightning_amp.planning.rules import build_rules
from lightning_amp.planning.shape import ModelShape, reference_shape
from lightning_amp.planning.strategies import STRATEGIES, parse_strategies
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
) -> Plan:
    """Decide what to install.

    Args:
        profile: The data.
        devices: Ranks in all, over all nodes.
        device_memory: Budget of one device, a number of bytes or a text such as "24GiB"; None means unknown.
        policy: "paper" is AMP's fixed mapping; "auto" follows it in this version.
        strategies: The user's own choice of S1 to S5 instead of the policy's; still checked and predicted.
        batch_size: Cells per rank and modality.
        model_parallel_size: Ranks of the model axis, or "auto".
        shape: The model; None means the reference model with its default sizes.

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
    if strategies is not None:
        chosen = parse_strategies(strategies)
    else:
        chosen, notes = _paper(diagnosis, shape, devices=devices, budget=budget)
        if policy == "auto":
            notes.append('policy "auto" follows the paper\'s fixed mapping in this version')
    mesh = _mesh(chosen, devices=devices, model_parallel_size=model_parallel_size)
    axes = _axes(chosen, shape)
    predicted = estimate(shape, axes, model_ranks=mesh.model)
    balance, balance_note = decide_balance(profile, mesh, batch_size)
    notes += _notes(shape) + balance_note
    return Plan(
        policy="strategies" if strategies is not None else policy,
        signals=diagnosis.signals,
        evidence=tuple(f"{f.signal}: {f.evidence}" for f in diagnosis.findings),
        strategies=chosen,
        mesh=mesh,
        axes=axes,
        rules=build_rules(chosen, shape, axes, mesh, diagnosis, balance=balance, user=strategies is not None),
        batch_size=shape.batch_size,
        predicted_base_bytes=predicted.base_bytes,
        predicted_stratum_bytes=predicted.mean_stratum_bytes,
        predicted_peak_bytes=predicted.peak_bytes,
        strata_bytes=predicted.strata_bytes,
        budget_bytes=budget,
        balance_cells=balance,
        notes=tuple(notes),
    )


def _paper(
    diagnosis: Diagnosis, shape: ModelShape, *, devices: int, budget: int | None
) -> tuple[tuple[str, ...], list[str]]:
    """AMP's mapping, with a sentence that says which row of it applied."""
    if devices == 1:
        return (), ["one device: single-device execution (the paper's mapping prescribes nothing)"]
    if shape.decoder is None:
        return ("S1",), ["no decomposed decoder was recognised: data parallelism (S1) only"]
    whole = estimate(shape, Axes()).peak_bytes
    if budget is None or whole <= budget:
        limit = "no memory budget is known" if budget is None else f"it fits in {format_bytes(budget)}"
        return ("S1",), [f"{format_bytes(whole)} per device under S1 and {limit}: S1 only"]
    chosen = {"S1"}
    if HIGH_INPUT_DIMENSIONALITY in diagnosis.signals:
        chosen |= {"S2", "S4"}
    if ATTENTION_DECODER in diagnosis.signals:
        chosen.add("S3")
    lean = estimate(
        shape, _axes(tuple(chosen), shape), model_ranks=devices if "S2" in chosen else 1
    ).peak_bytes
    if HEAVY_DECOMPOSITION in diagnosis.signals and lean > budget:
        chosen.add("S5")
    return tuple(sorted(chosen)), [
        f"{format_bytes(whole)} per device under S1 exceeds {format_bytes(budget)}"
    ]


def _mesh(chosen: tuple[str, ...], *, devices: int, model_parallel_size: int | str) -> MeshShape:
    """All ranks on the model axis where a strategy needs it (the paper's same-batch execution), else on data."""
    sharding = [s for s in chosen if STRATEGIES[s].model_axis]
    automatic = devices if sharding else 1
    model = model_parallel_size if isinstance(model_parallel_size, int) else automatic
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
    return MeshShape(data=devices // model, model=model)


def _axes(chosen: tuple[str, ...], shape: ModelShape) -> Axes:
    if shape.decoder is None:
        needing = [s for s in chosen if s != "S1"]
        if needing:
            raise PlanError(
                f"{', '.join(needing)} change a decomposed decoder, and none was recognised in the module; use S1, or"
                " give the module a decoder with the protocol in docs/architecture.md"
            )
        return Axes()
    if "S3" in chosen and not shape.decoder.attention:
        raise PlanError(
            f"S3 chunks attention, but {shape.decoder.fqn!r} builds its keys without attention; leave S3 out"
        )
    return Axes(
        placement="hidden" if "S5" in chosen else "replicated",
        features="sharded" if "S2" in chosen else "all",
        attention="chunked" if "S3" in chosen else "eager",
        decode="key-first" if "S4" in chosen else "full",
    )


def _notes(shape: ModelShape) -> list[str]:
    notes = []
    if shape.decoder is None:
        notes.append("activations of a module without a recognised decoder cannot be predicted")
    return notes
