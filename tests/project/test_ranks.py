"""Claim: the processes of `run_ranks` take function after function, each of which finds what a new process has, and no
group of one before; after a failure others are started.
"""

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.ranks import run_ranks


def disturb(rank: int, ranks: int) -> int:
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(rank)
    np.random.seed(rank)
    warnings.simplefilter("ignore")
    os.environ["LEFT"] = "here"
    os.chdir("/")
    return os.getpid()


def look(rank: int, ranks: int) -> tuple[int, dict[str, Any]]:
    with pytest.warns(UserWarning, match="seen"):
        warnings.warn("seen", stacklevel=1)
    return os.getpid(), {
        "drawn": (torch.rand(()).item(), np.random.random()),
        "dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "environment": "LEFT" in os.environ,
        "folder": Path.cwd(),
    }


def fail(rank: int, ranks: int) -> None:
    raise ArithmeticError("on purpose")


def call(body: Any, folder: Path, *, fresh: bool = False) -> list[Any]:
    folder.mkdir()
    return run_ranks(body, 2, folder, fresh=fresh)


@pytest.mark.ranks
def test_the_next_function_finds_what_a_new_process_has(tmp_path: Path) -> None:
    new = call(look, tmp_path / "0", fresh=True)
    pids = call(disturb, tmp_path / "1")
    found = call(look, tmp_path / "2")
    assert [pid for pid, _ in found] == pids
    assert not {pid for pid, _ in new} & set(pids)
    assert [seen for _, seen in found] == [seen for _, seen in new]


@pytest.mark.ranks
def test_after_a_failure_other_processes_are_started(tmp_path: Path) -> None:
    before = call(disturb, tmp_path / "0")
    with pytest.raises(pytest.fail.Exception, match="on purpose"):
        call(fail, tmp_path / "1")
    assert not set(before) & set(call(disturb, tmp_path / "2"))


def whole(rank: int, ranks: int, groups: int) -> float:
    for _ in range(groups):
        dist.new_group([*range(ranks)])
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("other", "x"))["x"]
    part = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])
    return float((2 * part).full_tensor().sum())


@pytest.mark.ranks
def test_a_cached_layout_names_no_group_that_has_ended(tmp_path: Path) -> None:
    for groups in (6, 0):
        assert run_ranks(whole, 4, tmp_path, groups) == [20.0] * 4
