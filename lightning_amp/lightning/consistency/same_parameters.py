"""Check that replicated parameters and buffers are equal on all ranks: at validations, in saves, at the end of a fit.

If the policy has chosen the plan, buffers are also compared after the first step, and a difference raises an error.

A replicated parameter or buffer is compared over all ranks, a shard over the data axis, and a shard of fsdp over the
groups of ranks that have equal shards. Gradients are made equal, so parameters differ only if a rank changes them by
itself; buffers differ by running statistics of the rank's own cells. The ranks then train different models without an
error, and a checkpoint has those of rank 0. This is a warning, because a plain strategy would continue too. Different
devices may round an optimiser's step differently: differences below `TOLERANCE` are not reported.

Buffers that may differ are not compared: those outside checkpoints, integers (counters, generator states), states of
metrics, and statistics that BatchNorm keeps per rank if `share_batch_statistics=False` was requested.

Collectives per check: one all-gather of a number per tensor; for tensors whose numbers differ, broadcasts of the
tensors and another all-gather. Known limit: changes are not detected if the sum of the bits stays the same.
"""

import math
from collections.abc import Container, Iterable, Mapping, Set
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_amp.errors import PlanError
from lightning_amp.lightning._compat import rank_zero_warn
from lightning_amp.techniques.contract.sharded_parameter import ShardedParameter, is_split, local
from lightning_amp.techniques.data.batch_norm import is_local, is_shared

TOLERANCE = 1e-5
"""Largest unreported difference, relative to the largest entry; in half precision, `ROUNDINGS` times eps."""
ROUNDINGS = 4
SHOWN, NEW_SHOWN = 5, 3
"""Largest numbers of tensors named in a message: that differ, and that are new."""
AT_ONCE = 2**22
"""Entries of a tensor that are compared at a time, in double precision."""
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


Difference = tuple[str, float, list[int]]
"""Name, largest difference relative to the first rank's largest entry, and ranks that differ from the first one."""

SHARE_STATISTIC = (
    "Before a running statistic is changed, sum its terms and its number of samples over the ranks, with"
    " torch.distributed.all_reduce, or in a LightningModule self.trainer.strategy.reduce(..., reduce_op='sum'); or let"
    " all ranks read the same samples, with model_parallel_size=devices where the model has a decomposed decoder"
)
"""Advice for a buffer that depends on a rank's own cells."""
ADVICE = {
    "parameters": (
        "A rank changes parameters by values that the other ranks do not have: a norm of gradients taken by hand where"
        " the plan splits parameters (trainer.strategy.gradient_norm() is the same on all), torch.autograd.grad inside"
        " a split decoder, or its own samples or random numbers. lightning-amp verify compares with one device"
    ),
    "batch statistics": (
        "Ranks share them, and nothing that a training step computes makes them differ: unless your code writes into"
        " these buffers on some ranks only, this is a fault of lightning_amp; please report it, and train with"
        " strategies='S1' until then"
    ),
    "buffers": (
        "A rank has changed them from its own samples or random numbers, as a running statistic of the batch is"
        f" changed. {SHARE_STATISTIC}. lightning-amp verify says what it does to the loss"
    ),
}
"""Causes of differences by kind of tensor, and advice."""


def warn_of_differences(
    module: nn.Module,
    sharded: Iterable[ShardedParameter],
    mesh: DeviceMesh,
    *,
    step: int,
    model_ranks_differ: bool = False,
    groups: DeviceMesh | None = None,
) -> None:
    """Warn if replicated parameters and buffers differ between ranks; all ranks must call it.

    Args:
        sharded: Sharded parameters; those sharded in place (`in_place`) are not compared.
        mesh: Mesh with the axes "data" and "model".
        model_ranks_differ: Whether parameters are on some model ranks only, and on the device "meta" on the others.
        groups: Mesh with the axes "replicate", "shard" and "model" if parameters are sharded over a part of the data
            axis. If they are sharded over the complete axis, no two ranks have equal shards, and none are compared.
    """
    if mesh.size() == 1:
        return
    in_place = {id(parameter.shard): parameter.in_place for parameter in sharded}
    named: dict[str, Tensor] = {
        name: p for name, p in module.named_parameters() if not is_split(p) and not in_place.get(id(p))
    }
    parts = set(in_place)
    held = {**named, **common_buffers(module)}
    if model_ranks_differ:
        held, parts = _of_stages(held, mesh.device_type)
    found = differing(held, mesh, parts)
    if groups is not None:
        # ranks with equal shards differ in "replicate" only, the first axis of the mesh
        rows = {name: local(p) for name, p in module.named_parameters() if is_split(p)}
        found += differing(rows, groups, {id(row) for row in rows.values()})
        named |= rows
    parts_of, of_kind = dict(module.named_modules()), {kind: list[Difference]() for kind in ADVICE}
    for row in found:
        kind = "parameters"
        if row[0] not in named:
            kind = "batch statistics" if is_shared(parts_of[row[0].rpartition(".")[0]]) else "buffers"
        of_kind[kind].append(row)
    for kind, rows_of_kind in of_kind.items():
        if rows_of_kind:
            rank_zero_warn(
                f"after step {step}, {_named(rows_of_kind, kind)}. These ranks train different models, and a checkpoint"
                f" has the first one's. {ADVICE[kind]}"
            )


def refuse_own_statistics(module: nn.Module, mesh: DeviceMesh, *, model_ranks_differ: bool = False) -> None:
    """Check after the first step that no rank has changed buffers from its own cells; all ranks must call it.

    Raises:
        PlanError: Such buffers differ; on all ranks.
    """
    if mesh.size(0) == 1:
        return
    held, parts = common_buffers(module), set[int]()
    if model_ranks_differ:
        held, parts = _of_stages(held, mesh.device_type)
    if found := differing(held, mesh, parts):
        raise PlanError(
            f"after the first step, {_named(found)}. A rank has changed them from its own samples, as a running"
            f" statistic of the batch is changed, so that the {mesh.size(0)} ranks of the data axis train another model"
            f" than one device does. {SHARE_STATISTIC}. With strategies='S1' by name the run goes on with a warning; a"
            " buffer that nothing reads can be registered with persistent=False"
        )


def refuse_new_parameters(known: Container[int], module: nn.Module, optimizers: Iterable[Optimizer]) -> None:
    """Check that optimizers train only parameters whose ids are `known`: of others no gradient is averaged over ranks.

    Raises:
        PlanError: An optimizer has another parameter, added during training or kept outside the module.
    """
    trained = (p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
    if not (new := [parameter for parameter in trained if id(parameter) not in known]):
        return
    names = {id(parameter): repr(name) for name, parameter in module.named_parameters()}
    shown = [names.get(id(p), f"one of shape {tuple(p.shape)!r} outside the module") for p in new[:NEW_SHOWN]]
    more = f" and {len(new) - NEW_SHOWN} more" if len(new) > NEW_SHOWN else ""
    raise PlanError(
        f"an optimizer trains {', '.join(shown)}{more}, which the module did not have when its plan was installed:"
        " ranks would not average its gradients, and would train different models. On several ranks, register every"
        " parameter in __init__ or configure_model, and freeze it until it is needed; or train on one device"
    )


def _of_stages(held: Mapping[str, Tensor], device: str) -> tuple[dict[str, Tensor], set[int]]:
    """Return tensors, with zeros where they are on "meta", and the ids of those to compare over the data axis only."""
    absent = torch.tensor([tensor.is_meta for tensor in held.values()], dtype=torch.uint8, device=device)
    dist.all_reduce(absent, dist.ReduceOp.MAX)
    found = {name: torch.zeros(()) if tensor.is_meta else tensor for name, tensor in held.items()}
    somewhere = zip(found.values(), absent.tolist(), strict=True)
    return found, {id(tensor) for tensor, missing in somewhere if missing}


def _named(found: list[Difference], what: str = "buffers") -> str:
    first = "; ".join(f"{name!r} by {off:.1e}, on ranks {ranks!r}" for name, off, ranks in found[:SHOWN])
    more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return (
        f"{what} differ between ranks that should have the same (by so much of the first such rank's largest entry):"
        f" {first}{more}"
    )


def common_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that should be equal on all ranks, by name."""
    return {
        f"{at}.{name}" if at else name: buffer
        for at, child in module.named_modules()
        if not isinstance(child, Metric) and not is_local(child)
        for name, buffer in child.named_buffers(recurse=False)
        if name not in child._non_persistent_buffers_set
        and (buffer.is_floating_point() or buffer.is_complex())
        and buffer.layout is torch.strided
    }


@torch.no_grad()
def differing(held: Mapping[str, Tensor], mesh: DeviceMesh, parts: Set[int] = frozenset()) -> list[Difference]:
    """Return what differs by more than rounding, the largest difference first; a collective of all ranks.

    `parts`: ids of tensors that must be equal over the first axis of the mesh only.
    """
    named = list(held.items())
    if not named:
        return []
    inner, device = mesh.size() // mesh.size(0), mesh.device_type
    everyones = _gathered(torch.stack([print_of(p).to(device) for _, p in named]), mesh)

    def first_with(i: int, rank: int) -> int:
        """Return the rank to compare with; ranks along the first axis of the row-major mesh have the same remainder."""
        return rank % inner if id(named[i][1]) in parts else 0

    # fingerprints show that bits differ, but not by how much, which is computed only for suspects
    # every rank computes suspects from all fingerprints, so that all ranks issue the same broadcasts
    suspects = [
        i
        for i in range(len(named))
        if any(seen[i] != everyones[first_with(i, rank)][i] for rank, seen in enumerate(everyones))
    ]
    if not suspects:
        return []
    rank, off = dist.get_rank(), []
    for i in suspects:
        part = id(named[i][1]) in parts
        group = mesh.get_group(0) if part else None
        off.append(_distance(named[i][1], first_with(i, rank), group, device))
    offs = _gathered(torch.stack(off), mesh)
    found = []
    for at, i in enumerate(suspects):
        name, p = named[i]
        limit = max(TOLERANCE, ROUNDINGS * torch.finfo(p.dtype).eps if p.is_floating_point() else 0.0)
        # negated, so that nan counts as different
        if far := [rank for rank, other in enumerate(offs) if not other[at] <= limit]:
            found.append((name, max((offs[rank][at] for rank in far), key=_size), far))
    return sorted(found, key=lambda row: _size(row[1]), reverse=True)


def _size(off: float) -> float:
    return math.inf if math.isnan(off) else off


def _gathered(row: Tensor, mesh: DeviceMesh) -> list[list[Any]]:
    everyones = [torch.empty_like(row) for _ in range(mesh.size())]
    dist.all_gather(everyones, row)
    return [other.tolist() for other in everyones]


def print_of(held: Tensor) -> Tensor:
    """Sum the entries' bits as integers: exact in any order, and without a copy."""
    real = torch.view_as_real(held.detach()) if held.is_complex() else held.detach()
    words = real.contiguous().reshape(-1).view(WORDS[real.element_size()])
    return words.sum(dtype=torch.int64)


def _distance(parameter: Tensor, first: int, group: ProcessGroup | None, device: str) -> Tensor:
    """Return the largest difference from rank `first`, relative to its largest entry; nan equals nan."""
    wide = torch.complex128 if parameter.is_complex() else torch.float64
    if not parameter.numel():
        # a parameter with few rows may have none in this group
        return torch.zeros((), dtype=torch.float64, device=device)
    off, largest = [], []
    for whole in torch.split(parameter.detach().reshape(-1), AT_ONCE):
        part = whole.to(device)
        theirs = part.clone()
        dist.broadcast(theirs, src=first, group=group)
        mine, theirs = part.to(wide), theirs.to(wide)
        same = (mine == theirs) | (mine.isnan() & theirs.isnan())
        off.append(torch.where(same, 0, mine - theirs).abs().max())
        largest.append(torch.where(theirs.isfinite(), theirs, 0).abs().max())
    return torch.stack(off).max() / torch.stack(largest).max().clamp(min=torch.finfo(torch.float64).tiny)
