"""One rank of one case, or a product of matrices, in a process of its own; started by benchmarks/side_by_side.

    python -m benchmarks.side_by_side.one_case '{"case": ..., "plan": ..., "rank": 0, "store": "file"}'
    python -m benchmarks.side_by_side.one_case '{"matmul": threads}'

Prints one line of JSON. Memory counts from when the decoder, the latents and the batch are there, and a miniature of
them has trained one step. Gradients and the optimiser's state are made after that, so that they count too.
"""

import json
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.side_by_side.cases import Case
from benchmarks.side_by_side.high_water import HighWater
from benchmarks.side_by_side.training import Training
from lightning_amp.planning.plan.plan import Plan

MATMUL_SIZE = 2048
MATMUL_REPEATS = 12


def join(ranks: int, rank: int, store: str) -> DeviceMesh | None:
    """Meet the other ranks, all on the model axis."""
    if ranks == 1:
        return None
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    return init_device_mesh("cpu", (1, ranks), mesh_dim_names=("data", "model"))


def measure(case: Case, plan: Plan, mesh: DeviceMesh | None) -> dict[str, Any]:
    """Train the miniature, then the case."""
    small = Training(case.small(), plan, mesh)
    small.step_before()
    small.step()
    del small
    training = Training(case, plan, mesh)
    water = HighWater()
    training.step_before()
    first = training.step()
    norm, along = training.gradient()
    timed = [training.step()[0] for _ in range(case.steps - 1)] or [first[0]]
    peak = water.above_start()
    found = {"seconds": timed, "peak_bytes": peak, "loss": first[1], "norm": norm, "along": along}
    return found | {"sent_bytes": training.sent() if mesh is not None else 0}


def matmul_rate() -> float:
    """FLOP/s of products of two square matrices, the best of some."""
    a, b = torch.randn(2, MATMUL_SIZE, MATMUL_SIZE)
    seconds = []
    for _ in range(MATMUL_REPEATS):
        begin = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - begin)
    return 2 * MATMUL_SIZE**3 / min(seconds)


def main() -> None:
    """Read the request, print the result."""
    request = json.loads(sys.argv[1])
    if "matmul" in request:
        torch.set_num_threads(request["matmul"])
        print(json.dumps({"rate": matmul_rate()}))
        return
    case = Case.from_json(json.dumps(request["case"]))
    torch.set_num_threads(case.threads)
    mesh = join(case.ranks, request["rank"], request["store"])
    print(json.dumps(measure(case, Plan.from_json(json.dumps(request["plan"])), mesh)))
    if mesh is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
