"""Predict the seconds of a model's step, and fill in settings of techniques that depend on the mesh.

    seconds of a part      flops / matmul rate  +  bytes / memory rate  +  kernels * overhead
    seconds of a stratum   its parts (operator_costs.py), a second forward pass under recompute, views and Python
                           (`PYTHON`), its collectives (collectives.py)
    seconds of a step      those of all strata that the slowest rank has, the region's and the parameters' collectives
    W strata side by side  sum of kernels * overhead  +  until the last of W workers is done, each with a W-th of the
                           device: Python runs in one thread at a time, and of 3 strata a worker of two has 2

Operators run one after the other, each limited by its products or by the memory that it passes, so that the two times
add up: the roofline is taken operator by operator. Under strata parallelism a rank's strata are those that
`deal` gives it; in a chained decoder it also passes the strata before, there and back.

Known limits: the decoder only, without optimiser; collectives do not overlap with computation; the rank with most of
everything stands for all. The rates come from `device_rates.py`; comparisons between plans need no calibrated ones.
Legend: planning/sizes.py.

Predict the seconds of a model's step: in its decoder, and outside of it.

Outside are encoders, graph, other decoders, optimiser and Lightning's own loop:

    activations   `PASSES` times the bytes that are alive outside of the strata
    update        weights, gradients and optimiser state, read and written
    the rest      `KERNELS` operators with the Python between them, whatever the sizes
    data axis     the gradients of all parameters outside of the decoder, averaged

Known of the reference model only: what other models have outside of their decoder is not counted. Measured on one
core of a shared machine with five sizes of data, the whole step took 0.8 to 1.9 times what is predicted so.

Known limits: S2 and nodes, which split some of it, count like any other plan; loading of data is not counted.
Legend: B cells of a rank.
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
from lightning_amp.costs.rule import Spec
from lightning_amp.errors import PlanError
from lightning_amp.planning.plan.plan import Axes, MeshShape
from lightning_amp.planning.sizes import RankSizes, Strata, Term, strata_of
from lightning_amp.planning.time.collectives import Collective, gradient_numbers, region_traffic, stratum_traffic
from lightning_amp.planning.time.operator_costs import PARTS, Part, spine, there_and_back
from lightning_amp.techniques.hic.rows import AGAIN, STREAMED, FusedAttention, StrataParallel, StreamStrata
from lightning_amp.techniques.table import STRATEGIES

PYTHON = {AGAIN: 160, STREAMED: 95, "fused": 45, "sdpa": 75, "sparse": 40}
"""What a choice adds to a stratum besides its kernels, in kernels that take as long: views, and Python code.

Fitted on a CPU. Where kernels are launched, operators of fused attention and of the sparse likelihood were counted to
be fewer than those of what they replace, and nothing is added for them.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedSizes(RankSizes):
    """One stratum on a rank whose device reaches `rates`."""

    rates: Rates = CPU_CORE


def stratum_seconds(
    decoder: DecoderShape, axes: Axes, *, cells: int, ranks: int = 1, rates: Rates = CPU_CORE, element_bytes: int = 4
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds of every stratum, which strata parallelism balances; arguments as those of `step_seconds`.

    Returns:
        Of its forward and backward pass, and those that a rank needs to pass it, there and back, on the way to its own.
    """
    strata = _strata(decoder, axes, ranks, cells, rates, element_bytes)
    computing = zip(*(strata.column(term, axes) for term in COMPUTING), strict=True)
    costs = (sum(row) + sent for row, sent in zip(computing, strata.column(SENDING, axes), strict=True))
    return tuple(costs), tuple(strata.column(PASSING, axes))


def step_seconds(
    decoder: DecoderShape, axes: Axes, mesh: MeshShape, *, cells: int, rates: Rates = CPU_CORE, element_bytes: int = 4
) -> float:
    """Seconds of a training step of the decoder on the slowest rank.

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
        # of every stratum the seconds that only one of them can have
        columns = _strata(decoder, axes, mesh.model, cells, rates, element_bytes)
        alone = tuple(map(sum, zip(*(columns.column(term, axes) for term in OVERHEADS), strict=True)))
    elapsed = partial(_elapsed, costs, workers, alone)
    if axes.placement == "strata":
        runs = pairwise((0, *deal(costs, mesh.model, passing=passing)))
        # a rank of a chained decoder computes the spine of all strata before its own, but not their branches
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
    """Seconds of a run of strata on a rank, given those of each by itself."""
    if workers == 1:
        return sum(costs[own])
    free = [0.0] * workers
    for cost, one_at_a_time in zip(costs[own], alone[own], strict=True):
        # whoever is free first takes the next one, with its share of the device: a W-th of its rate, so that what it
        # computes takes W times as long; what passes between operators is not shared, and is added up below
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
        # activations say whether the forward pass is run twice
        reads = dict.fromkeys((*term.reads, "activations"))
        yield Term(partial(count, name), *reads, of_features=term.of_features)


COMPUTING = (*_of_parts(lambda name, s: _seconds(name, PARTS[name].count(s), s, forwards=1 + s.recomputed)), IN_PYTHON)
OVERHEADS = (*_of_parts(_overhead_seconds), IN_PYTHON)
"""Of the same parts what passes between operators, which Python does in one thread at a time."""
PASSING: Term[TimedSizes, float] = Term(lambda s: _seconds("spine", spine(s), s), "placement", of_features=False)
"""What it takes a rank to pass a stratum without its branch, there and back."""
SENDING: Term[TimedSizes, float] = Term(
    lambda s: sum(c.seconds(s.ranks, s.rates.links, element_bytes=s.element) for c in stratum_traffic(s)),
    "placement",
    "features",
    "attention",
    "activations",
)


def _gradient_seconds(decoder: DecoderShape, axes: Axes, mesh: MeshShape, *, rates: Rates, element_bytes: int) -> float:
    partial, whole = gradient_numbers(decoder, axes)
    # parts are summed over all ranks at once, a group with nothing nested in it; whole ones over the data axis alone,
    # whose neighbours are as many ranks apart as the model axis has
    groups = ((partial, mesh.data * mesh.model, 1), (whole, mesh.data, mesh.model))
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
    """The model on the device whose rates are taken, whose settings its bytes and its kernels follow from.

    Every plan is made of such a shape, so that memory and time are those of one device.
    """
    threads = 1 if rates.launches else shape.decoder.threads
    return replace(shape, decoder=replace(shape.decoder, launched=rates.launches, threads=threads))


def decoder_seconds(shape: ModelShape, axes: Axes, mesh: MeshShape, rates: Rates) -> float:
    """Predicted time of the decoder's part of a step; as `step_seconds`."""
    assert shape.decoder.launched == rates.launches, "the shape is that on the device of the rates: on_device"
    return step_seconds(
        shape.decoder, axes, mesh, cells=shape.batch_size, rates=rates, element_bytes=shape.element_bytes
    )


def predicted_times(shape: ModelShape, axes: Axes, mesh: MeshShape, rates: Rates) -> dict[str, Any]:
    """What a plan says of the time of a step, by name of its fields; strata that there are none of take none."""
    seconds = decoder_seconds(shape, axes, mesh, rates)
    return {
        "predicted_step_seconds": seconds or None,
        "predicted_rest_seconds": rest_seconds(shape, mesh, rates),
        "rates_device": rates.device if seconds else "",
    }


def rest_seconds(shape: ModelShape, mesh: MeshShape, rates: Rates) -> float | None:
    """Predicted time of a step outside of the decoder; None where that is not the reference model's."""
    if not (shape.wide_layers and shape.base_activation_bytes):
        return None
    alive = shape.base_activation_bytes + shape.other_decoder_bytes + shape.edge_bytes
    update = (6 + 4 * shape.optimizer_slots) * shape.parameter_bytes
    # forward, and backward to the weights only: nothing asks for the input's gradient
    flops = 4 * shape.batch_size * shape.wide_weight_bytes / shape.element_bytes
    outside = shape.parameter_bytes - shape.element_bytes * sum(gradient_numbers(shape.decoder, Axes()))
    return (
        (PASSES * alive + update) / rates.memory_bytes
        + flops / rates.matmul_flops
        + KERNELS * rates.overhead_seconds
        + collective_seconds("all_reduce", max(0, outside), mesh.data, rates.links, inner=mesh.model)
    )


def settle(strategy: str, spec: Spec, shape: ModelShape, axes: Axes, mesh: MeshShape) -> Spec:
    """The spec with the settings that are decided here; one that has none, or ends that are set, as it is."""
    match spec:
        case StrataParallel(ends=""):
            return replace(spec, ends=",".join(map(str, strata_ends(shape, axes, ranks=mesh.model))))
        case FusedAttention() | StreamStrata():
            sizes = RankSizes(decoder=shape.decoder, axes=axes, k=0, cells=shape.batch_size, ranks=mesh.model)
            if isinstance(spec, FusedAttention):
                return replace(spec, keep=sizes.keeps_weights)
            return replace(spec, workers=sizes.side_by_side)
    own = STRATEGIES[strategy].settle
    return spec if own is None else own(spec, shape, mesh.model)


def strata_ends(shape: ModelShape, axes: Axes, *, ranks: int, speeds: tuple[float, ...] = ()) -> tuple[int, ...]:
    """One past the last stratum of every rank of the model axis, balanced by the modelled time of the strata, and by
    the speeds of the ranks where these are not equal.

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
