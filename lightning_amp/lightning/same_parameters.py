"""Parameters that ranks hold in common are still equal: compared before validations, in saves, and at the end of a fit.

A replicated parameter is compared over all ranks, a shard over the data axis. Gradients are made equal, so only what a
rank writes by itself can tell them apart; then ranks train different models without an error, and a checkpoint has
rank 0's. It is a warning, for a plain strategy would go on too. Unlike devices may round an optimiser's step in unlike
ways: below `TOLERANCE` nothing is said.

Collectives per look: one all-gather of a number per parameter; and for parameters whose number differs, broadcasts of
them and another all-gather. Known limits: buffers are not compared, they become rank 0's; changes whose bits add up to
nothing are not seen.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp.lightning._compat import rank_zero_warn

TOLERANCE = 1e-5
"""Largest difference that is not told, relative to the parameter's largest entry; of half precision, `ROUNDINGS`."""
ROUNDINGS = 4
SHOWN = 5
"""Parameters that are named."""
AT_ONCE = 2**22
"""Entries of a parameter that are compared at once, in double precision."""
WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def warn_of_different_parameters(
    module: nn.Module, sharded: Iterable[nn.Parameter], mesh: DeviceMesh, *, step: int
) -> None:
    """Warn where ranks no longer have the parameters that they should have in common; all ranks call it.

    Args:
        module: With the same parameters, by name, on every rank.
        sharded: Those of which a rank of the model axis has a part of its own.
        mesh: With the axes "data" and "model".
        step: For the warning.
    """
    if mesh.size() == 1:
        return
    found = _differing(module, {id(parameter) for parameter in sharded}, mesh)
    if found:
        first = "; ".join(f"{name!r} by {off:.1e}, on ranks {ranks!r}" for name, off, ranks in found[:SHOWN])
        more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        rank_zero_warn(
            f"after step {step}, parameters differ between ranks that should have the same (by so much of the first"
            f" such rank's largest entry): {first}{more}. These ranks train different models, and a checkpoint has the"
            " first one's. A rank changes parameters by something that it alone knows: a norm of gradients taken by"
            " hand where the plan splits parameters (trainer.strategy.gradient_norm() is the same on all),"
            " torch.autograd.grad inside a split decoder, or its own cells or random numbers. lightning-amp verify"
            " compares with one device"
        )


@torch.no_grad()
def _differing(module: nn.Module, parts: set[int], mesh: DeviceMesh) -> list[tuple[str, float, list[int]]]:
    """Name, largest relative difference and ranks, of parameters that differ by more than rounding."""
    named = list(module.named_parameters())
    if not named:
        return []
    data, model = mesh["data"].get_group(), mesh.size(1)
    everyones = _gathered(torch.stack([_print_of(p) for _, p in named]), mesh)

    def first_with(i: int, rank: int) -> int:
        """The mesh is row-major: a data group's ranks have the same remainder."""
        return rank % model if id(named[i][1]) in parts else 0

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
        off.append(_distance(named[i][1], first_with(i, rank), data if part else None))
    offs = _gathered(torch.stack(off), mesh)
    found = []
    for at, i in enumerate(suspects):
        name, p = named[i]
        limit = max(TOLERANCE, ROUNDINGS * torch.finfo(p.dtype).eps if p.is_floating_point() else 0.0)
        # written so that nan counts as different
        if far := [rank for rank, other in enumerate(offs) if not other[at] <= limit]:
            found.append((name, max((offs[rank][at] for rank in far), key=_size), far))
    return sorted(found, key=lambda row: _size(row[1]), reverse=True)


def _size(off: float) -> float:
    return math.inf if math.isnan(off) else off


def _gathered(row: Tensor, mesh: DeviceMesh) -> list[list[Any]]:
    everyones = [torch.empty_like(row) for _ in range(mesh.size())]
    dist.all_gather(everyones, row)
    return [other.tolist() for other in everyones]


def _print_of(parameter: Tensor) -> Tensor:
    """The sum of the entries' bits as integers: exact, whatever the order, and no copy is made."""
    real = torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter.detach()
    words = real.contiguous().reshape(-1).view(WORDS[real.element_size()])
    return words.sum(dtype=torch.int64)


def _distance(parameter: Tensor, first: int, group: ProcessGroup | None) -> Tensor:
    """Largest difference from the first rank's entries, relative to the largest of them; nan equals nan."""
    wide = torch.complex128 if parameter.is_complex() else torch.float64
    off, largest = [], []
    for part in torch.split(parameter.detach().reshape(-1), AT_ONCE):
        theirs = part.clone()
        dist.broadcast(theirs, src=first, group=group)
        mine, theirs = part.to(wide), theirs.to(wide)
        same = (mine == theirs) | (mine.isnan() & theirs.isnan())
        off.append(torch.where(same, 0, mine - theirs).abs().max())
        largest.append(torch.where(theirs.isfinite(), theirs, 0).abs().max())
    return torch.stack(off).max() / torch.stack(largest).max().clamp(min=torch.finfo(torch.float64).tiny)
