"""Check that ranks are equal replicas: same model, same batch and random streams in a model group, saves by all ranks.

A save by one rank alone would deadlock. Every rank counts its saves in the store of the process group, and waits until
all others have counted as many. This needs a few requests to the store per save, and no collective.

Batch and random streams of a model group are compared before every batch. Different batches raise an error, because the
ranks would add parts of different losses. Different random streams are made equal, because rank 0 alone may have drawn
numbers, such as for a figure. Collectives per batch, if the model axis has more than one rank: an all-reduce of
four integers, and a broadcast if random streams differ.

Known limits: of a large tensor some thousand entries are compared, of a sharded tensor its shape and splits, and of a
batch only tensors and arrays of numbers. Other generators, or those of other devices, are not compared.
"""

import random
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parameter import is_lazy

# the default store has no public name
from lightning_amp._torch import default_store
from lightning_amp.data.batch import dense_parts, parts_in
from lightning_amp.data.sparse_counts import SparseCounts
from lightning_amp.errors import AmpError, DataError, InstallError, PlanError
from lightning_amp.random_streams import random_streams, set_random_streams
from lightning_amp.sharding.sharded_tensor import ShardedTensor
from lightning_amp.techniques.data.batch_norm import is_shared

PATIENCE_S = 600.0
"""Seconds that ranks may be apart: they have taken the same step, but one may have more to do after a validation."""
PATIENCE_AFTER_ERROR_S = 5.0
"""The same after an error on this rank: the other ranks fail too, or never arrive."""
POLL_S = 0.02


def wait_for_all(*, rank: int, ranks: int, failed: bool = False) -> None:
    """Wait until every rank has called this as often as this one.

    Args:
        failed: Whether this rank's run has failed, and a callback saves a checkpoint.

    Raises:
        AmpError: Other ranks did not arrive within `PATIENCE_S`, or the shorter time after an error, which is then its
            context.
    """
    if ranks == 1 or not dist.is_initialized():
        return
    store = default_store()
    mine = store.add(_key(rank), 1)
    patience = PATIENCE_AFTER_ERROR_S if failed else PATIENCE_S
    deadline = time.monotonic() + patience
    missing = list(range(ranks))
    while missing := [other for other in missing if store.add(_key(other), 0) < mine]:
        if time.monotonic() > deadline:
            # otherwise this rank's count would be one too high at the next save, and it would wait in vain
            store.add(_key(rank), -1)
            raise AmpError(
                f"rank {rank} saves a checkpoint, and ranks {missing!r} did not within {patience:g} s; "
                "every rank has to, because some hold a part of it. Call trainer.save_checkpoint on "
                "every rank: only one writes the file"
            )
        time.sleep(POLL_S)


def _key(rank: int) -> str:
    return f"lightning_amp/saves/{rank}"


T = TypeVar("T")
Broadcast = Callable[..., Any]
"""A function that returns the picklable value of rank `src`, 0 by default, on every rank, like `Strategy.broadcast`."""


def decide_on_one_rank(decide: Callable[[], T], *, rank: int, broadcast: Broadcast, decider: int = 0) -> T:
    """Run `decide` on rank 0, or on `decider`, and return its result, or raise its error, on every rank.

    An AmpError is raised with the same text on all ranks. For other errors, the other ranks raise a PlanError.
    """
    decided: T | None = None
    error: Exception | None = None
    if rank == decider:
        try:
            decided = decide()
        except Exception as raised:
            error = raised
    first_error = error
    if error is not None and not isinstance(error, AmpError):
        # the error may not be picklable, and the other ranks must not wait forever
        first_error = PlanError(
            f"rank {decider} failed to plan: {type(error).__name__}: {error}; its own traceback says more"
        )
    both = decided, first_error
    decided, first_error = broadcast(both, src=decider) if decider else broadcast(both)
    if (failure := error or first_error) is not None:
        raise failure
    return cast(T, decided)


@torch.no_grad()
def take_buffers_of_first(module: nn.Module, group: ProcessGroup) -> None:
    """Copy buffers from the first data rank to the others, except batch statistics that they share anyway."""
    for child in module.modules():
        if not is_shared(child):
            for buffer in child.buffers(recurse=False):
                # NCCL sends contiguous tensors only
                sent = buffer.contiguous()
                dist.broadcast(sent, group=group, group_src=0)
                # an expanded tensor cannot be written to, and usually is equal already
                if sent is not buffer and not torch.equal(sent, buffer):
                    buffer.copy_(sent)


def check_replicas(module: nn.Module, *, rank: int, broadcast: Broadcast, any_rank: Callable[[bool], bool]) -> None:
    """Check that every rank has built the same module, before tensors are sent between them.

    Args:
        any_rank: Collective that returns whether a condition holds on at least one rank.

    Raises:
        InstallError: Uninitialised parameters, or parameters and buffers that differ between ranks in name,
            order, shape or dtype.
    """
    tensors = [*module.named_parameters(), *module.named_buffers()]
    lazy = [name for name, tensor in tensors if is_lazy(tensor)]
    # decided over all ranks: if one of them raised alone, the others would wait for it in the broadcast
    if any_rank(bool(lazy)):
        raise InstallError(
            f"every parameter must have its shape before training starts; {lazy!r} have none yet on rank"
            f" {rank}. Run one batch through the lazy layers in configure_model"
        )
    mine = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors]
    first = broadcast(mine)
    if any_rank(mine != first):
        differing = sorted(set(mine) ^ set(first)) or "their order"
        raise InstallError(
            f"the model must be the same on every rank; on rank {rank} parameters or buffers differ "
            f"from another rank's: {differing!r}. Build the model from values that are the same on "
            "all ranks, not from a rank's data"
        )


COMPARED = 4096
"""Number of entries of a tensor that are compared, evenly spaced."""


def make_sure_of_same_batch(batch: object, mesh: DeviceMesh, *, device: torch.device) -> None:
    """Compare a batch, and the random streams, over the model axis; all its ranks must call this.

    Raises:
        DataError: The ranks of the group have different batches; raised on all of them.
    """
    prints = [_print_of(batch), _print_of_generators(device)]
    # one all-reduce for maximum and minimum, which is minus the maximum of the negatives; equal if all ranks agree
    both = torch.tensor([*prints, *(-p for p in prints)], device=device)
    dist.all_reduce(both, dist.ReduceOp.MAX, group=mesh.get_group())
    largest, smallest = both[:2].tolist(), (-both[2:]).tolist()
    if largest[1] != smallest[1]:
        share_draws(mesh=mesh, device=device)
    if largest[0] != smallest[0]:
        shapes = [_shape(part) for part in parts_in(batch) if isinstance(part, Tensor | SparseCounts)]
        raise DataError(
            f"the same batch is needed on the {mesh.size()} ranks of a model group, found different ones, seen from"
            f" its rank {mesh.get_local_rank()}: shapes here are {shapes!r}. Let Lightning make the sampler, or"
            " make it with num_replicas and rank of trainer.distributed_sampler_kwargs, not those of all ranks. A rank"
            " that reads its own part of a tensor hands over lightning_amp.as_sharded(...) in on_after_batch_transfer"
        )


def share_draws(*, mesh: DeviceMesh, device: torch.device) -> None:
    """Copy the random streams of a model group's first rank to the others; a collective over the model axis."""
    box = [random_streams(device)]
    dist.broadcast_object_list(box, group=mesh.get_group(), group_src=0)
    set_random_streams(box[0], device)


def _print_of(batch: object) -> int:
    seen = 0
    for tensor in _compared(batch, set()):
        seen = zlib.crc32(repr((_shape(tensor), tensor.dtype)).encode(), seen)
        if isinstance(tensor, ShardedTensor):
            seen = zlib.crc32(str(tensor.splits).encode(), seen)
            continue
        for part in _parts(tensor.detach()):
            some = part.reshape(-1)[:: max(1, part.numel() // COMPARED)].cpu()
            # a clone, because a single entry may have any stride, with which viewing as bytes fails
            some = some.clone(memory_format=torch.contiguous_format)
            seen = zlib.crc32(some.view(torch.uint8).numpy().tobytes(), seen)
    return seen


def _compared(batch: object, seen: set[int]) -> Iterator[Tensor]:
    """Yield all tensors and arrays of numbers in a batch, also those in attributes of the user's objects."""
    for part in parts_in(batch):
        if id(part) in seen or isinstance(part, type):
            continue
        seen.add(id(part))
        if isinstance(part, Tensor):
            yield part
        elif isinstance(part, SparseCounts):
            yield from part.tensors()
        elif isinstance(part, np.ndarray):
            if part.dtype.kind in "biuf":
                flat = np.ascontiguousarray(part).reshape(-1)
                some = flat[:: max(1, flat.size // COMPARED)].copy()
                # padding bytes of long doubles are undefined; torch supports neither these nor other byte orders
                some = some.astype(np.float64) if some.itemsize > 8 else some
                yield torch.from_numpy(some.view(np.uint8))
        else:
            yield from _compared(getattr(part, "__dict__", {}), seen)


def _parts(tensor: Tensor) -> Iterable[Tensor]:
    """Return the dense tensors whose values are compared."""
    if tensor.is_meta:
        return ()
    if tensor.is_nested:
        return [part for each in tensor.unbind() for part in _parts(each)]
    return dense_parts(tensor.coalesce() if tensor.layout is torch.sparse_coo else tensor)


def _print_of_generators(device: torch.device) -> int:
    # only the integers of python's state: the hash of None differs between processes
    seen = hash(random.getstate()[1]) & 0xFFFFFFFF
    name, words, *rest = np.random.get_state()
    seen = zlib.crc32(np.asarray(words).tobytes() + repr((name, *rest)).encode(), seen)
    seen = zlib.crc32(torch.get_rng_state().numpy().tobytes(), seen)
    if device.type == "cuda":
        seen = zlib.crc32(torch.cuda.get_rng_state(device).numpy().tobytes(), seen)
    return seen


def _shape(part: Tensor | SparseCounts) -> tuple[int, ...]:
    # nested tensors have no shape, or one whose symbols differ between processes
    return () if isinstance(part, Tensor) and part.is_nested else tuple(part.shape)
