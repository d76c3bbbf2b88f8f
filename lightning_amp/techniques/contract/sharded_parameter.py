"""Define a parameter of which every rank of a mesh axis owns a shard, with its gradient and optimiser state."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp.techniques.deferred import DROPPED


def is_split(tensor: Tensor) -> bool:
    """Whether it is a DTensor, of which this rank has a part; its class takes long to import."""
    return hasattr(tensor, "to_local")


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor is returned as it is."""
    return cast(Tensor, cast(Any, tensor).to_local()) if is_split(tensor) else tensor


class Parts(Protocol):
    """How a tensor is sharded over a mesh axis."""

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh axis."""

    def own(self, whole: Tensor) -> Tensor:
        """This rank's part of the whole, a view or a copy."""

    def join(self, own: Tensor) -> Tensor:
        """The whole from every rank's part; a collective."""

    def boxes(self, own: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """Blocks of adjacent entries of this rank's part: offsets in the whole tensor, and the entries."""


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class ShardedParameter:
    """One sharded parameter; `shard_parameter` makes it.

    Attributes:
        whole: The parameter that was replaced; its values are stale while the shard is trained.
        shard: The rank's own part, a separate parameter.
        module: The module that holds the shard, under `name`.
        parts: How it is sharded: `Runs` (ranks/shards.py), or `VertexShards` (nodes/graph_encoder.py).
            Over the data axis torch keeps the shard (fsdp/): a DTensor, whose gradient is reduced when it is there.
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

    @property
    def in_place(self) -> bool:
        """Whether the shard is the parameter itself, with this rank's part as its values."""
        return self.shard is self.whole

    @property
    def shape(self) -> torch.Size:
        """Of the whole parameter."""
        parts: Any = self.parts
        # in place the parameter itself has the shape of the part
        return parts.shape if self.in_place else self.whole.shape

    @property
    def technique(self) -> str:
        """The strategy that has split it."""
        return getattr(self.parts, "technique", "fsdp" if is_split(self.shard) else "S2")

    def own(self, whole: Tensor) -> Tensor:
        """This rank's part of a tensor with the shape of the whole parameter, a view or a copy."""
        return self.parts.own(whole)

    def join(self, own: Tensor) -> Tensor:
        """The whole tensor from every rank's part; a collective, on the ranks' devices wherever the part lies."""
        return self.parts.join(local(own).to(self.mesh.device_type))

    def like_shard(self, own: Tensor) -> Tensor:
        """This rank's part of a tensor as the shard is kept: as a DTensor where torch keeps it."""
        if not is_split(self.shard):
            return own
        shard: Any = self.shard
        whole: Any = type(shard).from_local(
            own, shard.device_mesh, shard.placements, run_check=False, shape=self.shape, stride=shard.stride()
        )
        # torch has brought it to the ranks' devices
        return cast(Tensor, whole.to(self.shard.device))

    @property
    def by_units(self) -> bool:
        """Whether the units that have split it, over the data axis too, reduce its gradient."""
        return is_split(self.shard) or self.in_place

    @property
    def dropped(self) -> bool:
        """Whether the whole parameter has no values any more."""
        return DROPPED in vars(self.whole)

    @property
    def trained(self) -> bool:
        """Whether this rank's shard may differ from its part of the whole parameter."""
        if self.in_place:
            parts: Any = self.parts
            return bool(parts.is_cut)
        if self.dropped:
            return True
        # both: an optimiser may write through `.data`, which is not counted, and a step may change nothing
        changed = self.shard._version != self.version
        return changed or not torch.equal(local(self.shard).to(self.whole.device), self.own(self.whole))

    def offload(self) -> None:
        """Keep the whole parameter in the host's memory from now on; without values there is nothing to keep."""
        if not self.whole.is_meta and not self.dropped and not self.in_place:
            self.whole.data = self.whole.data.cpu()

    def drop(self) -> None:
        """Keep the shape of the whole parameter alone, until it is restored; who reads it all the same, reads nan."""
        # one number, expanded to the shape: the memory of the whole is given back
        self.whole.data = torch.full((), torch.nan, dtype=self.whole.dtype).expand(self.shape)
        vars(self.whole)[DROPPED] = True
        if self.in_place:
            vars(self.parts)["is_cut"] = False

    @torch.no_grad()
    def restore(self) -> None:
        """Write the trained values of all ranks into the whole parameter, where the shard lies; a collective."""
        # in place and not cut, the parameter has all its values
        if not self.in_place or self.trained:
            self._replace(self.join(self.shard).to(self.shard.device))

    @torch.no_grad()
    def restore_own(self) -> None:
        """Write the trained values of this rank into the whole parameter, and nan elsewhere; no collective."""
        whole = torch.full(self.shape, torch.nan, dtype=self.whole.dtype, device=self.shard.device)
        for offsets, values in self.parts.boxes(local(self.shard)):
            whole[tuple(slice(at, at + n) for at, n in zip(offsets, values.shape, strict=True))] = values
        self._replace(whole)

    def _replace(self, values: Tensor) -> None:
        self.whole.data = values.to(self.whole.dtype)
        vars(self.whole).pop(DROPPED, None)
        if self.in_place:
            vars(self.parts)["is_cut"] = False
        # it may have been frozen or unfrozen while the shard stood for it
        self.whole.requires_grad_(self.shard.requires_grad)


def shard_parameter(module: nn.Module, name: str, whole: nn.Parameter, *, parts: Parts) -> ShardedParameter:
    """Give a module this rank's shard of a parameter under a name."""
    # a copy: a view would keep the whole parameter in memory
    own = parts.own(whole.detach()).clone(memory_format=torch.contiguous_format)
    shard = nn.Parameter(own, requires_grad=whole.requires_grad)
    module.register_parameter(name, shard)
    return ShardedParameter(whole=whole, shard=shard, module=module, name=name, parts=parts, version=shard._version)
