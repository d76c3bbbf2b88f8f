"""Claim: with gloo, ranks on GPUs have meshes of gloo alone, and messages pass through the host's memory."""

import pytest
import torch
import torch.distributed as dist

from lightning_amp.sharding import meshes
from lightning_amp.techniques.ranks import messages
from tests.ranks import run_ranks


def _values(rank: int, ranks: int) -> list[list[float]]:
    # there is no GPU here: what would be on one is what requires gradients
    messages._through_host = lambda tensor, group: tensor.requires_grad
    found = []
    for on_gpu in (False, True):
        own, got = torch.full((3,), rank + 1.0), torch.zeros(3)
        sent = messages.sendable(own.requires_grad_(on_gpu), dist.group.WORLD).detach()
        work = dist.isend(sent, group_dst=1 - rank, tag=4)
        with torch.no_grad():
            messages.receive(got.requires_grad_(on_gpu), dist.group.WORLD, 1 - rank, 4)
        work.wait()
        found.append(got.tolist())
    return found


@pytest.mark.ranks
def test_messages_through_the_host_arrive(tmp_path):
    assert run_ranks(_values, 2, tmp_path, fresh=True) == [[[2.0] * 3] * 2, [[1.0] * 3] * 2]


def test_only_tensors_of_gpus_need_the_host_and_with_gloo_only(monkeypatch):
    for backend, is_cuda in (("gloo", True), ("gloo", False), ("nccl", True), ("nccl", False)):
        monkeypatch.setattr(dist, "get_backend", lambda group, backend=backend: backend)
        tensor = type("OnDevice", (), {"is_cuda": is_cuda})()
        assert messages._through_host(tensor, None) == (backend == "gloo" and is_cuda)


@pytest.mark.parametrize(
    ("backend", "device_type", "of_axes"),
    [("gloo", "cuda", {"data": "gloo", "model": "gloo"}), ("gloo", "cpu", None), ("nccl", "cuda", None)],
)
def test_a_mesh_of_gpus_under_gloo_has_no_nccl(monkeypatch, backend, device_type, of_axes):
    asked = []
    monkeypatch.setattr(meshes, "_MADE", {})
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    monkeypatch.setattr(meshes, "init_device_mesh", lambda *args, **options: asked.append((args, options)))
    meshes.mesh_of(device_type, {"data": 1, "model": 2})
    ((args, options),) = asked
    assert args == (device_type, (1, 2))
    assert options == {"mesh_dim_names": ("data", "model"), "backend_override": of_axes}
