"""Make ranks start as equal replicas: one decision, one model, one stream of random numbers; and save together.

A save by one rank alone would deadlock. Every rank counts its saves in the store of the process group and waits until
all others have counted as many: some requests to the store per save, no collective.
"""

import os
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import pl_worker_init_function
from torch import nn
from torch.distributed import ProcessGroup, get_global_rank
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader

# the store has no public name
from lightning_amp._torch import default_store
from lightning_amp.errors import AmpError, InstallError, PlanError
from lightning_amp.techniques.data.batch_norm import is_shared

PATIENCE_S = 600.0
"""How far ranks may be apart: they have taken the same step before, but one may have more to do after a validation."""
PATIENCE_AFTER_ERROR_S = 5.0
"""The same once this rank has failed: the others fail with it, or will never come."""
POLL_S = 0.02


def wait_for_all(*, rank: int, ranks: int, failed: bool = False) -> None:
    """Return once every rank has come here as often as this one.

    Args:
        rank, ranks: This rank of so many.
        failed: Whether this rank's run has failed, and a callback saves what there is.

    Raises:
        AmpError: Others have not come within `PATIENCE_S`, or after an error the shorter time; the error is then its
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
Broadcast = Callable[[Any], Any]
"""Rank 0's picklable value on every rank, as `Strategy.broadcast`."""


def decide_on_rank_zero(decide: Callable[[], T], *, rank: int, broadcast: Broadcast) -> T:
    """Let rank 0 decide, and give the decision, or its error, to every rank.

    Raises:
        AmpError: What `decide` raised on rank 0, with the same text on every rank.
        PlanError: On the other ranks, when rank 0 failed in a way that is not an AmpError.
    """
    decided: T | None = None
    error: Exception | None = None
    if rank == 0:
        try:
            decided = decide()
        except Exception as raised:
            error = raised
    told = error
    if error is not None and not isinstance(error, AmpError):
        # it may not survive pickling, and the other ranks must not wait for ever
        told = PlanError(
            f"rank 0 failed to plan: {type(error).__name__}: {error}; its own traceback says more"
        )
    decided, told = broadcast((decided, told))
    if (failure := error or told) is not None:
        raise failure
    return cast(T, decided)


def share_random_state(*, broadcast: Broadcast, device: torch.device) -> None:
    """Continue rank 0's random streams of python, numpy and torch on every rank; rank 0 notices nothing."""
    set_random_state(broadcast(random_state(device)), device)


def random_state(device: torch.device) -> tuple[Any, ...]:
    """Where the random streams of python, numpy and torch are."""
    gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), gpu


def set_random_state(state: tuple[Any, ...], device: torch.device) -> None:
    """Continue from what `random_state` gave."""
    python, numpy, cpu, gpu = state
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)
    if gpu is not None:
        torch.cuda.set_rng_state(gpu, device)


def seed_workers(loader: object, *, data_rank: int) -> None:
    """Let the loader workers of a model group draw the same, where `seed_everything(workers=True)` was called."""
    if not isinstance(loader, DataLoader) or not int(os.environ.get("PL_SEED_WORKERS", "0")):
        return
    if loader.worker_init_fn is None:
        loader.worker_init_fn = partial(pl_worker_init_function, rank=data_rank)


@torch.no_grad()
def take_buffers_of_first(module: nn.Module, group: ProcessGroup) -> None:
    """Give the ranks of the data axis the buffers of its first rank, but for statistics that they share anyway."""
    for child in module.modules():
        if not is_shared(child):
            for buffer in child.buffers(recurse=False):
                dist.broadcast(buffer, src=get_global_rank(group, 0), group=group)


def check_replicas(
    module: nn.Module, *, rank: int, broadcast: Broadcast, any_rank: Callable[[bool], bool]
) -> None:
    """Make sure that every rank has built the same module, before anything is sent between them.

    Args:
        rank, broadcast: The rank, and rank 0's value on every rank.
        any_rank: Whether a condition holds on at least one rank, known to all.

    Raises:
        InstallError: Uninitialised parameters, or parameters and buffers that differ between ranks in name,
            order, shape or type.
    """
    tensors = [*module.named_parameters(), *module.named_buffers()]
    lazy = [name for name, tensor in tensors if is_lazy(tensor)]
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
