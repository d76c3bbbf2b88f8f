"""Claim: with gloo, ranks on GPUs have meshes of gloo alone, and messages pass through the host's memory; NCCL gets
only tensors of GPUs.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_amp.lightning.checkpoints.stage_parameters import StageParameters
from lightning_amp.lightning.checkpoints.write_checkpoint import Form
from lightning_amp.lightning.consistency.same_parameters import warn_of_differences
from lightning_amp.sharding import meshes
from lightning_amp.techniques.pipeline.run.messages import Messages
from lightning_amp.techniques.ranks import messages
from tests.pretended_gpu import is_on_gpu, moved, pretended_gpu
from tests.ranks import run_ranks


def _values(rank: int, ranks: int) -> list[list[float]]:
    mesh, found = init_device_mesh("cpu", (2,)), []
    for backends in ("cpu:gloo,cuda:gloo", "cuda:nccl"):
        for on_gpu in (False, True):
            own, got = torch.full((3,), rank + 1.0), torch.zeros(3)
            with pretended_gpu(mesh, backends):
                moved([own, got] if on_gpu else [])
                work = dist.isend(messages.sendable(own, mesh.get_group()), group_dst=1 - rank, tag=4)
                messages.receive(got, mesh.get_group(), 1 - rank, 4)
                work.wait()
                assert is_on_gpu(got) == on_gpu
            found.append(got.tolist())
    return found


@pytest.mark.ranks
def test_messages_arrive_from_memory_that_the_backend_reads(tmp_path):
    assert run_ranks(_values, 2, tmp_path, fresh=True) == [[[2.0] * 3] * 4, [[1.0] * 3] * 4]


def _stages(rank: int, ranks: int) -> Any:
    """Gradients, state and comparison of a module in stages, of which the last parameter is on both ranks."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "model"))
    module = nn.ModuleList([nn.BatchNorm1d(2), nn.BatchNorm1d(2), nn.Linear(2, 1)])
    # running_var of the second stage stays in the host's memory
    moved([*module.parameters(), *(buffer for name, buffer in module.named_buffers() if name != "1.running_var")])
    with pretended_gpu(mesh):
        held = StageParameters(module, [(module[0], 0), (module[1], 1)], mesh, {"0.weight": 1})
        for parameter in held.here:
            parameter.grad = torch.full_like(parameter, rank + 1.0)
            moved([parameter.grad])
        held.settle()
        warn_of_differences(module, (), mesh, step=1, model_ranks_differ=True)
        saved = held.saved_state(module.state_dict(), "whole")
        assert not any(is_on_gpu(value) for value in saved.values() if value.is_floating_point())
        optimizer = torch.optim.SGD([one.whole for one in held.held], lr=0.1)
        for parameter in held.here:
            optimizer.state[parameter] = {"short": torch.full_like(parameter, rank, dtype=torch.int16), "t": 3}
            moved([optimizer.state[parameter]["short"]])
        form: Form = "not here" if rank else "whole"
        states = held.saved_optimizer_state(optimizer, optimizer.state_dict(), form)["state"]
        short = [states[index]["short"] for index in range(6)]
        assert [-1 if value.is_meta else int(value.flatten()[0]) for value in short] == (
            [-1] * 6 if rank else [0, 0, 1, 1, 0, 0]
        )
        results = Messages(mesh["model"], 2, torch.device("cuda"))
        sent = torch.full((2, 3), 5.0)
        moved([sent])
        if rank == 0:
            results.send_on(0, 0, sent)
            _, (gradient,) = results.receive_back(0, 0, sent.requires_grad_())
        else:
            gradient, leaves = results.receive(1, 0, torch.empty((2, 3), device="meta"))
            leaves[0].grad = gradient.detach() + 1
            results.send_back(1, 0, leaves)
        results.wait()
        assert is_on_gpu(gradient)
    return [module[2].weight.grad.tolist(), module[0].weight.grad.tolist(), gradient.tolist()]


@pytest.mark.ranks
def test_nccl_gets_nothing_of_the_host_from_a_pipeline(tmp_path):
    first, second = run_ranks(_stages, 2, tmp_path, fresh=True)
    assert first == [[[3.0] * 2], [3.0] * 2, [[6.0] * 3] * 2]
    assert second == [[[3.0] * 2], [3.0] * 2, [[5.0] * 3] * 2]


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
