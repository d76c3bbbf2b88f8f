"""Policy "auto": choose the fastest legal plan that fits; among equally fast plans, the simplest with memory to spare.

    1. every combination of a choice on each axis of the decoder, for every split of the devices into data and model
    2. without combinations whose choices conflict, or that the model or the number of ranks does not support
    3. without those whose predicted peak exceeds the memory of a device (memory/peak_model.py)
    4. the least predicted time per cell (time/step_seconds.py); within a factor of `TIE`, plans that use at most
       `SPARE` of the memory, if there are any: predictions do not cover everything, and a job that fails after
       hours costs more than a technique; of these the fewest techniques, then the library's order

Nothing is random or measured, so the same request gets the same plan. If no plan fits, the one that requires the least
memory is taken, and the plan says that it does not fit.

The batch per rank is given, so more ranks of the data axis mean more cells in a step; plans are compared by the time
per cell. Keys cost the same for one cell as for many: ranks of the model axis share them, ranks of the data axis repeat
them.

Known limit: the time is that of the decoder; the rest of a step takes the same in all candidates with as many ranks.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from lightning_amp.costs.device_rates import Rates
from lightning_amp.costs.model_shape import ModelShape
from lightning_amp.costs.profiled_step import TIE
from lightning_amp.planning.memory.peak_model import predict
from lightning_amp.planning.plan.mesh_shape import MeshShape
from lightning_amp.planning.plan.plan import Axes, Candidate
from lightning_amp.planning.time.step_seconds import decoder_seconds
from lightning_amp.quantities import format_bytes
from lightning_amp.techniques.table import STRATEGIES, conflicts, in_order, on_axis

PLACEMENTS = ((), ("S2",), ("S5",), ("S2", "S5"), ("strata",), ("S2", "strata"), ("nodes",), ("S2", "nodes"))
AXES = ("attention", "decode", "likelihood", "activations")
CHOICES = tuple(((), *((name,) for name in on_axis(axis))) for axis in AXES)
"""For each of these axes, the strategies that each choice adds to a plan; the first choice adds none."""
NEEDS_ATTENTION = {"S3", "fused", "sdpa", "nodes"}
LOCAL_ATTENTION_ONLY = {"S3", "S5", "fused", "sdpa"}
"""Techniques for local attention only: full attention uses torch's kernels, and its scores sum over all channels."""
KERNEL_CHANNELS = 8
"""On an accelerator torch's attention kernels require rows of a multiple of 16 bytes, also in bfloat16."""
SPARE = 0.5
"""Largest share of a device's memory that a plan with memory to spare may use."""


def candidates(
    shape: ModelShape,
    *,
    devices: int,
    budget: int | None,
    rates: Rates,
    own: frozenset[str] = frozenset(),
    model_parallel_size: int | None = None,
    node_devices: int | None = None,
) -> tuple[Candidate, ...]:
    """Return all legal plans, the chosen one first, then from best to worst; none if the model axis is too long.

    Args:
        budget: Memory of one device in bytes, None if unknown.
        own: Strategies that every plan has: S1 on several devices, and registered ones whose signal is raised.
        model_parallel_size: Ranks of the model axis, None for any number up to a node's devices.
        node_devices: Devices of a node, None if all are on one node.
    """
    # the model axis sends most, so it stays inside a node; lengths that do not divide a node would cross nodes
    node = node_devices or devices
    lengths = [n for n in range(1, node + 1) if node % n == 0]
    found = [
        _candidate(shape, chosen, MeshShape(data=devices // model, model=model), rates)
        for model in (lengths if model_parallel_size is None else [model_parallel_size])
        if devices % model == 0
        for chosen in _legal(shape, own, model)
    ]
    if not found:
        return ()
    fitting = [c for c in found if budget is None or c.peak_bytes <= budget]
    if not fitting:
        best = min(found, key=lambda c: (c.peak_bytes, _simplicity(c)))
    else:
        fastest = min(c.cell_seconds for c in fitting)
        level = [c for c in fitting if c.cell_seconds <= TIE * fastest]
        # among ties memory to spare comes before simplicity, and simplicity before the last per cent of time
        best = min([c for c in level if _spares(c, budget)] or level, key=_simplicity)
    found.sort(key=lambda c: _order(c, best, budget, nothing_fits=not fitting))
    return tuple(replace(c, verdict=_verdict(c, best, budget)) for c in found)


def _legal(shape: ModelShape, own: frozenset[str], model: int) -> Iterator[tuple[str, ...]]:
    placements = PLACEMENTS if model > 1 else PLACEMENTS[:1]
    for choices in product(placements, *CHOICES):
        chosen = own.union(*choices)
        # without a strategy that shards, all ranks of a model axis would compute the same
        splits = any(STRATEGIES[s].model_axis for s in chosen)
        if splits == (model > 1) and not _is_not_possible(shape, chosen, model):
            yield in_order(chosen)


def _is_not_possible(shape: ModelShape, chosen: frozenset[str], model: int) -> bool:
    """Whether strategies conflict, or do not support this decoder or this many ranks of the model axis.

    Plans that another plan beats at all sizes are excluded too, because there are hundreds of candidates per axis
    length.
    """
    decoder = shape.decoder
    # fused attention keeps less than S3 and is faster: S3 is useful only with S5, which excludes fused, or if fused is
    # unsupported
    pointless = "S3" in chosen and "S5" not in chosen and "fused" not in decoder.unsupported
    return (
        pointless
        or bool(chosen & set(decoder.unsupported))
        or (not decoder.attention and bool(chosen & NEEDS_ATTENTION))
        or (decoder.full and bool(chosen & LOCAL_ATTENTION_ONLY))
        # torch has no fused kernel for these; the installed attention checks it again at run time
        or ("sdpa" in chosen and decoder.launched and (shape.element_bytes > 4 or decoder.dim % KERNEL_CHANNELS != 0))
        or any(strategy in chosen and model > most for strategy, most in decoder.parts.items())
        # if strata or anchors are sharded, S2 shards only the wide layers; without wide layers it adds nothing
        or ("S2" in chosen and bool(chosen & {"strata", "nodes"}) and not shape.wide_layers)
        or any(conflicts(chosen))
    )


def _candidate(shape: ModelShape, chosen: tuple[str, ...], mesh: MeshShape, rates: Rates) -> Candidate:
    seconds = decoder_seconds(shape, Axes.of(chosen), mesh, rates)
    return Candidate(
        strategies=chosen,
        data=mesh.data,
        model=mesh.model,
        peak_bytes=predict(shape, chosen, model_ranks=mesh.model).peak_bytes,
        step_seconds=seconds,
        cell_seconds=seconds / (mesh.data * shape.batch_size),
    )


def _simplicity(candidate: Candidate) -> tuple[int, tuple[int, ...], int]:
    order = list(STRATEGIES)
    places = tuple(order.index(s) for s in candidate.strategies)
    return len(candidate.strategies), places, candidate.model


def _spares(candidate: Candidate, budget: int | None) -> bool:
    return budget is None or candidate.peak_bytes <= SPARE * budget


def _verdict(candidate: Candidate, best: Candidate, budget: int | None) -> str:
    if candidate == best:
        return "chosen"
    if budget is not None and candidate.peak_bytes > budget:
        return f"exceeds {format_bytes(budget)}"
    ratio = candidate.cell_seconds / best.cell_seconds
    if ratio < TIE and _spares(best, budget) and not _spares(candidate, budget):
        return "over half the memory"
    if ratio < TIE:
        return f"within {100 * (TIE - 1):.0f} %, no simpler"
    return f"{ratio:.2f} x the time"


def _order(candidate: Candidate, best: Candidate, budget: int | None, *, nothing_fits: bool) -> tuple[object, ...]:
    exceeds = budget is not None and candidate.peak_bytes > budget
    merit = candidate.peak_bytes if nothing_fits else candidate.cell_seconds
    return candidate != best, exceeds, merit, _simplicity(candidate)
