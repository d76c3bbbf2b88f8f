"""Define collectives over the model axis, each with the gradient that a sharded computation needs.

    name       forward            backward           the result is used ...
    enter      identity           all-reduce         differently by every rank (its part of the loss, its channels)
    leave      all-reduce         identity           the same on every rank
    total      all-reduce         all-reduce         differently by every rank
    scatter    reduce-scatter     all-gather         as this rank's shard
    gather     all-gather         reduce-scatter     differently by every rank

Each is at most one collective forward and one backward. `torch.distributed.nn.functional` has only the row `total`;
used in place of the others, it would multiply gradients by the number of ranks.

`enter` and `leave` begin and end the sharded region; their autograd nodes have the attribute `behind`
(sharded_region.py).

On a DryAxis nothing is sent, and results have shapes only, to count a step (sharding/splits.py).

A *block* is a tensor [R, ...] whose part r belongs to rank r. All parts have the same size; the caller pads uneven
shards. Legend: R ranks of the mesh axis.
Known limit: second derivatives raise an error.

`Agreement` checks that all ranks issue the same collectives of sharded parameters in the same order. Collectives are
matched by their order only. A rank that skips a block, such as in a branch on its cells, would receive another block's
parameters: wrong numbers if the sizes are equal, a hang if they are not. So before each collective the ranks compare
its purpose: one all-reduce of two integers.

On a CPU they raise before the collective. On a GPU, where reading a number waits for all launched kernels, they check
at the end of the backward pass, before the optimiser's step.

A pass that is only tried (`trying_a_pass`) may raise an error on one rank while the others wait for its collectives.
There every rank ends its pass with the same purpose, also after an error: the others find that the ranks differ, and
raise `RanksDiffer` in place of waiting.
"""

import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import Work
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp._torch import functional_collectives as functional
from lightning_amp.errors import ModelError
from lightning_amp.holding import holding
from lightning_amp.sharding.collectives import start_adding_rows, start_all_to_all
from lightning_amp.sharding.splits import record_dry

Result = TypeVar("Result")

# torch 2.13 renames both, and warns about the old names
_ALL_GATHER = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
_REDUCE_SCATTER = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor


def wait_in_all_reduce(work: Work | None) -> None:
    """Wait for a pending all-reduce; fault detection recognizes waiting ranks by this function.

    The work object keeps the output memory alive until the all-reduce is done, even if an error prevents the wait.
    """
    assert work is not None, "a rank of the group waits for it"
    work.wait()


def enter(mesh: DeviceMesh, *values: Tensor) -> tuple[Tensor, ...]:
    """Return the values unchanged; in the backward pass, one all-reduce sums all their gradients over the ranks."""

    def back(*grads: Tensor | None) -> tuple[Tensor | None, ...]:
        used = [grad for grad in grads if grad is not None]
        # with one gradient there is nothing to concatenate, so no copy
        if len(used) <= 1:
            return tuple(None if grad is None else all_reduce(mesh, grad) for grad in grads)
        # one collective for all gradients, because each has a latency
        flat = all_reduce(mesh, torch.cat([grad.reshape(-1) for grad in used]))
        parts = iter(torch.split(flat, [grad.numel() for grad in used]))
        return tuple(None if grad is None else next(parts).view_as(grad) for grad in grads)

    return linear(lambda *xs: tuple(x.view_as(x) for x in xs), back, *values, behind="outside", unused=True)


def leave(mesh: DeviceMesh, part: Tensor) -> Tensor:
    """Sum over the ranks, for a replicated result (Megatron's *reduce from* the parallel region)."""
    return linear(partial(all_reduce, mesh), lambda grad: grad, part, behind="inside")


def total(mesh: DeviceMesh, part: Tensor) -> Tensor:
    """Sum over the ranks, for a result that every rank uses differently."""
    return linear(partial(all_reduce, mesh), partial(all_reduce, mesh), part)


def scatter(mesh: DeviceMesh, block: Tensor) -> Tensor:
    """Sum a block [R, ...] over the ranks, and return part r on rank r."""
    return linear(partial(reduce_scatter, mesh), partial(all_gather, mesh), block)


def gather(mesh: DeviceMesh, part: Tensor) -> Tensor:
    """Gather the block [R, ...] of all ranks' parts, for a result that every rank uses differently."""
    return linear(partial(all_gather, mesh), partial(reduce_scatter, mesh), part)


@torch.no_grad()
def all_reduce(mesh: DeviceMesh, value: Tensor, op: str = "sum") -> Tensor:
    """Reduce over the ranks, without gradients; `op` is "sum" or "max"."""
    group, value = mesh.get_group(), value.contiguous()
    record_dry(mesh, "all_reduce", value.nbytes)
    return value.clone() if group is None else _wait(functional.all_reduce(value, op, group))


@torch.no_grad()
def all_gather(mesh: DeviceMesh, part: Tensor) -> Tensor:
    """Gather the block [R, ...] of all ranks' parts, without gradients."""
    group, part = mesh.get_group(), part.contiguous()
    record_dry(mesh, "all_gather", part.nbytes)
    if group is None:
        return part.new_zeros(mesh.size(), *part.shape)
    # a new first dim, along which the parts are concatenated
    return _wait(_ALL_GATHER(part[None], 0, group))


@torch.no_grad()
def reduce_scatter(mesh: DeviceMesh, block: Tensor) -> Tensor:
    """Sum a block over the ranks, and return this rank's part, without gradients."""
    group = mesh.get_group()
    record_dry(mesh, "reduce_scatter", block.nbytes)
    if group is None or dist.get_backend(group) == "gloo":
        return start_adding_rows(block, group)()
    return _wait(_REDUCE_SCATTER(block.contiguous(), "sum", 0, group))[0]


def start_exchange(mesh: DeviceMesh, sent: Tensor, n_received: list[int], n_sent: list[int]) -> Tensor:
    """Start an all-to-all of rows, as `start_all_to_all`."""
    record_dry(mesh, "all_to_all", sent.nbytes)
    return start_all_to_all(sent, n_received, n_sent, mesh.get_group())


def _wait(value: Tensor) -> Tensor:
    return value.wait() if isinstance(value, functional.AsyncCollectiveTensor) else value


def linear(
    there: Callable[..., Result], back: Callable[..., Any], *values: Tensor, behind: str = "", unused: bool = False
) -> Result:
    """Apply a linear map with a given adjoint.

    Args:
        there: Values -> the result, or a tuple of results. A result may be a view of a value, but not the value itself,
            as autograd requires.
        back: The adjoint: gradients of the results -> gradients of the values.
        values: Tensors.
        behind: Side of the shared region from which the values come, "outside" or "inside" (sharded_region.py).
        unused: Pass None instead of zeros to `back` for an unused result: with zeros an optimiser would apply decay.
    """
    return cast(Result, _LinearOnce.apply(there, back, behind, unused, *values))  # type: ignore[no-untyped-call]


class _LinearOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, there: Any, back: Any, behind: str, unused: bool, *values: Tensor) -> Any:
        ctx.back, ctx.behind = back, behind or None
        ctx.set_materialize_grads(not unused)
        return there(*values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        found = ctx.back(*grads)
        return None, None, None, None, *(found if isinstance(found, tuple) else (found,))


_TRIED: ContextVar[bool] = ContextVar("tried", default=False)


def trying_a_pass() -> AbstractContextManager[None]:
    """Context manager for a pass of all ranks whose errors are caught, after which the ranks go on together."""
    return holding(_TRIED, True)


def is_tried() -> bool:
    """Whether a pass runs whose errors are caught."""
    return _TRIED.get()


class RanksDiffer(ModelError):
    """The ranks would issue different collectives next."""


class Agreement:
    """Compare descriptions of the next action between the ranks of a mesh axis."""

    def __init__(self, mesh: DeviceMesh, technique: str) -> None:
        self._mesh, self._technique = mesh, technique
        self._unseen: list[tuple[str, Tensor]] = []

    def on(self, what: str) -> None:
        """Compare this rank's next action; a collective. Raises RanksDiffer on every rank if ranks differ."""
        # equal in every process, unlike `hash` of a string
        number = zlib.crc32(what.encode())
        # the maximum of the negated numbers is the negated minimum: one reduction shows whether all are equal
        box = torch.tensor([number, -number], device=self._mesh.device_type)
        wait_in_all_reduce(dist.all_reduce(box, dist.ReduceOp.MAX, group=self._mesh.get_group(), async_op=True))
        self._unseen.append((what, box))
        if self._mesh.device_type == "cpu" or is_tried():
            self.look()

    def after(self, error: BaseException, what: str) -> None:
        """Compare the next action of a rank that has raised an error in a pass that is tried."""
        if is_tried() and isinstance(error, Exception) and not isinstance(error, RanksDiffer):
            self.on(what)

    def look(self) -> None:
        """Check all comparisons since the last call; raises RanksDiffer on every rank if ranks differed."""
        unseen, self._unseen = self._unseen, []
        numbers = torch.stack([box for _, box in unseen]).tolist() if unseen else []
        for (what, _), (largest, smallest) in zip(unseen, numbers, strict=True):
            if largest == -smallest:
                continue
            everyones: list[str] = [""] * self._mesh.size()
            dist.all_gather_object(everyones, what, group=self._mesh.get_group())
            ranks = ", ".join(f"rank {rank} {what}" for rank, what in enumerate(everyones))
            raise RanksDiffer(
                f"under {self._technique} all ranks use the same blocks in the same order, for a block's parameters lie"
                f" on all of them; found: {ranks}. Let every rank run every block, a block that it does not need times"
                " zero, or train with strategies='S1'"
            )
