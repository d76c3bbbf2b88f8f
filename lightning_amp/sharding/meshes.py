"""Make device meshes once for a process group: every process group holds threads and memory while it is referenced."""

import os
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

_MADE: dict[tuple[str, tuple[tuple[str, int], ...]], DeviceMesh] = {}
_OF: list[Any] = []
"""The group of all ranks that the meshes belong to."""
_OF_PARENT: list[Any] = []
"""What a forked process has of its parent: the end of such a group would wait for threads that only the parent has."""


def mesh_of(device_type: str, sizes: Mapping[str, int]) -> DeviceMesh:
    """Return the mesh of all ranks with axes of these names and sizes, the outermost first; all ranks must call it.

    Fits of one process share it.
    """
    everyone = dist.group.WORLD
    if not _OF or _OF[0] is not everyone:
        # of groups that were destroyed since, so that they can end
        _MADE.clear()
        _OF[:] = [everyone]
    key = device_type, tuple(sizes.items())
    if key not in _MADE:
        backend = gloo_on(device_type)
        override: Any = dict.fromkeys(sizes, backend) if backend else None
        shape, names = tuple(sizes.values()), tuple(sizes)
        _MADE[key] = init_device_mesh(device_type, shape, mesh_dim_names=names, backend_override=override)
    return _MADE[key]


def gloo_on(device_type: str) -> str | None:
    """Return "gloo" if it connects ranks on GPUs, else None, which torch's meshes take as it is.

    A mesh of torch 2.11 takes NCCL for tensors on GPUs, also if the processes are connected by gloo alone, because
    they share a GPU, which NCCL refuses.
    """
    return "gloo" if device_type == "cuda" and dist.get_backend() == "gloo" else None


def _leave_those_of_the_parent() -> None:
    _OF_PARENT.append((dict(_MADE), [*_OF]))
    _MADE.clear()
    _OF.clear()


os.register_at_fork(after_in_child=_leave_those_of_the_parent)
