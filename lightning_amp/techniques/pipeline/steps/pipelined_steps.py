"""Replace the steps of a LightningModule by pipelined ones, which the Trainer calls as before.

A training step splits the batch into micro-batches and runs the user's step with each of them, forward and backward, in
the order of the schedule. It returns the loss of the batch with its gradients already computed, so that everything that
follows (scaling, hooks on parameters, averaging over the data axis, clipping) works as for any module.

With the schedule "gpipe" all micro-batches pass the blocks before the first backward pass begins, and what follows the
blocks runs once, for the full batch: the loss may be any function of it. With other schedules every micro-batch has a
separate loss, whose weighted mean is the batch's loss only if that is a mean over samples. A masked mean is not: its
parts have other weights. So in every step the last stage also runs what follows the blocks without gradients for the
full batch, from the blocks' results for the micro-batches. If the loss differs, all ranks raise an error before any
parameter changes. This run also logs, updates metrics and returns outputs, as one run of the step would. If random
numbers are drawn after the blocks (dropout in a head), the losses are compared in evaluation mode instead, and the
logged values come from a run with random numbers of its own. Under autocast, the first step compares the losses
without autocast, if what follows the blocks can run so.

Code before the loss must compute every sample independently. In the first step two micro-batches with the same middle
third of samples pass the blocks. If the results of these samples differ, or if a block stores what it received, the
step raises an error (sample_check.py).

Validation, test and prediction run the full batch as one micro-batch.

Known limits. Not detected are: a loss with the right value and a wrong gradient (such as x / x.detach()); samples that
start to depend on each other after the first step; weights that differ by less than half precision parameters round.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial, wraps
from types import MethodType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torchmetrics import Metric

from lightning_amp._torch import tree_map
from lightning_amp.data.batch import tensors_in
from lightning_amp.data.cut_batch import cut
from lightning_amp.errors import InstallError, ModelError
from lightning_amp.footprint.run_again.recompute_state import digests, same_digests
from lightning_amp.random_streams import isolated_random_streams
from lightning_amp.techniques.pipeline.row import PipelineStages
from lightning_amp.techniques.pipeline.run.block_walk import StageBlock, spans
from lightning_amp.techniques.pipeline.run.blocks import refuse_hooks
from lightning_amp.techniques.pipeline.run.run_stages import Ran, Rest, Stages, Work, detached, loss_of
from lightning_amp.techniques.pipeline.schedule.schedules import Order, PassTimes, fills_rounds, schedule
from lightning_amp.techniques.pipeline.steps.sample_check import Given, SampleCheck, compare, evaluating, single
from lightning_amp.techniques.pipeline.steps.step_record import StageStepRecorder, StepRecord
from lightning_amp.techniques.precomputed_gradients import Gradients, with_gradients
from lightning_amp.techniques.put_methods import AroundCalls, Step, around_calls_of, put_methods

EVALUATED = ("validation_step", "test_step", "predict_step")
LOOKS = 2
"""Number of steps that compare values of parameters and buffers, which takes as long as reading them twice."""


class RankParameters(Protocol):
    """Parameters of a pipeline, of which each rank holds those of its stages."""

    all_ranks_raise: bool
    """Whether all ranks of the pipeline raise the same error, after a collective."""

    @property
    def here(self) -> list[nn.Parameter]:
        """Parameters that this rank holds."""

    def settle(self) -> None:
        """Agree on ranks for parameters that were reached for the first time, and sum tied gradients; a collective."""


class PipelinedSteps:
    """Pipelined steps of one run, until `undo`.

    Args:
        module: The LightningModule.
        blocks: Its blocks, by name.
        stages: Stages of this rank.
        parameters: Parameters of all stages.
        spec: Schedule and number of micro-batches.
        data_rank: Rank on the data axis, which its random numbers depend on.

    Attributes:
        times: Times of this rank's passes in the last training step; None before the first.
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
        self._check: SampleCheck | None = SampleCheck(stages, blocks)
        self._exactly, self._looks = True, LOOKS
        self._calls = Counter[tuple[str, int]]()
        self.times: PassTimes | None = None
        self._around: AroundCalls = lambda held, step: nullcontext(step)
        steps = {"training_step": self._train, **dict.fromkeys(EVALUATED, self._evaluate)}
        self.undo = put_methods(module, {name: self._in_place_of(name, run) for name, run in steps.items()})
        """Restore the module's steps."""

    def _in_place_of(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        plain, put = getattr(self._module, name), vars(self._module).get(name)
        if (around := around_calls_of(put)) is not None:
            plain, self._around = MethodType(getattr(type(self._module), name), self._module), around
        elif put is not None:
            raise InstallError(
                f"pipeline: {name!r} of the module is set on the instance ({plain!r}), which is not supported;"
                " define it in the class, or leave 'pipeline' out"
            )

        @wraps(plain if put is None else put)
        def step(batch: Any, *rest: Any) -> Any:
            self._calls[name, self._module.trainer.current_epoch] += 1
            return run(plain, name, batch, *rest)

        return step

    # --- training ---

    def _train(self, plain: Step, name: str, batch: Any, *rest: Any) -> Any:
        parts, sizes = self._cut(batch)
        total, n, record = sum(sizes), len(parts), StepRecord()
        given = Given()
        # a step that is called once gets the batch itself
        call = given.call if n * self._spec.stages_per_rank > 1 else lambda step, *own: step(*own)
        # while the passes run, another technique may be around the step
        own = [plain]
        whole, part = (lambda: call(own[0], batch, *rest)), (lambda j: call(own[0], parts[j], *rest))
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
        # Passes accumulate into `.grad`, which may hold gradients of earlier batches. These are set aside and restored;
        # the backward pass of the returned loss adds the new ones, so that the Trainer scales only these.
        with self._gradients_aside() as parameters:
            again = batch if n * self._spec.stages_per_rank > 1 else None
            held = [*self._module.parameters(), *self._module.buffers(), *tensors_in(batch)]
            with self._same_tensors(record, again, values=self._looks > 0), self._around(held, plain) as own[0]:
                ran = self._stages.run(self._order(n), work)
            own[0] = plain
            self.times, self._looks = ran.times, max(0, self._looks - 1)
            # before gradients are read: gradients of tied parameters are summed over the stages that hold them
            self._parameters.settle()
            grads = [parameter.grad for parameter in parameters]
        if self._stages.is_last:
            record.returned = ran.returned[0]
            if n > 1 and not at_once and ran.wrote:
                record.error = record.error or ModelError(
                    "pipeline: what follows the blocks writes in place into the result of the last one (x += ...), of"
                    " which the loss of the whole batch is computed as well; write out of place (x = x + ...), take"
                    " schedule='gpipe' or micro_batches=1, or leave 'pipeline' out"
                )
            if n > 1 and not at_once and record.error is None:
                self._whole(whole, part, ran, work, record)
        record = self._share(record)
        given.write()
        return _with_gradients(record.returned, parameters, grads)

    def _cut(self, batch: Any) -> tuple[list[Any], list[int]]:
        """Split the batch into as many micro-batches as it has samples for, and as the schedule supports."""
        parts, sizes = cut(batch, self._spec.micro_batches)
        n, ranks = len(parts), self._stages.mesh.size()
        if n < self._spec.micro_batches:
            # a batch that is smaller than others
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
        # a step need not take the batch index: without the count, all batches of an epoch would draw the same numbers
        parts = rest[:2] or (self._calls[name, epoch],)
        return seed_of(torch.initial_seed(), name, epoch, *parts, self._data_rank, micro_batch)

    @contextmanager
    def _gradients_aside(self) -> Iterator[list[nn.Parameter]]:
        """Context manager: set gradients of earlier steps aside; yields the parameters of this rank."""
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
        """Context manager: record an error if the step changes parameters or buffers (except of metrics) in place.

        Also detected are a replaced tensor of a persistent buffer, and writes into a batch with which the step is
        called again: the second call would read what the first one has written. Writes through `.data`, which has no
        version, are detected if `values` are compared, in floating-point tensors.
        """
        of_metrics = {id(b) for m in self._module.modules() if isinstance(m, Metric) for b in m.buffers()}
        named = [*self._module.named_parameters(), *self._module.named_buffers()]
        # versions count in-place writes, except those through `.data`, which digests of the values show
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
        """On the last stage: run the step for the full batch without gradients, and check that the loss is equal."""
        with isolated_random_streams():
            with self._recorder.recording(record):
                record.returned = detached(self._stages.run_rest(whole, ran.results))
            losses: list[Tensor] = ran.returned
            loss, rounds = loss_of(record.returned), torch.is_autocast_enabled("cpu")
            if ran.drew or (rounds and self._exactly):
                self._exactly = False
                part, whole = within(part, self._recorder.muted), within(whole, self._recorder.muted)
                with evaluating(self._module, ran.drew):
                    try:
                        # the weights of a mean may differ by less than half precision rounds, in every step: so one
                        # comparison is made without rounding
                        with torch.autocast("cpu", enabled=False):
                            results = tree_map(single, ran.results) if rounds else ran.results
                            loss, losses = self._losses(whole, part, results)
                        rounds = False
                    except RuntimeError:
                        if not rounds:
                            raise
                        # code after the blocks may mix dtypes, which only autocast supports
                        loss, losses = self._losses(whole, part, ran.results)
            record.error = compare(loss, losses, work.weights, rounds=rounds)

    def _losses(self, whole: Step, part: Callable[[int], Any], results: list[Any]) -> tuple[Tensor, list[Tensor]]:
        """Losses of the batch, and of each micro-batch, from the blocks' results for the micro-batches."""
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
        """Broadcast the last stage's record, and log it on all ranks."""
        shared = self._broadcast(record)
        self._recorder.play(shared, recorded_here=self._stages.is_last)
        device = self._stages.device
        shared.returned = tree_map(lambda v: v.to(device) if isinstance(v, Tensor) else v, shared.returned)
        return shared

    def _broadcast(self, record: StepRecord) -> StepRecord:
        """Broadcast the last stage's record, and raise its error or this rank's; a collective over the model axis."""
        group, is_last = self._stages.mesh.get_group(), self._stages.is_last
        box: list[Any] = [None]
        if is_last:
            try:
                box[0] = self._recorder.packed(record)
            except ModelError as error:
                record = StepRecord(error=error)
                box[0] = self._recorder.packed(record)
        dist.broadcast_object_list(box, dist.get_global_rank(group, self._stages.last_rank), group=group)
        # the last stage keeps its record, with the objects that the step has returned
        shared = record if is_last else self._recorder.unpacked(box[0])
        # The error is raised by all ranks after the collective, so that no rank waits for one that has failed. An error
        # of this rank only is raised here, too.
        failed = shared.error or record.error
        # the others wait for no message of this rank, so that parameters can be put together at the end
        self._parameters.all_ranks_raise = shared.error is not None
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
    """Free the parameters of other stages, and let the module's steps run as stages until they are undone.

    Args:
        module: Module whose blocks have a `StageBlock` as forward.
        overridden: Name, module and override of all modules with an overridden forward.
        spec: Spec of the plan.
        mesh: With the axes "data" and "model".
        parameters_of: (module, [(block, model rank)], mesh, shared) -> the parameters; frees those of other ranks.
            `shared` has the names of parameters of blocks, and another rank that holds them.
    """
    calls = [(fqn, block, run) for fqn, block, run in overridden if isinstance(run, StageBlock)]
    stages = Stages(calls[0][2].walk, spans(map(int, spec.ends.split(","))), mesh["model"], module.device)
    ranks = [n % mesh.size(1) for n, span in enumerate(stages.spans) for _ in range(span.first, span.end)]
    within_list = calls[0][0].rpartition(".")[0]
    shared = {f"{within_list}.{name}": stages.last_rank for name in spec.read_after.split(",") if name}
    parameters = parameters_of(module, [(block, ranks[call.index]) for _, block, call in calls], mesh, shared)
    blocks = {fqn: block for fqn, block, _ in calls}
    return parameters, PipelinedSteps(module, blocks, stages, parameters, spec, data_rank=mesh["data"].get_local_rank())


def within(call: Callable[..., Any], context: Callable[[], AbstractContextManager[None]]) -> Callable[..., Any]:
    """Wrap a call in a context that is created for each call."""

    def called(*args: Any) -> Any:
        with context():
            return call(*args)

    return called


def seed_of(*parts: object) -> int:
    """Return a seed for a micro-batch's random numbers, from the run's seed, the step, the data rank and its index."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=7).digest(), "big")


def _with_gradients(returned: Any, parameters: list[nn.Parameter], grads: list[Tensor | None]) -> Any:
    """Return the step's result with a loss whose backward pass returns the computed gradients."""
    loss = loss_of(returned)
    reached = [(p, grad) for p, grad in zip(parameters, grads, strict=True) if grad is not None]
    # a stage may have no parameters to train, but the Trainer calls backward in any case
    always = torch.zeros((), requires_grad=True)
    inputs = [always, *(parameter for parameter, _ in reached)]
    ready: Gradients = [torch.zeros(()), *(grad for _, grad in reached)]
    # gradients are scaled by a tensor of 0 dimensions
    own = loss.detach().clone().reshape(())
    total = with_gradients(lambda needed: (own, ready), inputs).reshape(loss.shape)
    return {**returned, "loss": total} if isinstance(returned, dict) else total
