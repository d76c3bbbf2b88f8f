"""A pipeline of one rank, in this process."""

from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@pytest.fixture
def mesh(tmp_path: Path) -> DeviceMesh:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    return init_device_mesh("cpu", (1,), mesh_dim_names=("model",))
