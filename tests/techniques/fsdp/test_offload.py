"""Claim: rows in the host's memory refuse steps by hand, and a step runs where torch moves arguments to a device."""

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from lightning_amp.errors import InstallError
from lightning_amp.techniques.fsdp.fully_sharded import FullySharded
from lightning_amp.techniques.fsdp.look import refuse
from tests.lightning.strategy.fsdp_features import Blocks, Several
from tests.ranks import run_ranks


def test_a_step_by_hand_is_refused_where_its_gradients_are_elsewhere() -> None:
    refuse(Several(), {})
    refuse(Blocks(), {}, by_hand=False)
    with pytest.raises(InstallError, match="fsdp_offload=True is not supported: 'Several' has"):
        refuse(Several(), {}, by_hand=False)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def training_step(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x).tanh()
        return x.square().mean()


def steps(module: Any, x: torch.Tensor, sharded: FullySharded | None = None) -> None:
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = module.training_step(x)
        if sharded is None:
            loss.backward()
        else:
            with sharded.backward(loss):
                loss.backward()
            sharded.before_update()
        optimizer.step()


def as_an_accelerator(rank: int, ranks: int) -> float:
    torch.manual_seed(0)
    module, x = Net().double(), torch.randn(4, 6, dtype=torch.float64)
    plain = copy.deepcopy(module)
    steps(plain, x)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("data",))
    sharded = FullySharded(module, ["blocks.*", ""], mesh)
    # torch moves the arguments of a forward where the device has this name
    named = mock.patch("torch._C._get_privateuse1_backend_name", mock.Mock(return_value="cpu"))
    vars(module)["training_step"] = named(module.training_step)
    steps(module, x, sharded)
    for parameter in sharded.parameters:
        parameter.restore()
    sharded.undo()
    pairs = zip(module.parameters(), plain.parameters(), strict=True)
    return max(float((p.detach() - q.detach()).abs().max()) for p, q in pairs)


@pytest.mark.ranks
def test_a_step_without_arguments_runs_where_torch_moves_them(tmp_path: Path) -> None:
    assert max(run_ranks(as_an_accelerator, 2, tmp_path)) < 1e-12
