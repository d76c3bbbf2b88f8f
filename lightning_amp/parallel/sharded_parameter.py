"""A parameter of which every rank of a mesh axis owns a shard: gradient and optimiser state exist there only."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp.parallel import collectives


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class ShardedParameter:
    """One sharded parameter.

    Attributes:
        whole: The parameter that was replaced; its values are stale while the shard is trained.
        shard: The rank's own part, a parameter of its own.
        module: The module that holds the shard, under `name`.
        name: Name of the parameter in that module.
        dim: The dimension that is split, in runs of ceil(size / R) rows as torch's `Shard` does; the last may be short.
        mesh: The mesh axis.
    """

    whole: nn.Parameter
    shard: nn.Parameter
    module: nn.Module
    name: str
    dim: int
    mesh: DeviceMesh

    def own(self, whole: Tensor) -> Tensor:
        """This rank's part of a tensor with the shape of the whole parameter."""
        run = -(-whole.shape[self.dim] // self.mesh.size())
        start = min(self.mesh.get_local_rank() * run, whole.shape[self.dim])
        return whole.narrow(self.dim, start, min(run, whole.shape[self.dim] - start))

    def join(self, own: Tensor) -> Tensor:
        """The whole tensor from every rank's part; a collective."""
        size = self.whole.shape[self.dim]
        run = -(-size // self.mesh.size())
        rows = own.movedim(self.dim, 0)
        padded = F.pad(rows.reshape(len(rows), -1), (0, 0, 0, run - len(rows)))
        whole = collectives.all_gather(self.mesh, padded).flatten(0, 1)[:size]
        return whole.reshape(size, *rows.shape[1:]).movedim(0, self.dim)

    @torch.no_grad()
    def restore(self) -> None:
        """Write the trained values of all ranks into the whole parameter; a collective."""
        self.whole.copy_(self.join(self.shard))
