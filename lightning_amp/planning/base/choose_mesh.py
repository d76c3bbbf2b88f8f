"""Choose the mesh of a plan: how many ranks average gradients, and how many split the module."""

from collections.abc import Collection

from lightning_amp.costs.model_shape import DecoderShape
from lightning_amp.errors import PlanError
from lightning_amp.planning.base.plan_request import PlanRequest
from lightning_amp.planning.plan.mesh_shape import MeshShape
from lightning_amp.techniques.table import STRATEGIES


def model_ranks_of(chosen: Collection[str], request: PlanRequest) -> int:
    """Return the model axis size: the user's number, or all devices of a node (the paper's same-batch execution),
    but no more than there are channels, anchor buckets or strata.
    """
    if isinstance(request.model_parallel_size, int):
        return request.model_parallel_size
    if not any(STRATEGIES[s].model_axis for s in chosen):
        return 1
    node = request.node or request.devices
    most = min(node, *(request.shape.decoder.parts.get(strategy, node) for strategy in chosen))
    return max(n for n in range(1, most + 1) if node % n == 0)


def check_divides(model_parallel_size: int | str | None, devices: int) -> None:
    """Raise a PlanError if the ranks of the model axis do not divide the number of devices."""
    if isinstance(model_parallel_size, int) and devices % model_parallel_size:
        raise PlanError(
            f"model_parallel_size={model_parallel_size!r} is not supported with {devices} devices; it must divide"
            f" them, choose one of {[n for n in range(1, devices + 1) if devices % n == 0]}"
        )


def choose_mesh(chosen: tuple[str, ...], request: PlanRequest) -> MeshShape:
    """Choose the mesh: a node's ranks on the model axis if a strategy requires it, else all ranks on the data axis."""
    devices, node_devices = request.devices, request.node
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
    decoder, node = request.shape.decoder, request.node or request.devices
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
