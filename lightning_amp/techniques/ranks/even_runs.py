"""Shard items over a mesh axis in runs of ceil(n / R), as torch's `Shard` splits rows.

The last run that has any may be shorter, and ranks after it have none: 5 things on 4 ranks are 2, 2, 1 and 0.
Legend: n things, R ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp.techniques.ranks import collectives


def run_length(n: int, mesh: DeviceMesh) -> int:
    """Things of the ranks that have most."""
    return -(-n // mesh.size())


def own_run(n: int, mesh: DeviceMesh) -> slice:
    """The things of this rank; may be empty."""
    run = run_length(n, mesh)
    start = min(mesh.get_local_rank() * run, n)
    return slice(start, min(start + run, n))


def join_runs(own: Tensor, n: int, mesh: DeviceMesh, *, dim: int) -> Tensor:
    """The whole tensor from every rank's run of a dimension; one all-gather, without gradients."""
    rows = own.detach().movedim(dim, 0)
    # the size is written out, for -1 has no meaning where this rank has no row
    flat = rows.reshape(len(rows), prod(rows.shape[1:]))
    padded = F.pad(flat, (0, 0, 0, run_length(n, mesh) - len(rows)))
    whole = collectives.all_gather(mesh, padded).flatten(0, 1)[:n]
    return whole.reshape(n, *rows.shape[1:]).movedim(0, dim).contiguous()


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class Runs:
    """A tensor of which every rank has a run of one dimension."""

    mesh: DeviceMesh
    n: int
    dim: int

    def own(self, whole: Tensor) -> Tensor:
        """This rank's part of the whole; a view."""
        run = own_run(self.n, self.mesh)
        return whole.narrow(self.dim, run.start, run.stop - run.start)

    def join(self, own: Tensor) -> Tensor:
        """The whole from every rank's part; a collective."""
        return join_runs(own, self.n, self.mesh, dim=self.dim)

    def boxes(self, own: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """Blocks of adjacent entries of this rank's part: offsets in the whole tensor, and the entries."""
        if own.numel():
            start = own_run(self.n, self.mesh).start
            yield tuple(start if dim == self.dim else 0 for dim in range(own.dim())), own
