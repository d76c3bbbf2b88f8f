"""Decoder steps of many sizes under every plan, measured once: what the time model is judged by.

    python -m benchmarks.time_model.time_grid measure [--threads 1] [--ranks 1] [--seconds 900] [--out FILE.jsonl]
    python -m benchmarks.time_model.time_grid judge

`measure` writes one line of JSON per size: the least seconds of every plan, rounds interleaved, of the slowest rank. A
plan that took more than `APART` times the fastest in its first round is not timed again. Two ranks have one thread
each, and B cells each where they are on the data axis. `judge` says how often the plan that `auto` would choose is
within 5 and 15 % of the fastest one that was measured, by the time of a cell.
"""

import argparse
import json
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.side_by_side.cases import Case, Method, Size
from benchmarks.side_by_side.training import Training
from lightning_amp.costs.device_rates import CPU_CORE
from lightning_amp.installing.describe_module import describe
from lightning_amp.lightning.strategy.hardware import make_mesh
from lightning_amp.planning.plan.axes import Axes, MeshShape
from lightning_amp.planning.plan.decoder_only import profile_of_module
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.planning.policies.make_plan import plan
from lightning_amp.planning.time.step_seconds import step_seconds
from lightning_amp.progress import track
from lightning_amp.simulation.models_without_values import decoder_subject
from lightning_amp.techniques.table import conflicts, in_order

TABLE = Path(__file__).with_name("time_grid.jsonl")
APART = 1.6
WARM_UP, ROUNDS = 2, 4
MOST_SECONDS = 1.5
"""Predicted time of the slowest plan up to which a size is measured."""
STRIDE = 37

ANCHORS = (100, 250, 600, 1200, 2700, 5400, 11000, 27000)
STRATA = (4, 12, 32, 64)
CELLS = (1, 8, 32, 64, 256)
DIMS = (64, 128)
Chosen = tuple[int, tuple[str, ...]]
"""Ranks of the model axis, and strategies."""


def sizes() -> Iterator[Size]:
    """Sizes of the grid that a step of every plan can be measured of; windows as users choose them."""
    for anchors, strata, cells, dim in product(ANCHORS, STRATA, CELLS, DIMS):
        if strata * 4 > anchors or (dim == 128) != (anchors >= 1200):
            continue
        yield Size(
            anchors=anchors, strata=strata, cells=cells, dim=dim, window=min(20 * strata, anchors // 4)
        )


def plans(ranks: int) -> list[Chosen]:
    """Every legal choice on one device, and on several the ones that differ in more than a leaf; S3 is for S5."""
    attentions = ((), ("fused",), ("sdpa",))
    choices = product(attentions, ((), ("S4",)), ((), ("sparse",)), ((), ("recompute",), ("stream",)))
    alone = [in_order(frozenset().union(*parts)) for parts in choices]
    if ranks == 1:
        return [(1, chosen) for chosen in alone if not any(conflicts(chosen))]
    leaves = [
        (),
        ("fused",),
        ("S4", "sparse"),
        ("S4", "fused", "sparse"),
        ("S4", "fused", "sparse", "stream"),
    ]
    placed = [(ranks, in_order({placement, *parts})) for placement in ("strata", "nodes") for parts in leaves]
    hidden = [
        (ranks, in_order(parts)) for parts in ({"S2", "sparse"}, {"S3", "S5", "sparse"}, {"S2", "fused"})
    ]
    return [(1, in_order(parts)) for parts in leaves] + placed + hidden


def named(chosen: Chosen) -> str:
    """As in the table."""
    return f"{chosen[0]}:{','.join(chosen[1])}"


def predicted(size: Size, chosen: Chosen, *, ranks: int, threads: int) -> float:
    """Seconds of a step by the model."""
    mesh = MeshShape(data=ranks // chosen[0], model=chosen[0])
    decoder = replace(size.decoder(), threads=threads)
    rates = replace(
        CPU_CORE,
        matmul_flops=threads * CPU_CORE.matmul_flops,
        memory_bytes=threads * CPU_CORE.memory_bytes,
    )
    return step_seconds(decoder, Axes.of(chosen[1]), mesh, cells=size.cells, rates=rates)


def per_cell(seconds: float, chosen: Chosen, ranks: int) -> float:
    """What plans are compared by: ranks of the data axis have cells of their own."""
    return seconds * chosen[0] / ranks


def measure_size(size: Size, *, ranks: int, threads: int) -> dict[str, float]:
    """Least seconds of every plan, by its name; all ranks call it."""
    steps = {}
    for chosen in plans(ranks):
        case = Case(size=size, method=Method(name="", strategies=chosen[1]), threads=threads, ranks=ranks)
        mesh = None if ranks == 1 else _mesh(chosen[0])
        steps[named(chosen)] = Training(case, _plan(case, chosen), mesh)
    for training in steps.values():
        for _ in range(WARM_UP):
            training.step()
    least: dict[str, float] = {}
    for turn in range(ROUNDS):
        best = min(least.values(), default=0.0)
        for name, training in steps.items():
            if turn < 2 or least[name] <= APART * best:
                seconds = _slowest(training.step()[0])
                least[name] = min(seconds, least.get(name, seconds))
    return least


def _plan(case: Case, chosen: Chosen) -> Plan:
    shape = describe(decoder_subject(case.size.decoder(), batch_size=case.size.cells).module, batch_size=1)
    assert shape.decoder is not None, "the subject is a decoder"
    decoder = replace(shape.decoder, threads=case.threads)
    return plan(
        profile_of_module(shape),
        devices=case.ranks,
        model_parallel_size=chosen[0],
        strategies=["S1", *chosen[1]],
        batch_size=case.size.cells,
        shape=replace(shape, decoder=decoder, batch_size=case.size.cells),
    )


def _mesh(model: int) -> DeviceMesh:
    return make_mesh("cpu", n_ranks=dist.get_world_size(), model_ranks=model)


def _slowest(seconds: float) -> float:
    if dist.is_initialized():
        box = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(box, op=dist.ReduceOp.MAX)
        return float(box)
    return seconds


def measure(out: Path, *, ranks: int, threads: int, seconds: float) -> None:
    """Measure sizes, spread over the grid, until the time is used up; sizes that are in the file are left out."""
    lines = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    there = {(tuple(row["size"].values()), row["ranks"], row["threads"]) for row in lines}
    todo = [
        size
        for size in sizes()
        if max(predicted(size, chosen, ranks=ranks, threads=1) for chosen in plans(ranks)) < MOST_SECONDS
        and (tuple(asdict(size).values()), ranks, threads) not in there
    ]
    # a stride without a common factor visits all, and neighbours late
    todo = [todo[i * STRIDE % len(todo)] for i in range(len(todo))] if len(todo) % STRIDE else todo
    request = {"ranks": ranks, "threads": threads, "seconds": seconds, "out": out, "port": _free_port()}
    if ranks == 1:
        _measure_rank(0, todo, request)
    else:
        mp.spawn(_measure_rank, args=(todo, request), nprocs=ranks)  # type: ignore[attr-defined]


def _measure_rank(rank: int, todo: list[Size], request: dict) -> None:  # type: ignore[type-arg]
    torch.set_num_threads(request["threads"])
    ranks, threads = request["ranks"], request["threads"]
    if ranks > 1:
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(request["port"])}
        dist.init_process_group("gloo", rank=rank, world_size=ranks)
    end = time.monotonic() + request["seconds"]
    for size in track(todo, description="sizes", total=len(todo)) if rank == 0 else todo:
        # the time is up for all ranks together
        if _slowest(time.monotonic() - end) > 0:
            break
        found = measure_size(size, ranks=ranks, threads=threads)
        if rank == 0:
            rounded = {name: float(f"{value:.4g}") for name, value in found.items()}
            row = {"size": asdict(size), "ranks": ranks, "threads": threads, "seconds": rounded}
            with request["out"].open("a") as file:
                file.write(json.dumps(row) + "\n")
    if ranks > 1:
        dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


def judge(table: Path) -> list[tuple[float, str]]:
    """For every size how much slower than the fastest measured plan the predicted one is, worst first, in words."""
    found = []
    for line in table.read_text().splitlines():
        row = json.loads(line)
        size, ranks, threads = Size(**row["size"]), row["ranks"], row["threads"]
        measured, guessed = {}, {}
        for name, seconds in row["seconds"].items():
            model, _, strategies = name.partition(":")
            chosen = int(model), tuple(filter(None, strategies.split(",")))
            measured[name] = per_cell(seconds, chosen, ranks)
            guessed[name] = per_cell(predicted(size, chosen, ranks=ranks, threads=threads), chosen, ranks)
        chose, best = min(guessed, key=guessed.__getitem__), min(measured, key=measured.__getitem__)
        words = f"{size}, D {size.dim}, w {size.window}, {ranks} x {threads}: {chose} for {best}"
        found.append((measured[chose] / measured[best], words))
    return sorted(found, reverse=True)


def main() -> None:
    """Measure or judge."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("measure", "judge"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--out", type=Path, default=TABLE)
    parser.add_argument("--seconds", type=float, default=900)
    asked = parser.parse_args()
    if asked.what == "measure":
        measure(asked.out, ranks=asked.ranks, threads=asked.threads, seconds=asked.seconds)
        return
    rows = judge(asked.out)
    for ratio, words in rows[:25]:
        print(f"{ratio:5.2f}  {words}")
    shares = [sum(ratio <= limit for ratio, _ in rows) / len(rows) for limit in (1.05, 1.15)]
    print(f"{len(rows)} sizes: within 5 % {shares[0]:.0%}, within 15 % {shares[1]:.0%}")


if __name__ == "__main__":
    main()
