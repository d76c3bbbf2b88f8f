"""Replace the steps of a module by pipelined ones; the Trainer calls them as before.

A training step cuts the batch into micro-batches and runs the user's step with each of them, forward and backward, in
the order of the schedule. It returns the loss of the batch with its gradients ready, so that all that follows (scaling,
hooks on parameters, averaging over the data axis, clipping) is what it is for any module.

Under the schedule "gpipe" all micro-batches have passed the blocks before the first backward pass begins, and what
follows the blocks is run once, for the whole batch: the loss may be any function of it. Under the others a micro-batch
has its own loss, and a mean of these is the batch's only where that is a mean over samples. A masked mean is not: its
parts have other weights. So in every step the last stage then runs what follows the blocks once more, without gradients
and for the whole batch, from what the blocks have returned for its micro-batches; where the loss is another one, the
step is refused on all ranks, before any parameter changes. That run is also what logs, updates metrics and returns
outputs, as one run of the step would. Where random numbers are drawn after the blocks (dropout in a head), the two are
compared in evaluation mode instead, and what is logged is of its own draw. Under autocast the first step compares them
without it, if what follows the blocks runs so.

What comes before the loss has to compute every sample by itself. In the first step two micro-batches pass the blocks,
whose middle third of samples is the same: where these have another result the step is refused, and so it is where a
block remembers what it was given (sample_check.py).

A step that optimises by hand is one that returns its loss, until its gradients are ready (manual_step.py).

Validation, test and prediction run the whole batch as one micro-batch.

Known limits: a loss whose value agrees and whose gradient does not (as of x / x.detach()) is not noticed, and neither
are samples that begin to depend on each other after the first step, and weights that differ by less than a module whose
parameters have half precision rounds.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from typing import Any, Protocol

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torchmetrics import Metric

from lightning_amp._torch import tree_map
from lightning_amp.data.batch import tensors_in
from lightning_amp.errors import InstallError, ModelError
from lightning_amp.footprint.recompute_state import digests, same_digests
from lightning_amp.random_streams import isolated_random_streams
from lightning_amp.techniques.pipeline.row import PipelineStages
from lightning_amp.techniques.pipeline.run.block_walk import StageBlock, spans
from lightning_amp.techniques.pipeline.run.blocks import refuse_hooks
from lightning_amp.techniques.pipeline.run.run_stages import Ran, Rest, Stages, Work, detached, loss_of
from lightning_amp.techniques.pipeline.schedule.schedules import Order, PassTimes, fills_rounds, schedule
from lightning_amp.techniques.pipeline.steps.manual_step import ManualStep
from lightning_amp.techniques.pipeline.steps.sample_check import Given, SampleCheck, compare, cut, evaluating, single
from lightning_amp.techniques.pipeline.steps.step_record import StageStepRecorder, StepRecord
from lightning_amp.techniques.precomputed_gradients import Gradients, with_gradients
from lightning_amp.techniques.put_methods import put_methods

EVALUATED = ("validation_step", "test_step", "predict_step")
LOOKS = 2
"""Training steps in which values of parameters and buffers are looked at, which takes as long as reading them twice."""

Step = Callable[..., Any]


class RankParameters(Protocol):
    """The parameters of a pipeline, of which each rank holds those of its stages."""

    @property
    def here(self) -> list[nn.Parameter]:
        """What this rank holds."""

    def settle(self) -> None:
        """Agree who holds what was reached for the first time, and sum what several ranks hold; a collective."""


class PipelinedSteps:
    """The steps of one run, until `undo`.

    Args:
        module: The LightningModule.
        blocks: Its blocks, by name.
        stages: Of this rank.
        parameters: Of all stages.
        spec: The schedule, and how many micro-batches.
        data_rank: Of the rank, for its random numbers.

    Attributes:
        times: When this rank has computed what in the last training step; None before the first.
    """

    def __init__(
        self,
        module: LightningModule,
        blocks: Mapping[str, nn.Module],
        stages: Stages,
        parameters: RankParameters,
        spec: PipelineStages,
        *,
        data_rank: int,
    ) -> None:
        self._module, self._stages, self._parameters = module, stages, parameters
        self._spec, self._data_rank = spec, data_rank
        self._recorder = StageStepRecorder(module, list(blocks.values()))
        self._manual = None if module.automatic_optimization else ManualStep(module)
        self._check: SampleCheck | None = SampleCheck(stages, blocks)
        self._exactly, self._looks = True, LOOKS
        self._calls = Counter[tuple[str, int]]()
        self.times: PassTimes | None = None
        steps = {"training_step": self._train, **dict.fromkeys(EVALUATED, self._evaluate)}
        self.undo = put_methods(module, {name: self._in_place_of(name, run) for name, run in steps.items()})
        """Lets the module run its own steps again."""

    def _in_place_of(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        plain = getattr(self._module, name)
        if name in vars(self._module):
            raise InstallError(
                f"pipeline: {name!r} of the module is set on the instance ({plain!r}), which is not supported;"
                " define it in the class, or leave 'pipeline' out"
            )

        @wraps(plain)
        def step(batch: Any, *rest: Any) -> Any:
            self._calls[name, self._module.trainer.current_epoch] += 1
            return run(plain, name, batch, *rest)

        return step

    # --- training ---

    def _train(self, plain: Step, name: str, batch: Any, *rest: Any) -> Any:
        if self._manual is None:
            return self._with_gradients(plain, name, batch, *rest)
        return self._manual.carry_out(self._with_gradients(self._manual.recorded(plain), name, batch, *rest))

    def _with_gradients(self, plain: Step, name: str, batch: Any, *rest: Any) -> Any:
        parts, sizes = self._cut(batch)
        total, n, record = sum(sizes), len(parts), StepRecord()
        given = Given()
        # a step that is called once gets the batch itself
        call = given.call if n * self._spec.stages_per_rank > 1 else lambda step, *own: step(*own)
        whole, part = (lambda: call(plain, batch, *rest)), (lambda j: call(plain, parts[j], *rest))
        seen, muted = partial(self._recorder.recording, record), self._recorder.muted
        at_once = n > 1 and self._spec.schedule == "gpipe"
        if n > 1 and self._check is not None:
            run, looked = within(lambda own: Given().call(plain, own, *rest), muted), StepRecord()
            with self._same_tensors(looked, batch, values=True):
                error = self._check.look(run, batch, parts[0], sizes, seed=self._seed(name, rest, n))
            looked.error = looked.error or error
            self._broadcast(looked)
            self._check = None
        work = Work(
            # a single micro-batch is the batch itself
            step=within(part, muted if n > 1 else seen),
            seeds=[self._seed(name, rest, j) for j in range(n)],
            weights=[size / total for size in sizes],
            rest=Rest(step=within(whole, seen), silently=within(whole, muted), seed=self._seed(name, rest, n))
            if at_once
            else None,
        )
        # Passes leave gradients in `.grad`, where those of batches before may lie that are accumulated. These are put
        # back, and the new ones come to them by the loss's own backward pass: so the Trainer's scaling applies to the
        # new ones.
        with self._gradients_aside() as parameters:
            again = batch if n * self._spec.stages_per_rank > 1 else None
            with self._same_tensors(record, again, values=self._looks > 0):
                ran = self._stages.run(self._order(n), work)
            self.times, self._looks = ran.times, max(0, self._looks - 1)
            # before gradients are read: tied parameters get the sum over the stages that hold them
            self._parameters.settle()
            grads = [parameter.grad for parameter in parameters]
        if self._stages.is_last:
            record.returned = ran.returned[0]
            if n > 1 and not at_once and record.error is None:
                self._whole(whole, part, ran, work, record)
        record = self._share(record)
        given.write()
        return _with_gradients(record.returned, parameters, grads)

    def _cut(self, batch: Any) -> tuple[list[Any], list[int]]:
        """As many micro-batches as the batch has samples for, and the schedule an order."""
        parts, sizes = cut(batch, self._spec.micro_batches)
        n, ranks = len(parts), self._stages.mesh.size()
        if n < self._spec.micro_batches:
            # of a batch that is smaller than others
            while not fills_rounds(self._spec.schedule, ranks, n):
                n -= 1
        return (parts, sizes) if n == len(parts) else cut(batch, n)

    def _order(self, micro_batches: int) -> Order:
        orders = schedule(
            self._spec.schedule, self._stages.mesh.size(), micro_batches, stages_per_device=self._spec.stages_per_rank
        )
        return orders[self._stages.mesh.get_local_rank()]

    def _seed(self, name: str, rest: tuple[Any, ...], micro_batch: int) -> int:
        epoch = self._module.trainer.current_epoch
        # a step need not take the number of its batch: all batches of an epoch would draw the same
        told = rest[:2] or (self._calls[name, epoch],)
        return seed_of(torch.initial_seed(), name, epoch, *told, self._data_rank, micro_batch)

    @contextmanager
    def _gradients_aside(self) -> Iterator[list[nn.Parameter]]:
        """The parameters of this rank, whose gradients of earlier steps are away as long as the block lasts."""
        parameters = self._parameters.here
        for parameter in parameters:
            refuse_hooks(parameter)
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        try:
            yield parameters
        finally:
            for parameter, grad in zip(parameters, before, strict=True):
                parameter.grad = grad

    @contextmanager
    def _same_tensors(self, record: StepRecord, batch: object, *, values: bool) -> Iterator[None]:
        """A step that changes parameters, or buffers that are no metric's, in place is an error in the record.

        Of a buffer that a checkpoint has, another tensor in its place is one too, and so is a step that writes into a
        batch that it is called with again: the second time it would find what the first one has left. What is written
        into floating-point numbers by way of `.data`, which has no version, is seen if `values` are looked at.
        """
        of_metrics = {id(b) for m in self._module.modules() if isinstance(m, Metric) for b in m.buffers()}
        named = [*self._module.named_parameters(), *self._module.named_buffers()]
        before = [(n, t, t._version) for n, t in named if id(t) not in of_metrics and not t.is_inference()]
        sums = {n: digests(t) for n, t in named if values and id(t) not in of_metrics}
        kept = self._kept_buffers()
        read = [(tensor, tensor._version) for tensor in tensors_in(batch) if not tensor.is_inference()]
        yield
        now = self._kept_buffers()
        written = next((tensor for tensor, version in read if tensor._version != version), None)
        changed = [name for name, tensor, version in before if tensor._version != version]
        changed += [name for name, buffer in kept.items() if now.get(name) is not buffer]
        changed += [name for name, t in named if name in sums and not same_digests(sums[name], digests(t))]
        if written is not None:
            record.error = ModelError(
                f"pipeline: the step writes in place into a tensor of its batch, of shape {tuple(written.shape)!r} and"
                f" {written.dtype!r}, and is called again with the same one; do that in on_after_batch_transfer, let it"
                " write into a copy, or leave 'pipeline' out"
            )
        elif changed:
            record.error = ModelError(
                f"pipeline: the step has changed the parameters or buffers {changed[:5]!r}, once for every"
                " micro-batch and on one rank only; change them in on_train_batch_end, or leave 'pipeline' out"
            )

    def _kept_buffers(self) -> dict[str, Tensor]:
        return {
            f"{at}.{name}" if at else name: buffer
            for at, part in self._module.named_modules()
            if not isinstance(part, Metric)
            for name, buffer in part.named_buffers(recurse=False)
            if name not in part._non_persistent_buffers_set
        }

    @torch.no_grad()
    def _whole(self, whole: Step, part: Callable[[int], Any], ran: Ran, work: Work, record: StepRecord) -> None:
        """On the last stage: what one run of the step does besides its gradients, if it has the same loss."""
        with isolated_random_streams():
            with self._recorder.recording(record):
                record.returned = detached(self._stages.run_rest(whole, ran.results))
            losses = [loss_of(returned) for returned in ran.returned]
            loss, rounds = loss_of(record.returned), torch.is_autocast_enabled("cpu")
            if ran.drew or (rounds and self._exactly):
                self._exactly = False
                part, whole = within(part, self._recorder.muted), within(whole, self._recorder.muted)
                with evaluating(self._module, ran.drew):
                    try:
                        # weights of a mean may differ by less than half precision rounds, in every step: once it is
                        # not rounded
                        with torch.autocast("cpu", enabled=False):
                            results = tree_map(single, ran.results) if rounds else ran.results
                            loss, losses = self._losses(whole, part, results)
                        rounds = False
                    except RuntimeError:
                        if not rounds:
                            raise
                        # what follows the blocks may mix types, and then runs under autocast only
                        loss, losses = self._losses(whole, part, ran.results)
            record.error = compare(loss, losses, work.weights, rounds=rounds)

    def _losses(self, whole: Step, part: Callable[[int], Any], results: list[Any]) -> tuple[Tensor, list[Tensor]]:
        """Of the batch, and of each micro-batch, from what the blocks have returned for these."""
        own = [loss_of(self._stages.run_rest(partial(part, j), [result])) for j, result in enumerate(results)]
        return loss_of(self._stages.run_rest(whole, results)), own

    # --- the rest ---

    def _evaluate(self, plain: Step, name: str, batch: Any, *rest: Any) -> Any:
        record, given = StepRecord(), Given()
        # each stage of the rank calls the step
        again = self._spec.stages_per_rank > 1
        step = (lambda _: given.call(plain, batch, *rest)) if again else lambda _: plain(batch, *rest)
        work = Work(step=within(step, partial(self._recorder.recording, record)), seeds=[self._seed(name, rest, 0)])
        with self._same_tensors(record, batch if again else None, values=False):
            ran = self._stages.run(self._stages.forward_only, work)
        record.returned = ran.returned[0]
        returned = self._share(record).returned
        given.write()
        return returned

    def _share(self, record: StepRecord) -> StepRecord:
        """Of the last stage, on all ranks, which then log the same."""
        shared = self._broadcast(record)
        self._recorder.play(shared, recorded_here=self._stages.is_last)
        device = self._stages.device
        shared.returned = tree_map(lambda v: v.to(device) if isinstance(v, Tensor) else v, shared.returned)
        return shared

    def _broadcast(self, record: StepRecord) -> StepRecord:
        """From the last stage, or the error in it or here; a collective over the model axis."""
        group, is_last = self._stages.mesh.get_group(), self._stages.is_last
        box: list[Any] = [None]
        if is_last:
            try:
                box[0] = self._recorder.packed(record)
            except ModelError as error:
                record = StepRecord(error=error)
                box[0] = self._recorder.packed(record)
        dist.broadcast_object_list(box, dist.get_global_rank(group, self._stages.last_rank), group=group)
        # here with the objects that the step has handed out
        shared = record if is_last else self._recorder.unpacked(box[0])
        # The error is raised by all ranks after the collective, so that none of them waits for one that has left. One
        # that this rank alone has found ends it here, too.
        failed = shared.error or record.error
        if failed is not None:
            raise failed
        return shared


def install(
    module: LightningModule,
    overridden: Sequence[tuple[str, nn.Module, Any]],
    spec: PipelineStages,
    mesh: DeviceMesh,
    parameters_of: Callable[..., RankParameters],
) -> tuple[RankParameters, PipelinedSteps]:
    """Free what other stages hold, and let the module's steps run as stages until these are undone.

    Args:
        module: Its blocks have been replaced by those of stages.
        overridden: Of all modules with another forward: name, module, and what runs there.
        spec: Of the plan.
        mesh: With the axes "data" and "model".
        parameters_of: (module, its blocks with the rank of the model axis of each, mesh) -> the parameters, with those
            of other ranks freed.
    """
    calls = [(fqn, block, run) for fqn, block, run in overridden if isinstance(run, StageBlock)]
    stages = Stages(calls[0][2].walk, spans(map(int, spec.ends.split(","))), mesh["model"], module.device)
    ranks = [n % mesh.size(1) for n, span in enumerate(stages.spans) for _ in range(span.first, span.end)]
    parameters = parameters_of(module, [(block, ranks[call.index]) for _, block, call in calls], mesh)
    blocks = {fqn: block for fqn, block, _ in calls}
    return parameters, PipelinedSteps(module, blocks, stages, parameters, spec, data_rank=mesh["data"].get_local_rank())


def within(call: Callable[..., Any], context: Callable[[], AbstractContextManager[None]]) -> Callable[..., Any]:
    """The same call inside of a context that is made anew every time."""

    def called(*args: Any) -> Any:
        with context():
            return call(*args)

    return called


def seed_of(*told: object) -> int:
    """A seed for the random numbers of a micro-batch: of the run's seed, the step, the data rank and its number."""
    return int.from_bytes(hashlib.blake2b(repr(told).encode(), digest_size=7).digest(), "big")


def _with_gradients(returned: Any, parameters: list[nn.Parameter], grads: list[Tensor | None]) -> Any:
    """What the step has returned, with a loss that hands out the gradients."""
    loss = loss_of(returned)
    reached = [(p, grad) for p, grad in zip(parameters, grads, strict=True) if grad is not None]
    # a stage may have nothing to train, and the Trainer calls backward all the same
    always = torch.zeros((), requires_grad=True)
    inputs = [always, *(parameter for parameter, _ in reached)]
    ready: Gradients = [torch.zeros(()), *(grad for _, grad in reached)]
    # gradients are scaled by a number without a dimension
    own = loss.detach().clone().reshape(())
    total = with_gradients(lambda needed: (own, ready), inputs).reshape(loss.shape)
    return {**returned, "loss": total} if isinstance(returned, dict) else total
