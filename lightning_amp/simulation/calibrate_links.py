"""Measure the links between the ranks of a run: messages between two ranks at a time, then collectives of each axis.

Under torchrun the ranks are those of the run, on one node or on several; else two processes of this machine are
started. Of a pair the fastest message gives the latency, and the largest what more bytes take. Between two nodes one
pair is measured by itself, and then all pairs at once, which share the adapters of a node.

The axes are the ranks of a node, and the ranks of one place in all nodes. All groups of an axis run a collective at
once, as in a step. What it takes more than messages between two ranks, as rounds of a ring, is kept for plans.

Known limits: messages one way at a time, so that links that are slower when both directions are used look faster; the
links between the first two nodes stand for all.
"""

import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from lightning_amp.costs.device_rates import BETWEEN, WITHIN, Kind, Links, rounds
from lightning_amp.dist.collectives import start_adding_rows
from lightning_amp.errors import PlanError
from lightning_amp.planning.reports.table import table
from lightning_amp.quantities import format_bytes, format_seconds

SIZES = (8, 2**16, 2**20, 2**24)
"""Bytes of messages."""
ROUNDS, OF_GROUPS, WARM_UP = 20, 5, 2
"""Messages and collectives of each size, and how many before that."""
WAIT = timedelta(seconds=120)
ALL, COLLECTIVES = "between nodes, all at once", "collectives"


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredLinks:
    """Links, and the seconds that they follow from.

    Attributes:
        links: With what was measured; between nodes as before where there is one.
        seconds: One way, for each of `SIZES`, by the place of the ranks.
    """

    links: Links
    seconds: Mapping[str, list[float]]

    def report(self) -> str:
        """Seconds by size, and what follows."""
        rows = [[place, *map(format_seconds, found)] for place, found in self.seconds.items()]
        links = self.links
        known = "" if BETWEEN in self.seconds else " (not measured: run it under torchrun on two nodes)"
        return (
            f"{table(['one way', *map(format_bytes, SIZES)], rows)}\n\n"
            f"{format_seconds(links.latency)} for a message; {links.intra_bandwidth / 1e9:.3g} GB/s within a node\n"
            f"{links.inter_bandwidth / 1e9:.3g} GB/s between nodes{known}"
        )


def known_links(device: str | None) -> Links:
    """Those of this machine's device, by its name."""
    # late: the processes that are started have no use for Lightning, which takes seconds to load
    from lightning_amp.techniques.rates_of import rates_of

    kind = device or ("cuda" if torch.cuda.device_count() else "cpu")
    return rates_of(torch.device(kind))[0].links


def measure_links(links: Links, device: str | None = None) -> MeasuredLinks | None:
    """Measure the links of a run, all of whose ranks call it; None on other ranks than the first.

    Args:
        links: As they are known.
        device: "cpu" or "cuda"; None for CUDA where there is a GPU.

    Raises:
        PlanError: There is one rank only, or one GPU.
    """
    there = torch.cuda.device_count()
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        rank, ranks, store = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://"
        found = _measured(rank, ranks, store, device or ("cuda" if there else "cpu"))
    else:
        rank, kind = 0, device or ("cuda" if there else "cpu")
        if kind == "cuda" and there < 2:
            raise PlanError(
                f"cannot measure links of GPUs: torch finds {there} of them here; use --device cpu, or "
                "torchrun on a machine with two"
            )
        with tempfile.TemporaryDirectory() as folder:
            start_processes(_as_rank, (folder, kind), nprocs=2)  # type: ignore[no-untyped-call]
            found = json.loads((Path(folder) / "found").read_text())
    return links_of(links, found) if rank == 0 else None


def _as_rank(rank: int, folder: str, device: str) -> None:
    found = _measured(rank, 2, f"file://{folder}/store", device)
    if rank == 0:
        (Path(folder) / "found").write_text(json.dumps(found))


def _measured(rank: int, ranks: int, store: str, device: str) -> dict[str, Any]:
    local = int(os.environ.get("LOCAL_RANK", rank))
    place = torch.device("cpu") if device == "cpu" else torch.device("cuda", local)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    backend = "gloo" if place.type == "cpu" else "nccl"
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=ranks, timeout=WAIT)
    try:
        return measured_between(rank, ranks, place)
    finally:
        dist.destroy_process_group()


def measured_between(rank: int, ranks: int, place: torch.device) -> dict[str, Any]:
    """Seconds of each pair that is measured, by size, for every place of pairs; a collective.

    Args:
        rank, ranks: This one of the default group.
        place: Its device.
    """
    if ranks < 2:
        raise PlanError("cannot measure links between ranks: there is one rank; start two or more")
    everyones: list[Any] = [None] * ranks
    # torchrun's number of the node
    dist.all_gather_object(everyones, os.environ.get("GROUP_RANK", "0"))
    first, *others = [[r for r in range(ranks) if everyones[r] == node] for node in dict.fromkeys(everyones)]
    stages = dict[str, list[tuple[int, int]]]()
    if len(first) > 1:
        stages[WITHIN] = [(first[0], first[1])]
    if others:
        pairs = list(zip(first, others[0], strict=False))
        stages[BETWEEN], stages[ALL] = pairs[:1], pairs
    found: dict[str, Any] = {"node": len(first)}
    for name, pairs in stages.items():
        dist.barrier()
        mine = next((pair for pair in pairs if rank in pair), None)
        dist.all_gather_object(everyones, None if mine is None else _one_way(mine, rank, place, shared=name == ALL))
        found[name] = [everyones[a] for a, _ in pairs]
    nodes = [first, *others]
    axes: dict[str, list[Any]] = {WITHIN: nodes, BETWEEN: list(zip(*nodes, strict=False))}
    found[COLLECTIVES] = {axis: _of_axis(groups, rank, place) for axis, groups in axes.items() if len(groups[0]) > 1}
    return found


def _of_axis(groups: Sequence[Sequence[int]], rank: int, place: torch.device) -> dict[str, list[Any]]:
    """Ranks of a group and seconds by size, of each kind; those of the slowest rank."""
    made = [dist.new_group(list(group)) for group in groups]
    own = next((i for i, group in enumerate(groups) if rank in group), None)
    everyones: list[Any] = [None] * dist.get_world_size()
    found = dict[str, list[Any]]()
    for kind in get_args(Kind):
        dist.barrier()
        mine = None if own is None else _of_kind(kind, list(groups[own]), made[own], rank, place)
        dist.all_gather_object(everyones, mine)
        seconds = [one for one in everyones if one is not None]
        found[kind] = [len(groups[0]), [max(column) for column in zip(*seconds, strict=True)]]
    return found


def _of_kind(kind: Kind, group: list[int], made: Any, rank: int, place: torch.device) -> list[float]:
    """Median seconds of a collective, by the bytes that a rank contributes."""
    n, best = len(group), list[float]()
    for size in SIZES:
        # a row for each rank of the group
        rows, seconds = torch.zeros(n, -(-size // (4 * n)), device=place), list[float]()
        whole = rows.new_zeros(n * rows.numel())
        for _ in range(WARM_UP + OF_GROUPS):
            begin = time.perf_counter()
            _run(kind, rows, whole, group, made, group.index(rank))
            if place.type == "cuda":
                torch.cuda.synchronize(place)
            seconds.append(time.perf_counter() - begin)
        best.append(median(seconds[WARM_UP:]))
    return best


def _run(kind: Kind, rows: torch.Tensor, whole: torch.Tensor, group: list[int], made: Any, own: int) -> None:
    """One collective, of what this rank contributes, as plans name it and the library runs it."""
    flat, arrived = rows.view(-1), whole[: rows.numel()]
    if kind == "all_reduce":
        dist.all_reduce(flat, group=made)
    elif kind == "all_gather":
        dist.all_gather_into_tensor(whole, flat, group=made)
    elif kind == "reduce_scatter":
        start_adding_rows(rows, made)()
    elif kind == "all_to_all":
        dist.all_to_all_single(arrived, flat, group=made)
    else:
        there = dist.P2POp(dist.isend, flat, group[(own + 1) % len(group)], made)
        back = dist.P2POp(dist.irecv, arrived, group[own - 1], made)
        for work in dist.batch_isend_irecv([there, back]):
            work.wait()


def _one_way(pair: tuple[int, int], rank: int, place: torch.device, *, shared: bool) -> list[float]:
    """Seconds of a message to the other rank, by size: the least, or the median where pairs share a link, for one may
    have a message through while others pause.

    The answer is the smallest message: pairs that measure at the same time load one direction of a link, where large
    answers would load both, and the link would look twice as fast.
    """
    best, answer = list[float](), torch.zeros(SIZES[0], dtype=torch.uint8, device=place)
    for size in SIZES:
        message, seconds = torch.zeros(size, dtype=torch.uint8, device=place), list[float]()
        for _ in range(WARM_UP + ROUNDS):
            begin = time.perf_counter()
            for sender, sent in zip(pair, (message, answer), strict=True):
                if sender == rank:
                    dist.send(sent, pair[0] + pair[1] - rank)
                else:
                    dist.recv(sent, sender)
            if place.type == "cuda":
                torch.cuda.synchronize(place)
            seconds.append(time.perf_counter() - begin)
        best.append((median if shared else min)(seconds[WARM_UP:]))
    answered = best[0] / 2
    return [max(seconds - answered, answered) for seconds in best]


def links_of(links: Links, found: Mapping[str, Any]) -> MeasuredLinks:
    """What links reach, by the seconds of messages."""

    def bandwidth(seconds: list[float]) -> float:
        # of messages that take no longer than the smallest one nothing is known but the least
        return (SIZES[-1] - SIZES[0]) / max(seconds[-1] - min(seconds), 1e-9)

    # other work on the machine may disturb all rounds of the smallest one
    latencies = [min(found[name][0]) for name in (WITHIN, BETWEEN) if name in found]
    links = replace(links, ranks_per_node=found["node"], latency=max(latencies))
    if WITHIN in found:
        links = replace(links, intra_bandwidth=bandwidth(found[WITHIN][0]))
    if BETWEEN in found:
        # pairs that share one adapter are together no faster than one of them alone
        alone, together = bandwidth(found[BETWEEN][0]), sum(map(bandwidth, found[ALL]))
        adapters = max(1, round(together / alone))
        links = replace(links, inter_bandwidth=max(alone, together), adapters=adapters)
    seconds = {name: found[name][0] for name in (WITHIN, BETWEEN, ALL) if name in found}
    measured = dict[str, dict[str, list[float]]]()
    for axis, kinds in found.get(COLLECTIVES, {}).items():
        inner = 1 if axis == WITHIN else found["node"]
        for kind, (ranks, by_size) in kinds.items():
            seconds[f"{kind} of {ranks} {axis}"] = by_size
            # a round passes on `part` of what a rank contributes, so that contributed bytes per second times rounds and
            # part are those of the wire; the share is of the links just measured, which plans multiply it with
            times, part = rounds(kind, ranks)
            start = min(by_size) / times
            reached = bandwidth(by_size) * times * part / links.bandwidth(ranks, inner=inner)
            measured.setdefault(axis, {})[kind] = [start, reached]
    links = replace(links, collectives=measured)
    return MeasuredLinks(links=links, seconds=seconds)
