"""Run the micro-batches of one step through the stages of this rank, in the order of a schedule.

    loss of the batch = sum over micro-batches of weight_j loss_j           weight_j = samples of j / samples

Gradients are accumulated in `.grad`. If all forward passes precede the first backward pass, what follows the blocks can
run once for the full batch (`Rest`), from the blocks' results for all micro-batches: any loss of the batch is exact.

Random numbers: every micro-batch begins with a separate seed, and every stage continues with the random state of the
stage before (messages.py). So they equal those of one process that sets the seed before every micro-batch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp._torch import tree_flatten, tree_leaves, tree_map, tree_unflatten
from lightning_amp.errors import ModelError
from lightning_amp.random_streams import isolated_random_streams
from lightning_amp.techniques.pipeline.run.block_walk import BlockWalk, Leave, Span
from lightning_amp.techniques.pipeline.run.messages import PLAIN, Messages, packed_draws, seed_draws
from lightning_amp.techniques.pipeline.schedule.schedules import Order, Pass, PassTimes
from lightning_amp.techniques.ranks.placeholders import without_values

Step = Callable[[int], Any]
"""Calls the user's step with the micro-batch of an index."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rest:
    """Computation that follows the blocks, for the full batch.

    Attributes:
        step: Calls the user's step with the batch.
        silently: The same without side effects such as logging.
        seed: Seed of its random numbers.
    """

    step: Callable[[], Any]
    silently: Callable[[], Any]
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Micro-batches of one step.

    Attributes:
        step: Calls the user's step with one of them.
        seeds: Seed of the random numbers of each.
        weights: Weight of the loss of each; empty if there is no backward pass.
        rest: Runs once for all of them, after the last forward pass; None if every micro-batch has a loss.
    """

    step: Step
    seeds: Sequence[int]
    weights: Sequence[float] = ()
    rest: Rest | None = None


class Ran:
    """Results of a step: times on every rank, everything else on the last stage only.

    Attributes:
        times: Times of this rank's passes.
        results: Results of the last block, for every micro-batch.
        returned: Result of the step for one micro-batch, or with a `Rest`; otherwise the losses of all micro-batches.
        drew: Whether random numbers were drawn after the last block.
        wrote: Whether what follows the blocks has written in place into the last block's result.
    """

    def __init__(self, micro_batches: int) -> None:
        self.times = PassTimes()
        self.results: list[Any] = [None] * micro_batches
        self.returned: list[Any] = [None] * micro_batches
        self.drew = self.wrote = False


class Stages:
    """Stages of this rank.

    Args:
        walk: Walk through the module's blocks.
        spans: Blocks of all stages of the pipeline, in order; stage s is on rank s mod the ranks of the mesh.
        mesh: The model axis.
        device: Device of the run.
    """

    def __init__(self, walk: BlockWalk, spans: Sequence[Span], mesh: DeviceMesh, device: torch.device) -> None:
        self.walk, self.spans, self.mesh, self.device = walk, tuple(spans), mesh, device
        self.last_rank = (len(self.spans) - 1) % mesh.size()
        self.is_last = self.last_rank == mesh.get_local_rank()
        self._after_all = Span(walk.blocks, walk.blocks, walk.blocks)

    @property
    def forward_only(self) -> Order:
        """Passes of this rank for one micro-batch without a backward pass."""
        own = range(self.mesh.get_local_rank(), len(self.spans), self.mesh.size())
        return tuple(Pass(False, stage, 0) for stage in own)

    def run(self, order: Order, work: Work) -> Ran:
        """Run this rank's passes of one step, in their order; the rank's random state does not change."""
        messages = Messages(self.mesh, len(self.spans), self.device)
        ran, last = Ran(len(work.seeds)), len(self.spans) - 1
        alive: dict[tuple[int, int], tuple[Any, list[Tensor]]] = {}
        # A step draws with the seeds of micro-batches. The rank's random state must not change: the main process may
        # augment data with it, and all ranks of a pipeline have to read the same batch.
        with isolated_random_streams():
            for now in order:
                ran.times.begin()
                # In the order of "gpipe" all forward passes of the last stage are done here, so that `alive` has the
                # blocks' results for the full batch.
                if now.backward and now.stage == last and work.rest and ran.returned[0] is None:
                    self._run_rest(work.rest, alive, ran)
                    ran.times.rested()
                if now.backward:
                    self._backward(now, *alive.pop((now.stage, now.micro_batch)), work, messages, ran)
                else:
                    alive[now.stage, now.micro_batch] = self._forward(now, work, messages, ran)
            messages.wait()
        return ran

    def run_rest(self, step: Callable[[], Any], results: Sequence[Any], *, seed: int | None = None) -> Any:
        """Return the step's result for a full batch, given the blocks' results for its micro-batches.

        If `seed` is given, it is set after the last block.
        """

        def receive(placeholders: Any) -> Any:
            if seed is not None:
                seed_draws(seed)
            return joined(results, placeholders)

        returned = self.walk.run(self._after_all, step, receive=receive, device=self.device)[1]
        # else the joined results would stay until the next step
        self.walk.versions_after = []
        return returned

    def placeholders(self, step: Callable[[], Any]) -> Any:
        """Return placeholders of the last block's result; the random state does not change."""
        found = []

        def receive(placeholders: Any) -> Any:
            found.append(placeholders)
            raise Leave

        # called on the last stage's rank only: without isolation, ranks with the same samples would draw differently
        with isolated_random_streams():
            self.walk.run(self._after_all, step, receive=receive, device=self.device)
        return found[0]

    def _forward(self, now: Pass, work: Work, messages: Messages, ran: Ran) -> tuple[Any, list[Tensor]]:
        """Run a forward pass; returns the start of the backward pass, and the leaves at which it ends."""
        span, j, leaves = self.spans[now.stage], now.micro_batch, list[Tensor]()
        # Also for later stages: every rank draws what the step draws before the blocks, and must draw the same.
        # `receive` then sets the random state to that of the stage before.
        seed_draws(work.seeds[j])

        def receive(placeholders: Any) -> Any:
            found, own = messages.receive(now.stage, j, placeholders)
            leaves.extend(own)
            ran.times.begin()
            return found

        step = lambda: work.step(j)  # noqa: E731
        whole = work.rest is not None
        result, returned = self.walk.run(span, step, receive=receive, device=self.device, leave=whole)
        ran.times.end(now)
        messages.refuse_written()
        if not span.is_last:
            messages.send_on(now.stage, j, result)
        if whole or not span.is_last:
            return result, leaves
        _refuse_placeholders(returned)
        ran.results[j], ran.returned[j] = detached(result), detached(returned)
        if len(work.seeds) > 1:
            # a loss may be in the memory of the losses of all samples
            ran.returned[j] = loss_of(ran.returned[j]).clone()
        # With dropout in a head, the loss differs in every run, so that the losses of parts and full batch can only be
        # compared without dropout.
        ran.wrote |= any(tensor._version != version for tensor, version in self.walk.versions_after)
        # they hold the micro-batch's graph, and with it what the stage has received
        self.walk.versions_after = []
        ran.drew |= not torch.equal(self.walk.random_state_after, packed_draws())
        return (work.weights[j] * loss_of(returned) if work.weights else None), leaves

    def _run_rest(self, rest: Rest, alive: dict[tuple[int, int], Any], ran: Ran) -> None:
        """Run what follows the blocks, forward and backward; gradients of the blocks' results are left in `ran`."""
        last = len(self.spans) - 1

        # the graph is cut after the blocks: gradients of the rest are computed once, and the backward pass of each
        # micro-batch starts from its share of them
        def leaf(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.detach().requires_grad_(value.is_floating_point() or value.is_complex())

        cut_off = [tree_map(leaf, alive[last, j][0]) for j in range(len(ran.results))]
        seed_draws(rest.seed)
        before = packed_draws()
        returned = self.run_rest(rest.step, cut_off, seed=rest.seed)
        _refuse_placeholders(returned)
        loss = loss_of(returned)
        with torch.autocast(self.device.type, enabled=False):
            loss.backward()  # type: ignore[no-untyped-call]
        # after the backward pass, which frees the graph
        if not torch.equal(before, self.walk.random_state_before):
            self._refuse_drawn(rest, cut_off, loss)
        ran.results = cut_off
        ran.returned = [detached(returned)]

    @torch.no_grad()
    def _refuse_drawn(self, rest: Rest, cut_off: list[Any], loss: Tensor) -> None:
        """Raise if the loss reads random numbers that were drawn before the blocks, which differ by micro-batch."""
        # with other numbers before the blocks and the same after them, the loss differs only if it reads the former
        seed_draws(rest.seed + 1)
        again = loss_of(self.run_rest(rest.silently, cut_off, seed=rest.seed))
        if not torch.allclose(again, loss, rtol=0, atol=0, equal_nan=True):
            raise ModelError(
                "pipeline: the loss depends on random numbers that are drawn before the blocks (such as a mask of"
                " the inputs), which differ between micro-batches; draw them where the batch is made, or leave"
                " 'pipeline' out"
            )

    def _backward(self, now: Pass, result: Any, leaves: list[Tensor], work: Work, messages: Messages, ran: Ran) -> None:
        last = self.spans[now.stage].is_last
        # the backward pass of a loss under autocast runs without autocast in Lightning, too
        with torch.autocast(self.device.type, enabled=False):
            if last and work.rest is None:
                # the weighted loss of the micro-batch
                result.backward()
            else:
                if last:
                    cut_off = ran.results[now.micro_batch]
                    pairs = zip(tree_leaves(result), tree_leaves(cut_off), strict=True)
                    reached = [(value, leaf.grad) for value, leaf in pairs if isinstance(value, Tensor)]
                    reached = [(value, grad) for value, grad in reached if value.requires_grad and grad is not None]
                    outputs, grads = [value for value, _ in reached], [grad for _, grad in reached]
                else:
                    outputs, grads = messages.receive_back(now.stage, now.micro_batch, result)
                    ran.times.begin()
                # All outputs in one call: they share a graph, which the first of several calls would free.
                if outputs:
                    torch.autograd.backward(outputs, grads)
        ran.times.end(now)
        if now.stage:
            messages.send_back(now.stage, now.micro_batch, leaves)


def _refuse_placeholders(returned: Any) -> None:
    for found in without_values(returned):
        raise ModelError(
            f"pipeline: the step returns a tensor of shape {tuple(found.shape)!r} that is computed from a tensor of"
            " an earlier stage which no block returns; let blocks return it, or leave 'pipeline' out"
        )


def loss_of(returned: Any) -> Tensor:
    """Return the loss in the result of a training step.

    Raises:
        ModelError: There is none.
    """
    loss = returned.get("loss") if isinstance(returned, dict) else returned
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise ModelError(
            f"pipeline: training_step returned {type(returned).__name__!r}; allowed are a loss of one number, and a"
            " dictionary with a 'loss'"
        )
    return loss


def joined(results: Sequence[Any], placeholders: Any) -> Any:
    """Join a block's results for micro-batches into its result for the batch.

    Tensors are concatenated along the dimension in which their shape differs from that for the batch.

    Raises:
        ModelError: There is no such dimension, or more than one; or another value differs between micro-batches.
    """
    flat, form = tree_flatten(placeholders)
    parts = [tree_leaves(result) for result in results]
    return tree_unflatten([_join(whole, own) for whole, own in zip(flat, zip(*parts, strict=True), strict=True)], form)


def _join(whole: Any, parts: tuple[Any, ...]) -> Any:
    if not isinstance(whole, Tensor) or whole.shape == parts[0].shape:
        if not all(_same(part, parts[0]) for part in parts[1:]):
            found = f"of shape {tuple(whole.shape)!r}" if isinstance(whole, Tensor) else repr(parts[0])
            raise ModelError(
                "a batch was cut into micro-batches, and the last block returns, in addition to its"
                f" samples, a value that differs between micro-batches ({found}), such as a loss:"
                " that of the batch cannot be computed from them. Leave 'pipeline' out, or take"
                " micro_batches=1"
            )
        # The first value is used for all, and its gradient goes back with the first micro-batch only. That is the
        # full gradient, because the value does not depend on the samples.
        return parts[0]
    unlike = dim_of_samples(whole, parts[0])
    if unlike is None or sum(part.shape[unlike] for part in parts) != whole.shape[unlike]:
        raise ModelError(
            f"a batch was cut into micro-batches, for which the last block returns tensors of shapes"
            f" {[tuple(part.shape) for part in parts]!r}, and {tuple(whole.shape)!r} for the batch; allowed is one"
            " dimension, that of the samples, in which they add up: leave 'pipeline' out, or take micro_batches=1"
        )
    return torch.cat(parts, dim=unlike)


def dim_of_samples(whole: Tensor, part: Tensor) -> int | None:
    """Return the only dimension in which the result for a micro-batch differs from that for the batch, or None."""
    unlike = [dim for dim, n in enumerate(whole.shape) if n != part.shape[dim]]
    return unlike[0] if len(unlike) == 1 else None


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.shape == other.shape and torch.equal(one, other)
    return isinstance(one, PLAIN) and bool(one == other)


def detached(values: Any) -> Any:
    """Detach all tensors in nested containers."""
    return tree_map(lambda value: value.detach() if isinstance(value, Tensor) else value, values)
