"""Define a parameter of which every rank of a mesh axis owns a shard, with the shard's gradient and optimiser state."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp.techniques.deferred import DROPPED


def is_split(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor; not `isinstance`, because importing the class takes long."""
    return hasattr(tensor, "to_local")


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor; any other tensor unchanged."""
    return cast(Tensor, cast(Any, tensor).to_local()) if is_split(tensor) else tensor


class Parts(Protocol):
    """Sharding of a tensor over a mesh axis."""

    @property
    def mesh(self) -> DeviceMesh:
        """The mesh axis."""

    def own(self, whole: Tensor) -> Tensor:
        """Return this rank's shard of a full tensor, a view or a copy."""

    def join(self, own: Tensor) -> Tensor:
        """Gather the full tensor from every rank's shard; a collective."""

    def boxes(self, own: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """Yield blocks of adjacent entries of this rank's shard: offsets in the full tensor, and the entries."""


@dataclass(frozen=True, eq=False, kw_only=True, slots=True)
class ShardedParameter:
    """One sharded parameter; `shard_parameter` creates it.

    Attributes:
        whole: The full parameter that was replaced; its values are stale while the shard is trained.
        shard: This rank's shard, a separate parameter, or the parameter itself (`in_place`).
        module: The module that holds the shard, under `name`.
        parts: How it is sharded: `Runs` (ranks/shards.py), or `VertexShards` (nodes/graph_encoder.py).
            Over the data axis torch keeps the shard (fsdp/): a DTensor, whose gradient is reduced once it is computed.
        version: Version counter of the shard when it was created.
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
        """Whether the shard is the parameter itself, with this rank's shard as its values."""
        return self.shard is self.whole

    @property
    def shape(self) -> torch.Size:
        """Shape of the full parameter."""
        parts: Any = self.parts
        # in place, the parameter itself has the shape of the shard
        return parts.shape if self.in_place else self.whole.shape

    @property
    def technique(self) -> str:
        """Id of the strategy that sharded it."""
        return getattr(self.parts, "technique", "fsdp" if is_split(self.shard) else "S2")

    def own(self, whole: Tensor) -> Tensor:
        """Return this rank's shard of a tensor with the shape of the full parameter, a view or a copy."""
        return self.parts.own(whole)

    def join(self, own: Tensor) -> Tensor:
        """Gather the full tensor from every rank's shard, which may lie in host memory; a collective on the devices."""
        return self.parts.join(local(own).to(self.mesh.device_type))

    def like_shard(self, own: Tensor) -> Tensor:
        """Convert this rank's shard of a tensor to the type of `shard`: a DTensor if torch keeps the shard."""
        if not is_split(self.shard):
            return own
        shard: Any = self.shard
        whole: Any = type(shard).from_local(
            own, shard.device_mesh, shard.placements, run_check=False, shape=self.shape, stride=shard.stride()
        )
        # from_local has moved it to the ranks' devices
        return cast(Tensor, whole.to(self.shard.device))

    @property
    def by_units(self) -> bool:
        """Whether the units that sharded it reduce its gradient, over the data axis too."""
        return is_split(self.shard) or self.in_place

    @property
    def dropped(self) -> bool:
        """Whether the values of the full parameter were dropped."""
        return DROPPED in vars(self.whole)

    @property
    def trained(self) -> bool:
        """Whether this rank's shard may differ from its part of the full parameter."""
        if self.in_place:
            parts: Any = self.parts
            return bool(parts.is_cut)
        if self.dropped:
            return True
        # both checks: an optimiser may write through `.data`, which has no version, and a step may change nothing
        changed = self.shard._version != self.version
        return changed or not torch.equal(local(self.shard).to(self.whole.device), self.own(self.whole))

    def offload(self) -> None:
        """Move the full parameter to host memory, if it has values."""
        if not self.whole.is_meta and not self.dropped and not self.in_place:
            self.whole.data = self.whole.data.cpu()

    def drop(self) -> None:
        """Drop the values of the full parameter until it is restored; until then its values read as nan."""
        # an expanded scalar keeps the shape and frees the memory
        self.whole.data = torch.full((), torch.nan, dtype=self.whole.dtype).expand(self.shape)
        vars(self.whole)[DROPPED] = True
        if self.in_place:
            vars(self.parts)["is_cut"] = False

    @torch.no_grad()
    def restore(self) -> None:
        """Gather the trained values of all ranks into the full parameter, on the shard's device; a collective."""
        # in place and not sharded at the moment, the parameter has all its values
        if not self.in_place or self.trained:
            self._replace(self.join(self.shard).to(self.shard.device))

    @torch.no_grad()
    def restore_own(self) -> None:
        """Write the trained values of this rank into the full parameter, and nan elsewhere; no collective."""
        whole = torch.full(self.shape, torch.nan, dtype=self.whole.dtype, device=self.shard.device)
        for offsets, values in self.parts.boxes(local(self.shard)):
            whole[tuple(slice(at, at + n) for at, n in zip(offsets, values.shape, strict=True))] = values
        self._replace(whole)

    def _replace(self, values: Tensor) -> None:
        self.whole.data = values.to(self.whole.dtype)
        vars(self.whole).pop(DROPPED, None)
        if self.in_place:
            vars(self.parts)["is_cut"] = False
        # the user may have frozen or unfrozen the shard
        self.whole.requires_grad_(self.shard.requires_grad)


def shard_parameter(module: nn.Module, name: str, whole: nn.Parameter, *, parts: Parts) -> ShardedParameter:
    """Replace a parameter of a module by this rank's shard, under the same name."""
    # a copy: a view would keep the full parameter in memory
    own = parts.own(whole.detach()).clone(memory_format=torch.contiguous_format)
    shard = nn.Parameter(own, requires_grad=whole.requires_grad)
    module.register_parameter(name, shard)
    return ShardedParameter(whole=whole, shard=shard, module=module, name=name, parts=parts, version=shard._version)
