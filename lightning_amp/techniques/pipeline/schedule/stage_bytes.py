"""Predict the peak bytes of every rank of a pipeline in its second training step, in the order of the schedule.

    always          parameters and optimiser state of the rank's blocks, and of what it reads outside blocks; buffers;
                    the full batch; gradients of the last step, where they are kept until this step has its loss
    forward pass    what it allocates, after what the rank computes before its blocks; received tensors, twice (the
                    leaf, and the copy that blocks may write into)
    in flight       what autograd keeps of the segments, what was received, the result of the last block
    backward pass   what is in flight minus what was read for the last time, temporaries, the received gradient;
                    gradients of parameters, from the second micro-batch on twice until they are added
    sent            results of a stage, in copies where they are not contiguous, until their gradients come; gradients
                    of what it received until those of the next micro-batch are sent
    last stage      results of all micro-batches, and their losses; under gpipe what follows the blocks, forward and
                    backward, for the full batch, and the gradients of its inputs; otherwise what follows them once
                    more without gradients
    tied            the first of the ranks that share a gradient receives those of the others
    draws           states of random generators: of the start (and, where a loss follows, the end) of the last
                    micro-batch, and one that is sent with every result

These are the tensors of techniques/pipeline/ and techniques/pipeline/steps/pipelined_steps.py.

Known limits: metrics are not included; all micro-batches count as the largest of them; a step that draws random numbers
after the blocks runs that part several times, one after the other.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from lightning_amp.footprint.chain.passes import Parameter, Passes
from lightning_amp.footprint.module_profile import bytes_alive
from lightning_amp.techniques.pipeline.schedule.schedules import Order, most_in_flight
from lightning_amp.techniques.pipeline.schedule.stage_window import StageWindow

DRAWS, PRINT = 10_100, 8
"""Bytes of the random state of torch, NumPy and Python, and of the digest that is sent with it for comparison."""
NUMBER = 8
"""Most bytes of a loss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StageBytes:
    """Bytes of one micro-batch in one stage.

    Attributes:
        forward: Peak bytes that its forward pass adds.
        kept: Bytes of these that are kept until the backward pass.
        first_backward: Peak bytes of the backward pass, with new gradients, instead of `kept`.
        backward: Peak bytes of the backward pass of a later micro-batch, in addition to existing gradients.
        result, received: Bytes of the last block's result, and of what the stage receives.
        sent: Bytes that are sent with the result, and of its copy if it is not contiguous.
        sent_back: Bytes of the gradients that it sends.
        stays: Bytes that the last stage keeps after the backward pass, of the result and of what the step returns.
        written: Bytes of copies of the batch that the step writes into.
        gradients: Bytes of the gradients of all parameters that it reads.
    """

    forward: int
    kept: int
    first_backward: int
    backward: int
    result: int
    received: int
    sent: int
    sent_back: int
    stays: int
    written: int
    gradients: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RestBytes:
    """Bytes of what follows the blocks, for the full batch: passes, inputs, what the step returns."""

    forward: int
    backward: int
    silent: int
    inputs: int
    returned: int
    gradients: int


def stage_bytes(
    passes: Passes, start: int, end: int, *, to_the_end: bool, alone: bool = False, rank: Collection[int] = ()
) -> StageBytes:
    """Compute the bytes of the blocks start <= i < end as a stage; with `to_the_end`, also of what follows all blocks.

    Args:
        passes: Passes of the micro-batch.
        start, end: First block, and one past the last.
        to_the_end: Whether what follows the blocks runs for every micro-batch.
        alone: Whether there is one micro-batch, of which everything that the step returns is kept.
        rank: Segments that the rank runs, if it has several stages.
    """
    window = window_of(passes, start, end, to_the_end=to_the_end, alone=alone, rank=rank)
    received, result = passes.sent_bytes[start - 1] if start else 0, passes.sent_bytes[end - 1]
    is_last = end == len(passes.names)
    number = loss_bytes(passes) if to_the_end and is_last else 0
    returned = returned_bytes(passes) if alone else number
    # a result may be a part of a larger tensor, which is kept whole
    stays = int(passes.n_bytes[list(passes.outputs[end - 1])].sum()) + returned if is_last else 0
    # a byte says which gradients are sent
    back = received + len(passes.outputs[start - 1]) if start else 0
    # the gradient that comes back from the next stage, or the loss, that times its weight, and its gradient, and the
    # received tensors
    in_backward = received + ((3 - alone) * number if is_last else result)
    first, later = window.backward()
    return StageBytes(
        forward=window.forward() + received,
        kept=window.kept() + received,
        first_backward=first + in_backward,
        backward=later + in_backward,
        result=result,
        received=received,
        sent=0 if is_last else DRAWS + PRINT + passes.strided_bytes[end - 1],
        sent_back=back,
        stays=stays,
        written=int(passes.n_bytes[list(passes.copies)].sum()) if passes.writes_batch else 0,
        gradients=sum(p.gradient_bytes for p in parameters_of(passes, start, end)),
    )


def loss_bytes(passes: Passes) -> int:
    """Bytes of a loss, whose storage may have those of all samples."""
    return min(NUMBER, *passes.n_bytes[list(passes.returned)].tolist()) if passes.returned else 0


def returned_bytes(passes: Passes) -> int:
    """Bytes of what the step returns."""
    return int(passes.n_bytes[list(passes.returned)].sum())


def window_of(
    passes: Passes, start: int, end: int, *, to_the_end: bool, alone: bool = False, rank: Collection[int] = ()
) -> StageWindow:
    """Return the lifetimes of storages in a stage, with the arguments of `stage_bytes`."""
    blocks = len(passes.names)
    assert 0 <= start < end <= blocks, f"a stage has blocks, got {start!r} to {end!r} of {blocks!r}"
    follows = to_the_end and end == blocks
    returned = [*passes.outputs[end - 1], *(passes.returned if follows and alone else ())]
    return StageWindow(passes, start, end + follows, returned=returned, rank=rank)


def rest_window(passes: Passes, *, rank: Collection[int] = ()) -> StageWindow:
    """Return the lifetimes of storages in what follows the blocks."""
    blocks = len(passes.names)
    return StageWindow(passes, blocks, blocks + 1, returned=list(passes.returned), rank=rank)


def rest_bytes(passes: Passes, *, rank: Collection[int] = ()) -> RestBytes:
    """Compute the bytes of what follows the blocks, for the full batch; `inputs` are the last block's results."""
    blocks, window = len(passes.names), rest_window(passes, rank=rank)
    return RestBytes(
        forward=window.forward(),
        backward=window.backward()[0] + loss_bytes(passes),
        silent=window.forward(silent=True),
        inputs=passes.sent_bytes[-1],
        returned=returned_bytes(passes),
        gradients=sum(p.gradient_bytes for p in passes.parameters if p.block is None and blocks in p.segments),
    )


def parameters_of(passes: Passes, start: int, end: int) -> list[Parameter]:
    """Parameters that a stage's rank holds: its blocks', others that it or no rank reads, others without gradient."""
    blocks = len(passes.names)
    own = {*range(start, end), *({blocks} if end == blocks else ())}
    return [
        p
        for p in passes.parameters
        if (p.block in own if p.block is not None else not (p.segments and p.gradient_bytes) or own & {*p.segments})
    ]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Pipeline:
    """A pipeline to predict: the schedule of all ranks, and the blocks of all stages.

    Attributes:
        part: Passes of the largest micro-batch.
        whole: Passes of the full batch.
        ends: One past the last block of every stage.
        orders: Order of every rank, from `schedule`.
        at_once: Whether what follows the blocks runs once, for the full batch, between the passes.
    """

    part: Passes
    whole: Passes
    ends: tuple[int, ...]
    orders: tuple[Order, ...]
    at_once: bool

    @property
    def alone(self) -> bool:
        """Whether there is one micro-batch, the batch itself."""
        return not any(step.micro_batch for order in self.orders for step in order)

    @property
    def runs(self) -> list[tuple[int, int]]:
        """First block, and one past the last, of every stage."""
        return list(pairwise((0, *self.ends)))

    def runs_of(self, rank: int) -> list[tuple[int, int]]:
        """The runs of blocks of a rank's stages."""
        return self.runs[rank :: len(self.orders)]


def rank_peaks(pipeline: Pipeline) -> tuple[int, ...]:
    """Peak bytes of every rank."""
    return tuple(rank_peak(pipeline, rank) for rank in range(len(pipeline.orders)))


def held_bytes(pipeline: Pipeline, rank: int, *, gradients: bool) -> int:
    """Bytes of the parameters and optimiser state that a rank holds, and of their gradients if requested."""
    found = {p.name: p for p in _held(pipeline, rank)}
    return sum(p.n_bytes + p.state_bytes + (p.gradient_bytes if gradients else 0) for p in found.values())


def segments_of(pipeline: Pipeline, rank: int) -> list[int]:
    """Return the segments that a rank runs."""
    ends_here = (len(pipeline.ends) - 1) % len(pipeline.orders) == rank
    blocks = [i for run in pipeline.runs_of(rank) for i in range(*run)]
    return [*blocks, *[len(pipeline.whole.names)] * ends_here]


def _held(pipeline: Pipeline, rank: int) -> list[Parameter]:
    own = [parameters_of(pipeline.whole, *run) for run in pipeline.runs_of(rank)]
    return list({p.name: p for some in own for p in some}.values())


def rank_peak(pipeline: Pipeline, rank: int) -> int:
    """Peak bytes of one rank."""
    walk = _StageWalk(pipeline, rank)
    for step in pipeline.orders[rank]:
        if step.backward:
            walk.backward(step.stage)
        else:
            walk.forward(step.stage)
    walk.after()
    return walk.most


class _StageWalk:
    """Walk through the passes of a rank, and track its current and peak bytes."""

    def __init__(self, pipeline: Pipeline, rank: int) -> None:
        self._pipeline, self._rank = pipeline, rank
        self._held = _held(pipeline, rank)
        whole = pipeline.whole
        # a gradient may be a view of a larger tensor, whose size depends on the micro-batch
        made = {p.name: p.gradient_bytes for p in pipeline.part.parameters}
        first = {p.name for p in self._held if pipeline.at_once and len(whole.names) in p.segments}
        self._gradients = sum(p.gradient_bytes if p.name in first else made[p.name] for p in self._held)
        self._last = len(pipeline.ends) - 1
        kept = sum(p.n_bytes + p.state_bytes for p in self._held)
        self._always = kept + whole.buffer_bytes + whole.batch_bytes
        self._always += 0 if whole.frees_gradients else self._gradients
        ends_here = self._last % len(pipeline.orders) == rank
        self._segments = segments_of(pipeline, rank)
        self._always += (2 if ends_here and not pipeline.at_once else 1) * DRAWS
        self._now = self.most = self._always
        self._begun: set[int] = set()
        self._came, self._sent_back = 0, dict[int, int]()
        self._stages = lru_cache(maxsize=None)(self._stage)
        self._rest_done = False

    def forward(self, stage: int) -> None:
        own = self._stages(stage)
        # a random state is received before the blocks run
        self._reach(max(own.forward, own.received + 2 * DRAWS + PRINT if stage else 0))
        self._now += own.kept + own.sent + own.written
        if stage < self._last:
            # what is sent is joined from two parts, before copies are made
            self._reach(max(0, DRAWS - self._pipeline.part.strided_bytes[self._pipeline.ends[stage] - 1]))

    def backward(self, stage: int) -> None:
        if stage == self._last and self._pipeline.at_once and not self._rest_done:
            self._rest()
        own = self._stages(stage)
        first = stage not in self._begun
        self._begun.add(stage)
        # the window of the backward pass starts with the kept bytes; what was sent has arrived
        self._now -= own.kept + own.sent
        # which backward passes begin with
        strided = self._pipeline.part.strided_bytes[-1] if stage == self._last and self._pipeline.at_once else 0
        self._reach((own.first_backward if first else own.backward) + strided)
        # gradients of a later micro-batch are added to these, and exist only until then (`own.backward`)
        if first:
            # gradients of what follows the blocks exist already
            came = min(self._gradients - self._came, own.gradients)
            self._came += came
            self._now += came
        # those of the micro-batch before are freed now
        self._reach(own.sent_back)
        self._now += own.sent_back - self._sent_back.get(stage, 0) + own.stays
        self._sent_back[stage] = own.sent_back

    def _rest(self) -> None:
        rest = rest_bytes(self._pipeline.whole, rank=self._segments)
        self._rest_done = True
        # with a random state to compare with
        self._reach(rest.forward + DRAWS)
        self._reach(rest.backward + DRAWS)
        self._came += rest.gradients
        # the gradients of its inputs are views of one tensor
        self._now += rest.gradients + rest.inputs + rest.returned
        # unless the inputs are not contiguous, which copies them; what the step draws before the blocks must not change
        # the loss, which runs once more
        draws = rest_window(self._pipeline.whole, rank=self._segments).draws_first()
        again = rest.silent if draws else 0
        self._reach(max(self._pipeline.whole.strided_bytes[-1], again) + DRAWS)

    def after(self) -> None:
        pipeline, whole = self._pipeline, self._pipeline.whole
        # the last ones are kept until `Messages.wait`
        self._now -= sum(self._sent_back.values())
        self._reach(self._tied())
        last = self._last % len(pipeline.orders) == self._rank
        if last and not pipeline.alone and not pipeline.at_once:
            self._reach(rest_bytes(whole, rank=self._segments).silent)
        # every rank has what the step returns until the optimiser has stepped; the last one sends copies of it
        returned, held = returned_bytes(whole), pipeline.at_once or pipeline.alone
        self._reach(returned if held or not last else 2 * returned)
        # old gradients are freed before the new ones are set; the loss is returned anew, and Lightning copies it
        self._now = self._always + (self._gradients if whole.frees_gradients else 0)
        self._now += returned + 2 * loss_bytes(whole)
        self._reach(self._optimiser())

    def _tied(self) -> int:
        """Bytes of the largest gradient that this rank, the first of the ranks that share it, receives."""
        if len(self._pipeline.orders) == 1:
            return 0
        others = [{p.name for p in _held(self._pipeline, rank)} for rank in range(len(self._pipeline.orders))]
        shared = [
            p.gradient_bytes
            for p in self._held
            if p.segments
            and sum(p.name in names for names in others) > 1
            and not any(p.name in names for names in others[: self._rank])
        ]
        return max(shared, default=0)

    def _optimiser(self) -> int:
        """Peak temporaries of the optimiser's step, of those with the size of a parameter of this rank."""
        whole = self._pipeline.whole
        times = np.flatnonzero(whole.optimises)
        if not len(times):
            return 0
        begin, length = int(times[0]), int(times[-1]) + 1 - int(times[0])
        here, every = Counter(p.n_bytes for p in self._held), Counter(p.n_bytes for p in whole.parameters)
        made = np.flatnonzero(whole.birth >= begin)
        at_once, seen = Counter(zip(whole.birth[made], whole.n_bytes[made], strict=True)), Counter[tuple[int, int]]()
        own = list[int]()
        for i in made:
            key = whole.birth[i], whole.n_bytes[i]
            seen[key] += 1
            # an operator for all parameters at once makes fewer tensors on a rank that holds some of them
            if seen[key] <= (here[key[1]] if at_once[key] == every[key[1]] else at_once[key] * (here[key[1]] > 0)):
                own.append(int(i))
        return int(bytes_alive(whole.birth[own] - begin, whole.held[own] - begin, whole.n_bytes[own], length).max())

    def _stage(self, stage: int) -> StageBytes:
        start, end = self._pipeline.runs[stage]
        to_the_end = not self._pipeline.at_once
        alone = self._pipeline.alone
        return stage_bytes(self._pipeline.part, start, end, to_the_end=to_the_end, alone=alone, rank=self._segments)

    def _reach(self, more: int) -> None:
        self.most = max(self.most, self._now + more)


def layer_bytes(part: Passes, orders: Sequence[Order], stages: int, *, at_once: bool) -> Iterator[list[float]]:
    """Yield, for every stage, the bytes that each block of a micro-batch would hold there.

    Args:
        part: Passes of the micro-batch.
        orders: Order of every rank; stage s is on rank s mod the ranks.
        stages: Number of stages.
        at_once: As in `Pipeline`.
    """
    blocks = len(part.names)
    alone = [stage_bytes(part, i, i + 1, to_the_end=not at_once) for i in range(blocks)]
    # tensors between blocks are kept once per stage
    kept = [own.kept - own.received - own.result for own in alone]
    held = [0.0] * blocks
    for p in part.parameters:
        places = {min(i, blocks - 1) for i in p.segments} if p.block is None else {p.block}
        for i in places:
            # gradients of the last step may exist too
            held[i] += p.n_bytes + p.state_bytes + (1 if part.frees_gradients else 2) * p.gradient_bytes
    flights = [most_in_flight(order) for order in orders]
    for stage in range(stages):
        flying = flights[stage % len(orders)][stage]
        yield [own + flying * saved for own, saved in zip(held, kept, strict=True)]
