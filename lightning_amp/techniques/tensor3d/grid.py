"""Define the grid of ranks: axes x and y split features, z splits rows of the batch and stored parameters."""

from dataclasses import dataclass
from typing import Any

from lightning_amp.sharding.meshes import gloo_on, mesh_of
from lightning_amp.sharding.splits import MeshAxis

AXES = ("x", "y", "z")


@dataclass(frozen=True, eq=False, kw_only=True)
class Grid:
    """Axes of one rank of the grid, and process groups over all of them.

    Attributes:
        x, y, z: The axes, x innermost: adjacent ranks communicate most.
        replicas: Ranks that hold the same shard, whose gradients are averaged; None if there is only one.
        block: All ranks of the grid, whose shards form the parameters; None in a dry run.
        device_type: Type of the ranks' devices.
    """

    x: MeshAxis
    y: MeshAxis
    z: MeshAxis
    replicas: MeshAxis | None = None
    block: Any = None
    device_type: str = "cpu"

    @property
    def axes(self) -> tuple[MeshAxis, ...]:
        """x, y and z."""
        return self.x, self.y, self.z

    @property
    def size(self) -> int:
        """Number of ranks of the grid."""
        return self.x.size * self.y.size * self.z.size

    @staticmethod
    def dry(
        sizes: tuple[int, int, int], *, ranks: tuple[int, int, int] = (0, 0, 0), copies: int = 1, sent: Any = None
    ) -> "Grid":
        """Make a grid for a dry run of one rank, given its place on each axis; `sent` records the collectives."""
        x, y, z = (
            MeshAxis(name, n, rank, None, "gather", sent) for name, n, rank in zip(AXES, sizes, ranks, strict=True)
        )
        replicas = MeshAxis("data", copies, 0, None, "gather", sent) if copies > 1 else None
        return Grid(x=x, y=y, z=z, replicas=replicas)

    @staticmethod
    def of(device_type: str, sizes: tuple[int, int, int], ranks: int) -> "Grid":
        """Make the grid of this rank, with data-parallel copies as the outermost axis; all ranks must call it."""
        x, y, z = sizes
        mesh = mesh_of(device_type, {"data": ranks // (x * y * z), "z": z, "y": y, "x": x})
        made = {}
        for name in ("data", *AXES):
            axis = mesh[name]
            made[name] = MeshAxis(name, axis.size(), axis.get_local_rank(), axis.get_group(), "gather")
        data = made.pop("data")
        block = mesh["z", "y", "x"]._flatten("block", backend_override=gloo_on(device_type))
        return Grid(**made, replicas=data if data.size > 1 else None, block=block, device_type=device_type)
