"""A parameter of which every rank of a mesh axis owns a shard: gradient and optimiser state exist there only."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh


class Parts(Protocol):
    """How a tensor is sharded over a mesh axis."""

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh axis."""
        ...

    def own(self, whole: Tensor) -> Tensor:
        """This rank's part of the whole, a view or a copy."""
        ...

    def put(self, whole: Tensor, own: Tensor) -> None:
        """Write this rank's part into the whole."""
        ...

    def join(self, own: Tensor) -> Tensor:
        """The whole from every rank's part; a collective."""
        ...


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class ShardedParameter:
    """One sharded parameter; `shard_parameter` makes it.

    Attributes:
        whole: The parameter that was replaced; its values are stale while the shard is trained.
        shard: The rank's own part, a parameter of its own.
        module: The module that holds the shard, under `name`.
        name: Name of the parameter in that module.
        parts: How it is sharded: `Runs` (ranks/even_runs.py), or `VertexShards` (nodes/vertex_shards.py).
        version: How often the shard had been written when it was made.
    """

    whole: nn.Parameter
    shard: nn.Parameter
    module: nn.Module
    name: str
    parts: Parts
    version: int

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh axis."""
        return self.parts.mesh

    def own(self, whole: Tensor) -> Tensor:
        """This rank's part of a tensor with the shape of the whole parameter, a view or a copy."""
        return self.parts.own(whole)

    def join(self, own: Tensor) -> Tensor:
        """The whole tensor from every rank's part; a collective."""
        return self.parts.join(own)

    @property
    def trained(self) -> bool:
        """Whether this rank's shard may differ from its part of the whole parameter."""
        # both: an optimiser may write through `.data`, which is not counted, and a step may change nothing
        changed = self.shard._version != self.version
        return changed or not torch.equal(self.shard.to(self.whole.device), self.own(self.whole))

    def offload(self) -> None:
        """Keep the whole parameter in the host's memory from now on; without values there is nothing to keep."""
        if not self.whole.is_meta:
            self.whole.data = self.whole.data.cpu()

    @torch.no_grad()
    def restore(self) -> None:
        """Write the trained values of all ranks into the whole parameter; a collective."""
        self._replace(self.join(self.shard))

    @torch.no_grad()
    def restore_own(self) -> None:
        """Write the trained values of this rank into the whole parameter, and nan elsewhere; no collective."""
        whole = torch.full_like(self.whole, torch.nan, device=self.shard.device)
        self.parts.put(whole, self.shard)
        self._replace(whole)

    def _replace(self, values: Tensor) -> None:
        self.whole.data = values.to(self.whole.dtype)
        self.whole.requires_grad_(self.shard.requires_grad)


def shard_parameter(module: nn.Module, name: str, whole: nn.Parameter, *, parts: Parts) -> ShardedParameter:
    """Give a module this rank's shard of a parameter under a name.

    Args:
        module: Gets the shard.
        parts: How it is sharded.
    """
    own = parts.own(whole.detach()).clone(memory_format=torch.contiguous_format)
    shard = nn.Parameter(own, requires_grad=whole.requires_grad)
    module.register_parameter(name, shard)
    return ShardedParameter(
        whole=whole, shard=shard, module=module, name=name, parts=parts, version=shard._version
    )
