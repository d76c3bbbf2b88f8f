"""Make the ranks of a model group read the same cells and draw the same random numbers.

Both are compared before every batch. Other cells stop the run: the ranks would add up parts of different losses. Other
random numbers are put right, for rank 0 may have drawn some, as for a picture.

Collectives per batch, over the model axis, which the strategy asks for only where it has more than one rank: one
all-reduce of four integers, and one broadcast where random numbers differ. Known limits: of a large tensor some
thousand entries are compared, of a sharded tensor its shape and how it is split, and of a batch nothing but its tensors
and arrays of numbers; what a step draws from other generators, or from those of differing devices, is not compared.
"""

import random
import zlib
from collections.abc import Iterable, Iterator

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp.data.batch import dense_parts, parts_in
from lightning_amp.data.sparse_counts import SparseCounts
from lightning_amp.dist.sharded_tensor import ShardedTensor
from lightning_amp.errors import DataError
from lightning_amp.lightning.consistency.replicas import share_random_state

COMPARED = 4096
"""Entries of a tensor, evenly spread."""


def make_sure_of_same_batch(batch: object, mesh: DeviceMesh, *, device: torch.device) -> None:
    """Compare a batch, and the state of the random generators, over the model axis; its ranks all call this.

    Raises:
        DataError: The ranks of the group hold different batches; on all of them.
    """
    prints = [_print_of(batch), _print_of_generators(device)]
    both = torch.tensor([*prints, *(-p for p in prints)], device=device)
    dist.all_reduce(both, dist.ReduceOp.MAX, group=mesh.get_group())
    largest, smallest = both[:2].tolist(), (-both[2:]).tolist()
    if largest[1] != smallest[1]:
        share_draws(mesh=mesh, device=device)
    if largest[0] != smallest[0]:
        raise DataError(
            f"the same batch is needed on the {mesh.size()} ranks of a model group, found different ones, seen from"
            f" its rank {mesh.get_local_rank()}: shapes here are {_shapes(batch)!r}. Let Lightning make the sampler, or"
            " make it with num_replicas and rank of trainer.distributed_sampler_kwargs, not those of all ranks. A rank"
            " that reads its own part of a tensor hands over lightning_amp.as_sharded(...) in on_after_batch_transfer"
        )


def share_draws(*, mesh: DeviceMesh, device: torch.device) -> None:
    """Let the ranks of a model group draw on as the first of them; a collective over the model axis."""
    share_random_state(broadcast=lambda state: _from_first(state, mesh), device=device)


def _from_first(state: object, mesh: DeviceMesh) -> object:
    box = [state]
    group = mesh.get_group()
    dist.broadcast_object_list(box, src=dist.get_global_rank(group, 0), group=group)
    return box[0]


def _print_of(batch: object) -> int:
    seen = 0
    for tensor in _compared(batch, set()):
        seen = zlib.crc32(repr((_shape(tensor), tensor.dtype)).encode(), seen)
        if isinstance(tensor, ShardedTensor):
            seen = zlib.crc32(str(tensor.splits).encode(), seen)
            continue
        for part in _parts(tensor.detach()):
            some = part.reshape(-1)[:: max(1, part.numel() // COMPARED)].cpu()
            # a clone, for a single entry may have any stride, which a view as bytes refuses
            some = some.clone(memory_format=torch.contiguous_format)
            seen = zlib.crc32(some.view(torch.uint8).numpy().tobytes(), seen)
    return seen


def _compared(batch: object, seen: set[int]) -> Iterator[Tensor]:
    """All tensors and arrays of numbers in a batch, those of objects of the user's own too."""
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
                # a long double has bytes that mean nothing; torch has none, and no other order of bytes
                some = some.astype(np.float64) if some.itemsize > 8 else some
                yield torch.from_numpy(some.view(np.uint8))
        else:
            yield from _compared(getattr(part, "__dict__", {}), seen)


def _parts(tensor: Tensor) -> Iterable[Tensor]:
    """The dense tensors whose values are compared."""
    if tensor.is_meta:
        return ()
    if tensor.is_nested:
        return [part for each in tensor.unbind() for part in _parts(each)]
    return dense_parts(tensor.coalesce() if tensor.layout is torch.sparse_coo else tensor)


def _print_of_generators(device: torch.device) -> int:
    # of python's state the integers: the hash of None differs between processes
    seen = hash(random.getstate()[1]) & 0xFFFFFFFF
    name, words, *rest = np.random.get_state()
    seen = zlib.crc32(np.asarray(words).tobytes() + repr((name, *rest)).encode(), seen)
    seen = zlib.crc32(torch.get_rng_state().numpy().tobytes(), seen)
    if device.type == "cuda":
        seen = zlib.crc32(torch.cuda.get_rng_state(device).numpy().tobytes(), seen)
    return seen


def _shapes(batch: object) -> list[tuple[int, ...]]:
    return [_shape(part) for part in parts_in(batch) if isinstance(part, Tensor | SparseCounts)]


def _shape(part: Tensor | SparseCounts) -> tuple[int, ...]:
    # a nested tensor has none, or one whose names differ from process to process
    return () if isinstance(part, Tensor) and part.is_nested else tuple(part.shape)
