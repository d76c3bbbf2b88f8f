"""One rank's place among any number of ranks, of which the others do not exist."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_amp._torch import FakeStore
from lightning_amp.errors import PlanError
from lightning_amp.planning.plan.axes import MeshShape


@contextmanager
def fake_world(shape: MeshShape, *, rank: int) -> Iterator[DeviceMesh]:
    """The mesh with the axes "data" and "model" as one rank (row-major) sees it; collectives return and move nothing.

    Raises:
        PlanError: This process is a rank of a real process group already.
    """
    if dist.is_initialized():
        raise PlanError(
            f"a simulation was asked for in a process that is rank {dist.get_rank()!r} of {dist.get_world_size()!r}"
            " already; a fake process group cannot stand beside a real one: simulate before training starts, or in"
            " a process of its own"
        )
    ranks, hook = shape.data * shape.model, sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield init_device_mesh("cpu", (shape.data, shape.model), mesh_dim_names=("data", "model"))
    finally:
        dist.destroy_process_group()
        # torch puts "[rank0]:" before every line of a traceback from now on, once more for every world
        sys.excepthook = hook
