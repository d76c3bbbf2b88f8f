"""What users call: tensors of parts that ranks hold, handlers from outside, and their comparison with one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from lightning_amp import ShardedTensor, ShardError, check_shard, register_shard
from lightning_amp.dist.dispatch.guards import guarded
from lightning_amp.dist.splits import axis_of
from tests.ranks import run_ranks


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


@torch.library.custom_op("tests_dist::shifted", mutates_args=())
def shifted(x: Tensor, by: float) -> Tensor:
    return x + by


def refusal(call: Any) -> str:
    try:
        call()
    except ShardError as error:
        return str(error)
    return ""


def body(rank: int, size: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("model",))
    whole = torch.arange(90, dtype=torch.float64).view(2, 9, 5)
    sizes = [6, 3]
    part = whole.split(sizes, 1)[rank].clone()
    x, y = (ShardedTensor.from_local(part, mesh, dim=-2, sizes=given) for given in (sizes, None))
    found: dict[str, Any] = {
        "whole": [torch.equal(t.full_tensor(), whole) for t in (x, y)],
        "part": x.to_local() is part and axis_of(mesh) is axis_of(mesh["model"]),
        "sizes": refusal(lambda: ShardedTensor.from_local(part, mesh, dim=1, sizes=[4, 5])),
        "mesh": refusal(lambda: axis_of(init_device_mesh("cpu", (size, 1), mesh_dim_names=("a", "b")))),
        "Function": refusal(lambda: _guarded(mesh, lambda: Doubled.apply(x))),
        "operator": refusal(lambda: shifted(x, 1.0)),
        "target": refusal(lambda: register_shard(3)),
    }
    register_shard(Doubled)(lambda x: ShardedTensor(Doubled.apply(x.local), x.splits))
    register_shard(torch.ops.tests_dist.shifted)(lambda op, x, by: ShardedTensor(x.local + by, x.splits))
    # a handler that forgets the other ranks
    register_shard(torch.special.entr)(lambda x: ShardedTensor(x.local - x.local.mean(), x.splits))
    found["twice"] = refusal(lambda: register_shard(Doubled))
    found["handlers"] = [torch.equal(_guarded(mesh, lambda: Doubled.apply(x)).full_tensor(), whole * 2),
                         torch.equal(shifted(x, 1.0).full_tensor(), whole + 1)]  # fmt: skip
    check_shard(lambda t, n: Doubled.apply(t).softmax(1) * n, whole / 90, 3, mesh=mesh, dim=1, sizes=sizes)
    check_shard(torch.nn.functional.linear, whole, torch.ones(4, 5), torch.ones(4), mesh=mesh, dim=1)
    found["wrong"] = refusal(lambda: check_shard(torch.special.entr, whole, mesh=mesh, dim=1))
    return found


def _guarded(mesh: Any, call: Any) -> Any:
    with guarded([axis_of(mesh)]):
        return call()


@pytest.mark.ranks
def test_tensors_of_parts_and_handlers_from_outside(tmp_path: Path) -> None:
    for found in run_ranks(body, 2, tmp_path, fresh=True):
        assert all([*found["whole"], *found["handlers"], found["part"]])
        words = {"sizes": "from_local(sizes=[4, 5])", "mesh": "mesh['model']", "Function": "register_shard",
                 "operator": "tests_dist::shifted", "target": "register_shard(3)", "twice": "has a handler",
                 "wrong": "differs from one process: result 0"}  # fmt: skip
        for name, word in words.items():
            assert word in found[name], f"{name}: {found[name]!r}"
