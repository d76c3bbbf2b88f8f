"""Plan a module's step as a pipeline: the cut of its blocks into stages, the number of micro-batches, time and memory.

    1. Seconds of every segment, forward and backward, for micro-batch and batch (footprint/chain/passes.py).
    2. The cut of least rho_1 + rho_2, or with different links that of least Eq. 8 (schedule/cut.py), under a cap of
       bytes per stage, which depends on how many micro-batches are in flight there. Embedding, head and loss are part
       of the first and the last block.
    3. Seconds by the schedule's timeline, with its bubbles, and of the optimiser; peak of each rank by a simulation of
       its passes (schedule/stage_bytes.py). If a peak exceeds the budget, the cap is lowered, and the cut repeated.
    4. If the budget is still exceeded: as few recomputed blocks as are needed (stage_forms.py).
    5. The fastest number of micro-batches that fits; if none fits, the one with the least peak. The candidates are one,
       two and four per rank, and the fastest of all numbers by Eq. 8 of Zhou et al. 2025 (CSIMD), each with its exact
       cut (schedule/micro_batches.py).

With "gpipe" what follows the blocks runs once, for the full batch. With other schedules it runs for every micro-batch,
and once more without gradients for the full batch.

Known limits: operators are assumed to run one after the other at the device's rates. The time in which a rank passes
the blocks of other ranks (placeholders) is not counted. Caps ignore temporaries of passes; the peak includes them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from math import inf

from lightning_amp.costs.device_rates import collective_seconds
from lightning_amp.costs.ordered_runs import speeds_of_model
from lightning_amp.costs.profiled_step import Draft, ProfiledStep, Stage
from lightning_amp.costs.rule import Rule, Spec
from lightning_amp.errors import PlanError
from lightning_amp.footprint.chain.passes import Passes
from lightning_amp.quantities import format_bytes, format_seconds
from lightning_amp.techniques.pipeline.row import PipelineStages
from lightning_amp.techniques.pipeline.schedule.cut import cut_pipeline, filled
from lightning_amp.techniques.pipeline.schedule.micro_batches import (
    LayerSeconds,
    LayerTimes,
    counts_for,
    crossing_nodes,
    fastest_of,
)
from lightning_amp.techniques.pipeline.schedule.schedules import Order, fills_rounds, schedule, timeline
from lightning_amp.techniques.pipeline.schedule.stage_bytes import Pipeline, held_bytes, layer_bytes, rank_peaks
from lightning_amp.techniques.pipeline.stage_facts import stages_of
from lightning_amp.techniques.pipeline.stage_forms import computed_again, fewest_again, repeatable, targets_again
from lightning_amp.techniques.pipeline.stages_on_host import away, chosen, targets_on_host
from lightning_amp.techniques.stage_search import StageOptions

SAFE = "gpipe"
"""Schedule that policies use: the loss may be any function of the batch. Others require that the loss is a mean."""
PER_RANK = (1, 2, 4)
"""Micro-batches per rank that are always tried: the fastest number may not fit."""
CAPS = 12
"""Most caps that are tried for one cut."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Shape:
    """Settings of a pipeline that are fixed before its cut."""

    seen: ProfiledStep
    whole: Passes
    ranks: int
    data: int
    schedule: str
    micro_batches: int
    budget: int | None
    speeds: tuple[float, ...] = ()
    more: tuple[int, ...] = ()
    compared: Mapping[int, float] = field(default_factory=dict)

    @property
    def of_stages(self) -> tuple[float, ...] | None:
        """Speed of every stage's rank; None if all are equal."""
        return self.speeds * self.each or None

    @property
    def unlike(self) -> tuple[float, ...]:
        """Speeds of the ranks, if ranks differ in speed or in memory; else empty."""
        return self.speeds or (1.0,) * (self.ranks if any(self.more) else 0)

    @property
    def budgets(self) -> tuple[int, ...]:
        """Budget of every rank; requires a budget."""
        assert self.budget is not None, "there is one"
        return tuple(self.budget + more for more in self.more)

    @property
    def at_once(self) -> bool:
        """Whether what follows the blocks runs once, for the full batch."""
        return self.schedule == "gpipe" and self.micro_batches > 1

    @property
    def each(self) -> int:
        """Stages per rank."""
        return 2 if self.schedule == "interleaved" else 1

    @property
    def orders(self) -> tuple[Order, ...]:
        """Order of passes of every rank."""
        return schedule(self.schedule, self.ranks, self.micro_batches, stages_per_device=self.each)

    @property
    def crossing(self) -> tuple[bool, ...]:
        """For every stage, whether it sends to another node."""
        return crossing_nodes(self.seen.rates.links, self.ranks, self.data) * self.each

    def pipeline(self, part: Passes, ends: tuple[int, ...]) -> Pipeline:
        """The pipeline with a micro-batch's passes, cut at these ends."""
        whole = self.whole
        if self.micro_batches * self.each == 1:
            part, whole = part.called_once(), whole.called_once()
        return Pipeline(part=part, whole=whole, ends=ends, orders=self.orders, at_once=self.at_once)

    def seconds(self, part: Passes) -> LayerSeconds:
        """Seconds of a micro-batch's blocks."""
        return LayerSeconds.of(
            part,
            self.whole,
            links=self.seen.rates.links,
            crossing=self.crossing,
            micro_batches=self.micro_batches,
            at_once=self.at_once,
        )


def best_pipeline(seen: ProfiledStep, *, ranks: int, budget: int | None, options: StageOptions) -> Draft | str:
    """Return the fastest pipeline that fits, over all lengths of the model axis, or why there is none.

    Args:
        seen: The profiled step.
        ranks: Number of all ranks; lengths of the model axis are its divisors.
        budget: Bytes of one device; None if unknown.
        options: Options that are decided already.
    """
    lengths = [n for n in range(2, ranks + 1) if ranks % n == 0 and options.model in (None, n)]
    if not lengths:
        there = f"of the {ranks} there are" if options.model is None else f"and model_parallel_size={options.model!r}"
        return f"it needs two ranks or more, {there}"
    found = [staged(seen, n, data=ranks // n, budget=budget, options=options) for n in lengths]
    made = [one for one in found if isinstance(one, Draft)]
    return _best(made, budget) if made else next(one for one in found if isinstance(one, str))


def uncut(seen: ProfiledStep, options: StageOptions) -> str:
    """Return why the batch cannot be cut into the micro-batches that were asked for; "" if it can."""
    whole = stages_of(seen).whole()
    if isinstance(whole, str) or not whole.draws or (options.micro_batches or 1) == 1:
        return ""
    return f"{whole.draws}, and every micro-batch would draw others: set micro_batches=1"


def staged(seen: ProfiledStep, model: int, *, data: int, budget: int | None, options: StageOptions) -> Draft | str:
    """Return the step as a pipeline with `model` ranks on the model axis, or why there is none."""
    known = stages_of(seen)
    whole = known.whole()
    if isinstance(whole, str) or known.passes is None:
        return str(whole)
    name = options.schedule or SAFE
    first = _Shape(
        seen=seen,
        whole=whole,
        ranks=model,
        data=data,
        schedule=name,
        micro_batches=1,
        budget=budget,
        speeds=speeds_of_model(options.speeds, model),
        more=options.more_bytes(model),
    )
    blocks, stages = len(whole.names), model * first.each
    if stages > blocks:
        return f"there are {blocks} blocks for {stages} stages"
    if why := uncut(seen, options):
        return why
    each = 1 if whole.draws else options.micro_batches
    counts = sorted({min(whole.rows, each or n * model) for n in PER_RANK})
    counts = [count for count in counts if fills_rounds(name, model, count)]
    if counts and each is None and budget != 0:
        found = _fastest(first, -(-whole.rows // counts[-1]))
        counts, first = sorted({*counts, *found}), replace(first, compared=found)
    shapes = [replace(first, micro_batches=count) for count in counts]
    if not shapes:
        return f"{counts!r} micro-batches do not fill the rounds of an interleaved schedule on {model} ranks"
    made = list[Draft]()
    # the smallest micro-batch first: other sizes are interpolated between it and the full batch
    shapes.reverse()
    for shape in shapes:
        part = known.passes(-(-whole.rows // shape.micro_batches))
        if isinstance(part, str):
            return part
        if options.again and not repeatable(seen, part, options.again):
            return "no block of those chosen for recomputation can run a second time"
        made += _drafts(shape, part, options)
    return _best(made, budget)


def _fastest(shape: _Shape, rows: int) -> dict[int, float]:
    """Seconds of a step by Eq. 8, by number of micro-batches: the fastest number, one, and one per rank; {} if unknown.

    A micro-batch of `rows` rows is counted; other sizes are interpolated between it and the full batch.
    """
    passes = stages_of(shape.seen).passes
    whole, counted = shape.whole, passes(rows) if passes else ""
    if isinstance(counted, str) or counted.rows == whole.rows or shape.each > 1:
        # Eq. 8 does not hold for several stages per rank
        return {}
    counts = counts_for(whole.rows, [shape.ranks])
    parts = {count: whole.at(counted, -(-whole.rows // count)) for count in counts}
    if None in parts.values():
        return {}
    layers = {n: replace(shape, micro_batches=n).seconds(part) for n, part in parts.items() if part}
    others = 1, min(shape.ranks, whole.rows)
    return fastest_of(LayerTimes.of(layers), shape.ranks, shape.of_stages, others)


def _best(made: Sequence[Draft], budget: int | None) -> Draft:
    fitting = [one for one in made if budget is None or one.peak_bytes <= budget]
    least_bytes = min(made, key=lambda one: (one.peak_bytes, one.pace))
    return min(fitting, key=lambda one: (one.pace, one.peak_bytes), default=least_bytes)


def _drafts(shape: _Shape, part: Passes, options: StageOptions) -> Iterator[Draft]:
    """Yield drafts with the requested recomputed blocks; if left open, with none, and with as few as are needed."""
    again = repeatable(shape.seen, part, ("*",) if options.again is None else options.again)
    if options.again is not None:
        yield _draft(shape, part, ends=options.ends, again=again, host=options.host)
        return
    yield _draft(shape, part, ends=options.ends)
    if shape.budget is None or not again:
        return
    for ends in _likely_ends(shape, part, computed_again(part, again), options):
        blocks = fewest_again(shape.pipeline(part, ends), again, shape.budgets)
        if blocks:
            yield _draft(shape, part, ends=ends, again=blocks)


def _likely_ends(shape: _Shape, part: Passes, least: Passes, options: StageOptions) -> list[tuple[int, ...]]:
    """Return the requested ends; else those of the fastest cut, and of the fastest that fits with the least bytes."""
    if options.ends is not None:
        return [options.ends]
    # forms are chosen after the cut: the fastest cut may need many of them, one that fits in its least form few
    fastest = _cut(replace(shape, budget=None), part, shape.seconds(part))
    return sorted({fastest, _cut(shape, least, shape.seconds(least))})


def _draft(
    shape: _Shape, plain: Passes, *, ends: tuple[int, ...] | None, again: tuple[int, ...] = (), host: Spec | None = None
) -> Draft:
    """Cut the blocks if `ends` is None, and predict seconds and peaks."""
    part = computed_again(plain, again)
    waits = None if host is None else chosen(shape.seen, host, part)
    if waits is not None:
        part, whole = (away(shape.seen, waits, passes) for passes in (part, shape.whole))
        shape = replace(shape, whole=whole)
    layers = shape.seconds(part)
    if ends is None:
        ends = _cut(shape, part, layers)
    # On different devices, the peak that counts is that of the rank with the least room left, expressed as if all
    # ranks had the smallest device.
    pipeline = shape.pipeline(part, ends)
    peaks = rank_peaks(pipeline)
    peak, more = max((peak - more, more) for peak, more in zip(peaks, shape.more, strict=True))
    made = layers.stages(ends, shape.of_stages, shape.ranks)
    line = timeline(shape.orders, made)
    seconds = line.seconds + layers.silent + _after(shape, pipeline)
    idle = [min(1.0, max(0.0, share)) for share in line.idle]
    stages = tuple(replace(one, peak_bytes=peaks[one.rank], idle=idle[one.rank]) for one in made)
    return Draft(
        ranks=shape.data,
        model=shape.ranks,
        peak_bytes=peak,
        more_bytes=more,
        seconds=seconds,
        targets=(
            _target(shape, ends, stages),
            *targets_again(plain, again),
            *targets_on_host(shape.seen, pipeline, waits),
        ),
        stages=stages,
        held_bytes=max(held_bytes(pipeline, rank, gradients=True) for rank in range(shape.ranks)),
    )


def _target(shape: _Shape, ends: tuple[int, ...], stages: Sequence[Stage]) -> Rule:
    fqn, blocks = shape.whole.names[0].rpartition(".")[0], len(shape.whole.names)
    beside = [p.name for p in shape.whole.parameters if p.block is None and blocks in p.segments]
    spec = PipelineStages(
        ends=",".join(map(str, ends)),
        schedule=shape.schedule,
        micro_batches=shape.micro_batches,
        stages_per_rank=shape.each,
        read_after=",".join(name.removeprefix(f"{fqn}.") for name in beside if name.startswith(f"{fqn}.")),
    )
    bubble = sum(stage.idle for stage in stages) / len(stages)
    peak = max(stage.peak_bytes for stage in stages)
    why = (
        f"{len(shape.whole.names)} blocks in {len(ends)} stages on {shape.ranks} ranks, {shape.micro_batches}"
        f" micro-batches by {shape.schedule}: a rank waits {100 * bubble:.0f} % of the time, and needs"
        f" {format_bytes(peak)} at most"
    )
    far = [str(n) for n, crosses in enumerate(shape.crossing[:-1]) if crosses]
    if far and not all(shape.crossing):
        why += f"; stage {' and '.join(far)} sends to another node"
    if shape.compared:
        (fastest, _), *others = shape.compared.items()
        other = ", ".join(f"{count}: {format_seconds(seconds)}" for count, seconds in others)
        why += f"; of 1 to {shape.whole.rows} micro-batches {fastest} are the fastest ({other})"
    saved = max(0, shape.seen.profile.peak_bytes - peak)
    return Rule(strategy="pipeline", fqn=fqn, spec=spec, why=why, saves_bytes=saved)


def _after(shape: _Shape, pipeline: Pipeline) -> float:
    """Seconds after the passes: average the fullest rank's gradients over the data axis, and step."""
    whole, links = shape.whole, shape.seen.rates.links
    held = [held_bytes(pipeline, rank, gradients=False) for rank in range(shape.ranks)]
    every = sum(p.n_bytes + p.state_bytes for p in whole.parameters)
    fullest = max(held) / max(1, every)
    gradients = fullest * sum(p.gradient_bytes for p in whole.parameters)
    averaged = collective_seconds("all_reduce", gradients, shape.data, links, inner=shape.ranks)
    return averaged + fullest * float(whole.seconds[whole.optimises].sum())


def _cut(shape: _Shape, part: Passes, layers: LayerSeconds) -> tuple[int, ...]:
    """Return the cut of least rho_1 + rho_2 whose peak is within the budget, or the cut with the least excess found."""
    stages = shape.ranks * shape.each
    cut = partial(
        cut_pipeline,
        layers.forward,
        layers.backward,
        stages,
        send_forward=layers.send_forward,
        send_backward=layers.send_backward,
        speeds=shape.of_stages,
        micro_batches=shape.micro_batches,
    )
    seconds = layers.forward + layers.backward
    found = filled(cut().ends, stages, seconds, shape.unlike)
    if shape.budget is None:
        return found
    rows = list(layer_bytes(part, shape.orders, stages, at_once=shape.at_once))
    best, least, ends = found, inf, found
    # caps ignore temporaries, which the simulated peak includes: the caps are lowered by the excess of the peak
    # until it fits, or no cut is possible
    for _ in range(CAPS):
        peaks = rank_peaks(shape.pipeline(part, ends))
        overs = [peak - own for peak, own in zip(peaks, shape.budgets, strict=True)]
        over, runs = max(overs), list(pairwise((0, *ends)))
        if over < least:
            best, least = ends, over
        if over <= 0:
            break
        has = [sum(rows[n][slice(*run)]) for n, run in enumerate(runs)]
        most = [max(has[rank :: shape.ranks]) for rank in range(shape.ranks)]
        # the cap must be below what the fullest rank's larger stage has now; others may come as close to the budget
        less = max(1.0, min(over, most[overs.index(over)] / 8))
        room = [max(0.0, n + over - less - own) for n, own in zip(most, overs, strict=True)]
        caps = [room[n % shape.ranks] for n in range(stages)]
        try:
            ends = filled(cut(layer_bytes=rows, stage_bytes=caps).ends, stages, seconds, shape.unlike)
        except PlanError:
            break
    return best
