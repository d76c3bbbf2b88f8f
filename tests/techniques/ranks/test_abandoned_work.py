"""A collective that is on its way holds the memory that it writes to, also where nobody waits for it any more."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import all_reduce, barrier
from torch.distributed.device_mesh import init_device_mesh

from lightning_amp.lightning.steps.loss_weight import CellWeight
from lightning_amp.techniques.data import gradient_sync
from tests.ranks import run_ranks

ROUNDS, LATE_S = 20, 0.01


def left_alone(rank: int) -> float:
    """What memory that is taken while sums are on their way holds in the end: the other rank is late in all of them."""
    taken = []
    for _ in range(ROUNDS):
        if rank:
            time.sleep(LATE_S)
        all_reduce(torch.ones(2), async_op=True)
        taken += [torch.zeros(2) for _ in range(100)]
    barrier()
    return float(torch.stack(taken).abs().sum())


def weights(rank: int) -> tuple[bool, float]:
    """Of the step after one without a backward pass: whether the sum before it was waited for, and the weight."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "model"))
    weight = CellWeight(mesh["data"], torch.device("cpu"))
    if rank:
        time.sleep(10 * LATE_S)
    weight.start({"x": torch.ones(3 - 2 * rank, 4)})
    before = weight._travelling
    weight.start({"x": torch.ones(3 + 2 * rank, 4)})
    assert before is not None
    return before.is_completed(), weight.value()


def owned(rank: int) -> list[bool]:
    """Of everything that a reduction of gradients sends, whether its memory is torch's own."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "model"))
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))]
    sync = gradient_sync.GradientSync(parameters, mesh)
    sync.watch()
    sum(p.sum() for p in parameters).backward()  # type: ignore[union-attr]
    found = []

    def noted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        found.append(tensor.untyped_storage().resizable())
        return all_reduce(tensor, *args, **kwargs)

    gradient_sync.all_reduce = noted  # type: ignore[attr-defined]
    try:
        sync.reduce()
    finally:
        gradient_sync.all_reduce = all_reduce  # type: ignore[attr-defined]
    return found


def on_each(rank: int, ranks: int) -> dict[str, Any]:
    return {"left alone": left_alone(rank), "weights": weights(rank), "owned": owned(rank)}


@pytest.mark.ranks
def test_sums_that_nobody_waits_for_write_to_nobody_elses_memory(tmp_path: Path) -> None:
    results = run_ranks(on_each, 2, tmp_path)
    assert [result["left alone"] for result in results] == [0.0, 0.0]
    # a step waits for the sum of the one before
    assert [result["weights"] for result in results] == [(True, 3 * 2 / 8), (True, 5 * 2 / 8)]
    # what is sent is memory of torch's own
    assert all(result["owned"] == [True, True] for result in results)
