"""Make device meshes once for a process group: every process group holds threads and memory until the process ends."""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# with the group of all ranks, whose identity is part of the key
_MADE: dict[tuple[int, str, tuple[tuple[str, int], ...]], tuple[Any, DeviceMesh]] = {}


def mesh_of(device_type: str, sizes: Mapping[str, int]) -> DeviceMesh:
    """Return the mesh of all ranks with axes of these names and sizes, the outermost first; all ranks must call it.

    Fits of one process share it.
    """
    everyone = dist.group.WORLD
    key = id(everyone), device_type, tuple(sizes.items())
    if key not in _MADE:
        _MADE[key] = everyone, init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return _MADE[key][1]
