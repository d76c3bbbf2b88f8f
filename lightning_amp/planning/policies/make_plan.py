"""Plan a data directory's model: signals, devices and their memory decide what to install where.

Policy "auto" compares all legal plans (auto.py), "paper" is AMP's fixed mapping (paper.py). If auto chooses another
plan than the mapping, a note compares peak and time of both.
"""

from collections.abc import Sequence
from dataclasses import replace

from lightning_amp.costs.device_rates import CPU_CORE, Rates
from lightning_amp.costs.model_shape import LARGEST, DecoderShape, ModelShape, reference_shape
from lightning_amp.costs.ordered_runs import speeds_of_ranks
from lightning_amp.diagnosis import diagnose
from lightning_amp.errors import PlanError
from lightning_amp.planning.memory.peak_model import predict
from lightning_amp.planning.plan.mesh_shape import MeshShape
from lightning_amp.planning.plan.plan import Axes, Candidate, Explanation, Plan
from lightning_amp.planning.policies.auto import LOCAL_ATTENTION_ONLY, candidates
from lightning_amp.planning.policies.build_rules import (
    build_rules,
    decide_balance,
    too_few_cells,
    with_memory,
    with_speeds,
)
from lightning_amp.planning.policies.paper import PlanRequest, mapped, model_ranks_of, registered, without_strata
from lightning_amp.planning.time.step_seconds import decoder_seconds, on_device, predicted_times
from lightning_amp.profiling.profile import Profile
from lightning_amp.quantities import format_bytes, format_seconds, memory_of_ranks
from lightning_amp.techniques.table import STRATEGIES, conflicts, in_order, parse_strategies

POLICIES = ("auto", "paper")


def plan(
    profile: Profile,
    *,
    devices: int = 1,
    device_memory: str | int | Sequence[str | int] | None = None,
    policy: str = "auto",
    strategies: str | list[str] | tuple[str, ...] | None = None,
    batch_size: int = 64,
    model_parallel_size: int | str = "auto",
    shape: ModelShape | None = None,
    rates: Rates = CPU_CORE,
    node_devices: int | None = None,
    device_speeds: str | Sequence[float] | None = None,
) -> Plan:
    """Decide what to install.

    Args:
        profile: The data.
        devices: Number of ranks on all nodes together.
        device_memory: Budget of one device, a number of bytes or a text such as "24GiB"; None means unknown. From a
            list with one entry per device, the minimum is used.
        policy: "auto" takes the fastest plan that fits, "paper" AMP's fixed mapping.
        strategies: Strategies to use instead of the policy's choice; they are checked and predicted as well.
        batch_size: Cells per rank and modality.
        model_parallel_size: Ranks of the model axis, or "auto".
        shape: The model; None means the reference model with its default sizes.
        rates: Rates of one device, to predict times.
        node_devices: Devices of one node; the model axis stays inside a node unless `model_parallel_size` is larger.
            None means that all devices are on one node.
        device_speeds: Speed of every device in any unit, by which strata are distributed; None means equal speeds.

    Raises:
        PlanError: An argument is not allowed, or this number of devices cannot run the strategies.
    """
    check_request(
        devices=devices,
        device_memory=device_memory,
        policy=policy,
        strategies=strategies,
        batch_size=batch_size,
        model_parallel_size=model_parallel_size,
    )
    memory = () if device_memory is None else memory_of_ranks(device_memory, devices)
    request = PlanRequest(
        diagnosis=diagnose(profile),
        shape=on_device(shape or reference_shape(profile, batch_size=batch_size), rates),
        devices=devices,
        budget=min(memory, default=None),
        rates=rates.on_nodes_of(node_devices),
        model_parallel_size=model_parallel_size,
        # a node that is not full counts as a single node
        node_devices=None if node_devices is None or node_devices >= devices else node_devices,
    )
    requested, notes, compared = policy, list[str](), tuple[Candidate, ...]()
    if strategies is not None:
        requested, chosen = "strategies", parse_strategies(strategies)
    elif not request.shape.decoder:
        chosen, notes = without_strata(request)
    elif policy == "paper":
        chosen, notes = mapped(request)
    else:
        own, notes = registered(request.diagnosis, request.shape, devices=devices)
        check_divides(model_parallel_size, devices)
        compared = candidates(
            request.shape,
            devices=devices,
            budget=request.budget,
            rates=request.rates,
            own=frozenset(own | ({"S1"} if devices > 1 else set())),
            model_parallel_size=model_parallel_size if isinstance(model_parallel_size, int) else None,
            node_devices=request.node_devices,
        )
        if not compared:
            raise PlanError(
                f"model_parallel_size={model_parallel_size!r} is not supported: no strategies can share this model"
                ' among so many ranks; choose fewer, or model_parallel_size="auto"'
            )
        chosen = compared[0].strategies
        if model_parallel_size == "auto":
            notes = notes + _of_paper(compared[0], request)
        request = replace(request, model_parallel_size=compared[0].model)
    made = _carried_out(request, chosen, profile, asked=requested, compared=compared, notes=notes)
    return with_memory(with_speeds(made, request.shape, speeds_of_ranks(device_speeds, devices)), memory)


def check_request(
    *,
    devices: int,
    device_memory: str | int | Sequence[str | int] | None,
    policy: str,
    strategies: str | list[str] | tuple[str, ...] | None,
    batch_size: int,
    model_parallel_size: int | str,
) -> None:
    """Raise an error for arguments of `plan` that are invalid for any data, before data are read.

    Raises:
        PlanError: An argument is not allowed.
    """
    if policy not in POLICIES:
        raise PlanError(f"policy={policy!r} is not supported; allowed are {', '.join(map(repr, POLICIES))}")
    for name, value in (("devices", devices), ("batch_size", batch_size)):
        if type(value) is not int or not 1 <= value <= LARGEST:
            raise PlanError(f"{name}={value!r} is not supported; allowed is a whole number from 1 to {LARGEST:,}")
    if device_memory is not None:
        memory_of_ranks(device_memory)
    if strategies is not None:
        parse_strategies(strategies)
    if model_parallel_size != "auto" and (type(model_parallel_size) is not int or model_parallel_size < 1):
        raise PlanError(
            f'model_parallel_size={model_parallel_size!r} is not supported; allowed are "auto" or a whole number of 1'
            " or more that divides the devices"
        )


def _carried_out(
    request: PlanRequest,
    chosen: tuple[str, ...],
    profile: Profile,
    *,
    asked: str,
    compared: tuple[Candidate, ...],
    notes: list[str],
) -> Plan:
    """Build the plan of the chosen strategies; `compared` has a policy's candidates, the chosen one first."""
    shape = request.shape
    mesh = _mesh(chosen, request)
    unpredicted = _check_decoder(chosen, shape)
    for name in chosen:
        row = STRATEGIES[name]
        if row.unsuited is not None and (why := row.unsuited(shape, chosen)):
            raise PlanError(why)
    predicted = predict(shape, chosen, model_ranks=mesh.model)
    balance, balance_note = decide_balance(profile, mesh, shape.batch_size)
    node, across = request.node_devices, list[str]()
    if node is not None and node % mesh.model:
        across = [
            f"the model axis of {mesh.model} ranks crosses nodes of {node}: what its ranks send each other passes the"
            " slower network between nodes"
        ]
    return Plan(
        policy=asked,
        signals=request.diagnosis.signals,
        evidence=tuple(f"{f.signal}: {f.evidence}" for f in request.diagnosis.findings),
        strategies=chosen,
        mesh=mesh,
        axes=Axes.of(chosen),
        rules=build_rules(chosen, shape, mesh, request.diagnosis, balance=balance, policy=asked),
        batch_size=shape.batch_size,
        predicted_base_bytes=predicted.base_bytes,
        predicted_stratum_bytes=predicted.mean_stratum_bytes,
        predicted_peak_bytes=predicted.peak_bytes,
        strata_bytes=predicted.strata_bytes,
        budget_bytes=request.budget,
        balance_cells=balance,
        notes=(
            *notes,
            *_notes(chosen, shape),
            *unpredicted,
            *across,
            *balance_note,
            *too_few_cells(profile, mesh, shape.batch_size),
        ),
        **predicted_times(shape, Axes.of(chosen), mesh, request.rates),
        candidates=compared,
    )


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


def check_divides(model_parallel_size: int | str | None, devices: int) -> None:
    """Raise a PlanError if the ranks of the model axis do not divide the number of devices."""
    if isinstance(model_parallel_size, int) and devices % model_parallel_size:
        raise PlanError(
            f"model_parallel_size={model_parallel_size!r} is not supported with {devices} devices; it must divide"
            f" them, choose one of {[n for n in range(1, devices + 1) if devices % n == 0]}"
        )


def _mesh(chosen: tuple[str, ...], request: PlanRequest) -> MeshShape:
    """Choose the mesh: a node's ranks on the model axis if a strategy requires it, else all ranks on the data axis."""
    devices, node_devices = request.devices, request.node_devices
    sharding = [s for s in chosen if STRATEGIES[s].model_axis]
    # a strategy with a grid over both axes may have one rank on the model axis
    must = [s for s in sharding if not STRATEGIES[s].data_axis]
    model = model_ranks_of(chosen, request)
    check_divides(model, devices)
    if must and model < 2 <= devices and node_devices == 1 and request.model_parallel_size == "auto":
        raise PlanError(
            f"{', '.join(sharding)} split a module over the model axis, which stays inside a node, and a node has"
            f" {node_devices} device; set model_parallel_size={devices} to let it cross nodes, or leave these"
            " strategies out"
        )
    if must and model < 2:
        why, remedy = _one_model_rank(sharding, request)
        raise PlanError(
            f"{', '.join(sharding)} split a module over the model axis, and {why}; {remedy}, or leave these strategies"
            " out"
        )
    if model > 1 and not sharding:
        raise PlanError(
            f"model_parallel_size={model} is not supported: {', '.join(chosen)} split nothing over the model axis;"
            ' use model_parallel_size="auto", or add one of'
            f" {', '.join(s for s, row in STRATEGIES.items() if row.model_axis)}"
        )
    _check_parts(chosen, request.shape.decoder, model)
    return MeshShape(data=devices // model, model=model)


def _one_model_rank(sharding: list[str], request: PlanRequest) -> tuple[str, str]:
    """Return why the model axis has one rank only, and how to get more."""
    decoder, node = request.shape.decoder, request.node_devices or request.devices
    if request.devices == 1 or request.model_parallel_size != "auto":
        requested = "" if request.model_parallel_size == "auto" else ", model_parallel_size=1"
        return f"that has one rank with devices={request.devices}{requested}", "use two ranks or more"
    limiting = min(sharding, key=lambda strategy: decoder.parts.get(strategy, node))
    most, whole = decoder.parts[limiting], _wholes(decoder)[limiting]
    remedy = "choose a smaller window" if limiting == "nodes" else "use another number of devices"
    if most == 1:
        return f"{whole} cannot be split", remedy
    return (f"no number of ranks that {whole} can be split over, up to {most!r}, divides {node!r} devices", remedy)


def _wholes(decoder: DecoderShape) -> dict[str, str]:
    """Return what is sharded over the model axis, by strategy."""
    return {
        "S5": f"D={decoder.dim!r}",
        "nodes": f"N={decoder.anchors!r} anchors in buckets of {decoder.window!r}",
        "strata": f"K={len(decoder.features)!r} strata",
    }


def _check_parts(chosen: tuple[str, ...], decoder: DecoderShape, model: int) -> None:
    """Raise an error if the model axis has more ranks than parts; time/step_seconds.py checks the strata."""
    wholes = _wholes(decoder)
    for strategy in ("S5", "nodes") if decoder.attention else ("S5",):
        whole, most = wholes[strategy], decoder.parts.get(strategy, model)
        if strategy in chosen and model > most:
            raise PlanError(
                f"{strategy} got {model!r} ranks on the model axis, and {whole} can be split over {most!r}"
                f" at most; choose a smaller model_parallel_size, or leave {strategy} out"
            )


def _check_decoder(chosen: tuple[str, ...], shape: ModelShape) -> list[str]:
    """Raise an error for strategies that the decoder, or its absence, excludes; return notes on missing predictions."""
    found, decoder, unpredicted = list(conflicts(chosen)), shape.decoder, list[str]()
    if not decoder:
        needing = [s for s in chosen if STRATEGIES[s].choice is not None]
        if needing:
            one = len(needing) == 1
            raise PlanError(
                f"{', '.join(needing)} {'requires' if one else 'require'} a decoder of strata, and none was detected in"
                " the module; use S1 or a technique of any module (recompute, chunk, replay), or give the module a"
                " decoder with the protocol in docs/architecture.md"
            )
        if not shape.profiled:
            unpredicted = ["activations of a module without a detected decoder cannot be predicted"]
    else:
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
        found = found or [f"{why}, as those of {decoder.fqn!r} here" for why in reasons if why]
    if found:
        raise PlanError(
            f"strategies={','.join(chosen)!r} cannot be combined: {'; '.join(found)}. Leave one of them out"
        )
    return unpredicted


def _notes(chosen: tuple[str, ...], shape: ModelShape) -> list[str]:
    notes = []
    for strategy in in_order(chosen):
        row = STRATEGIES[strategy]
        looked_for = bool(row.look or row.read_step) and row.choice is None
        if (row.registered and row.shape_after is None) or (looked_for and not shape.profiled):
            notes.append(f"the prediction does not count what {strategy} ({row.title}) saves: {row.shrinks}")
    if "compile" in chosen:
        notes.append(
            "the prediction is that of strata that are not compiled: torch's compiler decides what is fused and kept"
        )
    return notes
