"""Predict the seconds of a model's step, and set options of techniques that depend on the mesh.

Decoder:

    seconds of a part      flops / matmul rate  +  bytes / memory rate  +  kernels * overhead
    seconds of a stratum   its parts (operator_costs.py), a second forward pass under recompute, views and Python
                           (`PYTHON`), its collectives (collectives.py)
    seconds of a step      those of all strata of the slowest rank, collectives of the region and of parameters
    W concurrent strata    sum of kernels * overhead  +  until the last of W workers is done, each with 1 / W of the
                           device: Python runs in one thread at a time; with 3 strata, one of 2 workers runs 2

Operators run one after the other, each limited by its products or by its memory traffic, so the two times are added:
the roofline applies per operator. Under strata parallelism `deal` assigns the strata of a rank; in a chained decoder
the rank also passes over the strata before, forward and backward.

Known limits of this part: no optimiser; collectives do not overlap with computation; the rank that has most of
everything stands for all. Rates come from `device_rates.py`; comparing plans does not require calibrated rates.

Encoders, graph, other decoders, optimiser and Lightning's loop:

    activations   `PASSES` times the bytes that are alive outside of the strata
    update        weights, gradients and optimiser state, read and written
    the rest      `KERNELS` operators with the Python between them, whatever the sizes
    data axis     the gradients of all parameters outside of the decoder, averaged

This part is predicted for the reference model only. On one core of a shared machine, with five sizes of data, the
complete step took 0.8 to 1.9 times the prediction.

Known limits: S2 and nodes, which shard some of this part, count like any other plan; data loading is not counted.
Legend: planning/sizes.py; B cells of a rank.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import heapreplace
from itertools import pairwise
from typing import Any

from lightning_amp.costs.device_rates import CPU_CORE, Rates, collective_seconds
from lightning_amp.costs.model_shape import DecoderShape, ModelShape
from lightning_amp.costs.ordered_runs import deal
from lightning_amp.costs.rule import Rule
from lightning_amp.errors import PlanError
from lightning_amp.planning.plan.mesh_shape import MeshShape
from lightning_amp.planning.plan.plan import Axes
from lightning_amp.planning.sizes import RankSizes, Strata, Term, strata_of
from lightning_amp.planning.time.collectives import Collective, gradient_numbers, region_traffic, stratum_traffic
from lightning_amp.planning.time.operator_costs import PARTS, Part, spine, there_and_back
from lightning_amp.techniques.hic.rows import AGAIN, STREAMED, FusedAttention, StrataParallel, StreamStrata

PYTHON = {AGAIN: 160, STREAMED: 95, "fused": 45, "sdpa": 75, "sparse": 40}
"""Time of views and Python code that a choice adds to a stratum, in kernels that take as long.

Fitted on a CPU. On an accelerator nothing is added: fused attention and the sparse likelihood have fewer counted
operators than the code that they replace.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedSizes(RankSizes):
    """Sizes of one stratum on a rank, and the rates of its device."""

    rates: Rates = CPU_CORE


def stratum_seconds(
    decoder: DecoderShape, axes: Axes, *, cells: int, ranks: int = 1, rates: Rates = CPU_CORE, element_bytes: int = 4
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Predict the seconds of every stratum, which strata parallelism balances; arguments as in `step_seconds`.

    Returns:
        Seconds of each stratum's forward and backward pass, and seconds to pass over it in a chained decoder.
    """
    strata = _strata(decoder, axes, ranks, cells, rates, element_bytes)
    computing = zip(*(strata.column(term, axes) for term in COMPUTING), strict=True)
    costs = (sum(row) + sent for row, sent in zip(computing, strata.column(SENDING, axes), strict=True))
    return tuple(costs), tuple(strata.column(PASSING, axes))


def step_seconds(
    decoder: DecoderShape, axes: Axes, mesh: MeshShape, *, cells: int, rates: Rates = CPU_CORE, element_bytes: int = 4
) -> float:
    """Predict the seconds of a training step of the decoder on the slowest rank.

    Args:
        mesh: Ranks per axis.
        element_bytes: Bytes per number.
    """
    costs, passing = stratum_seconds(
        decoder, axes, cells=cells, ranks=mesh.model, rates=rates, element_bytes=element_bytes
    )
    workers = RankSizes(decoder=decoder, axes=axes, k=0, cells=cells, ranks=mesh.model).side_by_side
    alone: tuple[float, ...] = ()
    if workers > 1:
        # seconds of each stratum that strata cannot spend at the same time
        columns = _strata(decoder, axes, mesh.model, cells, rates, element_bytes)
        alone = tuple(map(sum, zip(*(columns.column(term, axes) for term in OVERHEADS), strict=True)))
    elapsed = partial(_elapsed, costs, workers, alone)
    if axes.placement == "strata":
        runs = pairwise((0, *deal(costs, mesh.model, passing=passing)))
        # a rank of a chained decoder computes the spine of all previous strata, but not their branches
        strata = max(elapsed(slice(start, end)) + sum(passing[:start]) for start, end in runs)
    else:
        strata = elapsed(slice(None))
    region = region_traffic(decoder, axes, cells=cells, ranks=mesh.model)
    return (
        strata
        + sum(c.seconds(mesh.model, rates.links, element_bytes=element_bytes) for c in region)
        + _gradient_seconds(decoder, axes, mesh, rates=rates, element_bytes=element_bytes)
    )


def _strata(
    decoder: DecoderShape, axes: Axes, ranks: int, cells: int, rates: Rates, element: int
) -> Strata[TimedSizes]:
    return strata_of(TimedSizes, decoder, axes, ranks=ranks, cells=cells, element=element, rates=rates)


def _elapsed(costs: Sequence[float], workers: int, alone: Sequence[float], own: slice) -> float:
    """Return the seconds of a rank's strata, given the seconds of each alone."""
    if workers == 1:
        return sum(costs[own])
    free = [0.0] * workers
    for cost, one_at_a_time in zip(costs[own], alone[own], strict=True):
        # the worker that is free first takes the next stratum; at 1 / W of the device's rate its computation takes W
        # times as long; overhead between operators is serial, and added below
        heapreplace(free, free[0] + workers * (cost - one_at_a_time))
    return max(free) + sum(alone[own])


def _seconds(name: str, part: Part, s: TimedSizes, *, forwards: int = 1) -> float:
    done, rates = there_and_back(part, forwards=forwards), s.rates
    share = 1.0
    if name == "attention":
        kernel = s.decoder.full or s.axes.attention == "sdpa"
        share = rates.sdpa_share if kernel else rates.attention_share
    products = done.flops / (share * rates.matmul_flops)
    return products + s.element * done.numbers / rates.memory_bytes + done.kernels * rates.overhead_seconds


def _overhead_seconds(name: str, s: TimedSizes) -> float:
    return there_and_back(PARTS[name].count(s), forwards=1 + s.recomputed).kernels * s.rates.overhead_seconds


def _python_seconds(s: TimedSizes) -> float:
    leaves = 0
    if not s.launched:
        leaves = s.attends * PYTHON.get(s.axes.attention, 0) + PYTHON.get(s.axes.likelihood, 0)
    kernels = PYTHON.get(s.axes.activations, 0) + (1 + s.recomputed) * leaves
    return kernels * s.rates.overhead_seconds


IN_PYTHON: Term[TimedSizes, float] = Term(_python_seconds, "activations", "attention", "likelihood", of_features=False)


def _of_parts(count: Callable[[str, TimedSizes], float]) -> Iterator[Term[TimedSizes, float]]:
    for name, term in PARTS.items():
        # activations decide whether the forward pass runs twice
        reads = dict.fromkeys((*term.reads, "activations"))
        yield Term(partial(count, name), *reads, of_features=term.of_features)


COMPUTING = (*_of_parts(lambda name, s: _seconds(name, PARTS[name].count(s), s, forwards=1 + s.recomputed)), IN_PYTHON)
OVERHEADS = (*_of_parts(_overhead_seconds), IN_PYTHON)
"""Overhead between operators of the same parts, which Python runs in one thread at a time."""
PASSING: Term[TimedSizes, float] = Term(lambda s: _seconds("spine", spine(s), s), "placement", of_features=False)
"""Seconds in which a rank passes over a stratum without its branch, forward and backward."""
SENDING: Term[TimedSizes, float] = Term(
    lambda s: sum(c.seconds(s.ranks, s.rates.links, element_bytes=s.element) for c in stratum_traffic(s)),
    "placement",
    "features",
    "attention",
    "activations",
)


def _gradient_seconds(decoder: DecoderShape, axes: Axes, mesh: MeshShape, *, rates: Rates, element_bytes: int) -> float:
    partial, whole = gradient_numbers(decoder, axes)
    # partial gradients are summed over all ranks, in a group with nothing nested in it; full ones over the data axis
    # alone, whose neighbouring ranks are as far apart as the model axis is long
    groups = ((partial, mesh.ranks, 1), (whole, mesh.data, mesh.model))
    return sum(
        Collective(kind="all_reduce", numbers=numbers).seconds(
            ranks, rates.links, element_bytes=element_bytes, inner=inner
        )
        for numbers, ranks, inner in groups
        if numbers
    )


PASSES = 8
KERNELS = 3000


def on_device(shape: ModelShape, rates: Rates) -> ModelShape:
    """Return the shape on the device with these rates, which sets options that bytes and kernels depend on.

    Every plan uses such a shape, so that memory and time are those of the same device.
    """
    threads = 1 if rates.launches else shape.decoder.threads
    return replace(shape, decoder=replace(shape.decoder, launched=rates.launches, threads=threads))


def decoder_seconds(shape: ModelShape, axes: Axes, mesh: MeshShape, rates: Rates) -> float:
    """Predict the decoder's part of a step in seconds, as `step_seconds`."""
    assert shape.decoder.launched == rates.launches, "the shape is that on the device of the rates: on_device"
    return step_seconds(
        shape.decoder, axes, mesh, cells=shape.batch_size, rates=rates, element_bytes=shape.element_bytes
    )


def predicted_times(shape: ModelShape, axes: Axes, mesh: MeshShape, rates: Rates) -> dict[str, Any]:
    """Return a plan's fields on the time of a step; without strata the time of the decoder is None."""
    seconds = decoder_seconds(shape, axes, mesh, rates)
    return {
        "predicted_step_seconds": seconds or None,
        "predicted_rest_seconds": rest_seconds(shape, mesh, rates),
        "rates_device": rates.device if seconds else "",
    }


def rest_seconds(shape: ModelShape, mesh: MeshShape, rates: Rates) -> float | None:
    """Predict the seconds of a step outside of the decoder; None unless the model is the reference model."""
    if not (shape.wide_layers and shape.base_activation_bytes):
        return None
    alive = shape.base_activation_bytes + shape.other_decoder_bytes + shape.edge_bytes
    update = (6 + 4 * shape.optimizer_slots) * shape.parameter_bytes
    # forward, and backward for the weights only: the input needs no gradient
    flops = 4 * shape.batch_size * shape.wide_weight_bytes / shape.element_bytes
    outside = shape.parameter_bytes - shape.element_bytes * sum(gradient_numbers(shape.decoder, Axes()))
    return (
        (PASSES * alive + update) / rates.memory_bytes
        + flops / rates.matmul_flops
        + KERNELS * rates.overhead_seconds
        + collective_seconds("all_reduce", max(0, outside), mesh.data, rates.links, inner=mesh.model)
    )


def settle(rule: Rule, shape: ModelShape, axes: Axes, mesh: MeshShape) -> Rule:
    """Fill in the options of a rule's spec that depend on the mesh; other specs, and ends that are set, are kept."""
    spec, sizes = rule.spec, RankSizes(decoder=shape.decoder, axes=axes, k=0, cells=shape.batch_size, ranks=mesh.model)
    match spec:
        case StrataParallel(ends=""):
            spec = replace(spec, ends=",".join(map(str, strata_ends(shape, axes, ranks=mesh.model))))
        case FusedAttention():
            spec = replace(spec, keep=sizes.keeps_weights)
        case StreamStrata():
            spec = replace(spec, workers=sizes.side_by_side)
    return rule if spec is rule.spec else replace(rule, spec=spec)


def strata_ends(shape: ModelShape, axes: Axes, *, ranks: int, speeds: tuple[float, ...] = ()) -> tuple[int, ...]:
    """Return the end of each model-axis rank's range of strata, balanced by predicted time and by the ranks' speeds.

    Raises:
        PlanError: More ranks than strata.
    """
    strata = len(shape.decoder.distances)
    if ranks > strata:
        raise PlanError(
            f"strata got {ranks!r} ranks on the model axis, and {strata!r} strata can be split over"
            f" {strata!r} ranks at most; choose a smaller model_parallel_size, or leave 'strata' out"
        )
    costs, passing = stratum_seconds(shape.decoder, axes, cells=shape.batch_size, ranks=ranks)
    return deal(costs, ranks, speeds, passing)
