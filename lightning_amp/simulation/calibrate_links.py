"""Measure the links between the ranks of a run: messages between pairs of ranks, then collectives of each axis.

Under torchrun the ranks are those of the run, on one or several nodes; otherwise two processes of this machine are
started. The fastest message of a pair gives the latency, the largest message the bandwidth. Between two nodes, one pair
is measured alone, and then all pairs concurrently, which share the adapters of a node.

The axes are the ranks of a node, and the ranks with the same position in all nodes. All groups of an axis run a
collective concurrently, as in a step. Plans use its cost relative to messages between two ranks, per round of a ring.

Known limits: messages go one way at a time, so links that are slower in both directions at once look faster; the links
between the first two nodes are assumed for all nodes.
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

from lightning_amp.costs.device_memory import DeviceMemory
from lightning_amp.costs.device_rates import BETWEEN, WITHIN, Kind, Links, rounds
from lightning_amp.errors import PlanError
from lightning_amp.quantities import format_bytes, format_seconds
from lightning_amp.sharding.collectives import start_adding_rows
from lightning_amp.text_table import table

SIZES = (8, 2**16, 2**20, 2**24)
"""Bytes of the measured messages."""
ROUNDS, OF_GROUPS, WARM_UP = 20, 5, 2
"""Number of messages and of collectives of each size, and of warm-up rounds."""
WAIT = timedelta(seconds=120)
ALL, COLLECTIVES = "between nodes, all at once", "collectives"


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredLinks:
    """Measured links, and the seconds that they follow from.

    Attributes:
        links: Links with the measurements; between nodes unchanged if there is one node.
        seconds: Seconds one way, for each of `SIZES`, by the place of the ranks.
        nccl_bytes: What NCCL takes of a GPU for a communicator; None on a CPU.
    """

    links: Links
    seconds: Mapping[str, list[float]]
    nccl_bytes: int | None = None

    def with_nccl(self, memory: DeviceMemory) -> DeviceMemory:
        """Return the memory of a GPU with the measured bytes of NCCL."""
        if self.nccl_bytes is None:
            return memory
        return replace(memory, nccl_bytes=self.nccl_bytes, measured=(*memory.measured, "nccl_bytes"))

    def report(self) -> str:
        """Format seconds by size, and the resulting rates."""
        rows = [[place, *map(format_seconds, found)] for place, found in self.seconds.items()]
        links = self.links
        known = "" if BETWEEN in self.seconds else " (not measured: run it under torchrun on two nodes)"
        return (
            f"{table(['one way', *map(format_bytes, SIZES)], rows)}\n\n"
            f"{format_seconds(links.latency)} for a message; {links.intra_bandwidth / 1e9:.3g} GB/s within a node\n"
            f"{links.inter_bandwidth / 1e9:.3g} GB/s between nodes{known}"
        )


def known_links(device: str | None) -> Links:
    """Return the links of this machine's device, by its name."""
    # imported here: the started processes do not need Lightning, which takes seconds to load
    from lightning_amp.techniques.rates_of import rates_of

    kind = device or ("cuda" if torch.cuda.device_count() else "cpu")
    return rates_of(torch.device(kind))[0].links


def measure_links(links: Links, device: str | None = None) -> MeasuredLinks | None:
    """Measure the links of a run; all ranks must call it, and only the first returns a result.

    Args:
        links: Links before the measurement.
        device: "cpu" or "cuda"; None for CUDA if there is a GPU.

    Raises:
        PlanError: There is only one rank, or one GPU.
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
        taken = {} if place.type == "cpu" else {"nccl_bytes": _bytes_of_nccl(place)}
        return measured_between(rank, ranks, place) | taken
    finally:
        dist.destroy_process_group()


def _bytes_of_nccl(place: torch.device) -> int:
    """Measure what NCCL takes of a device for its first communicator; a collective."""
    one = torch.zeros(1, device=place)
    torch.cuda.synchronize(place)
    before = torch.cuda.mem_get_info(place)[0]
    dist.all_reduce(one)
    torch.cuda.synchronize(place)
    return int(before - torch.cuda.mem_get_info(place)[0])


def measured_between(rank: int, ranks: int, place: torch.device) -> dict[str, Any]:
    """Measure the seconds of messages by size, for every place of pairs; a collective.

    Args:
        rank, ranks: Rank of this process, and number of ranks of the default group.
        place: Device of this rank.
    """
    if ranks < 2:
        raise PlanError("cannot measure links between ranks: there is one rank; start two or more")
    everyones: list[Any] = [None] * ranks
    # torchrun's index of the node
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
    """Return the ranks of a group and seconds by size, for each kind of collective; of the slowest rank."""
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
    """Return the median seconds of a collective, by the bytes that a rank contributes."""
    n, best = len(group), list[float]()
    for size in SIZES:
        # one row per rank of the group
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
    """Run one collective on this rank's contribution, by its name in plans."""
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
    """Measure the seconds of a message to the other rank, by size: the minimum, or the median if pairs share a link.

    With a shared link, the minimum may be a message that was sent while other pairs paused. The reply is the smallest
    message: pairs that measure concurrently load one direction of a link; large replies would load both, and the link
    would look twice as fast.
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
    """Compute links from the seconds of messages."""

    def bandwidth(seconds: list[float]) -> float:
        # if the largest message takes no longer than the smallest one, only a lower bound of the bandwidth is known
        return (SIZES[-1] - SIZES[0]) / max(seconds[-1] - min(seconds), 1e-9)

    # other work on the machine may disturb all rounds of the smallest message
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
            # in a round a rank sends `part` of its contribution, so contributed bytes per second times rounds and part
            # is the rate of the wire; the share is relative to the measured links, by which plans multiply it
            times, part = rounds(kind, ranks)
            start = min(by_size) / times
            reached = bandwidth(by_size) * times * part / links.bandwidth(ranks, inner=inner)
            measured.setdefault(axis, {})[kind] = [start, reached]
    links = replace(links, collectives=measured)
    return MeasuredLinks(links=links, seconds=seconds, nccl_bytes=found.get("nccl_bytes"))
