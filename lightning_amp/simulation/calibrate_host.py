"""Measure the link between a device and host memory: each direction alone and both at once, of pinned and other memory.

The best of several copies of one large buffer counts. Copies of a GPU run on streams of their own, as those of a step
do. On a CPU a copy is one from memory to memory, no memory is pinned, and two copies run one after the other. On a
machine with several NUMA nodes, the link is measured from each node's memory too: a process that is not bound to the
near one may have the far rate.
"""

import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lightning_amp.costs.device_rates import Rates
from lightning_amp.costs.host_link import HostLink
from lightning_amp.text_table import table

SIZES = {"cpu": 2**26, "cuda": 2**28}
"""Bytes of a copy: many times the processor's cache, and few milliseconds of a GPU's link."""
ROUNDS, WARM_UP = 7, 2
NODES = Path("/sys/devices/system/node")
"""Where Linux lists NUMA nodes and their cores."""


def measure_host_link(place: torch.device, *, size: int | None = None) -> HostLink:
    """Measure the link of a device.

    The memory is that of the NUMA node where the process runs. Operators of the host run on as many cores as torch has
    threads.

    Args:
        place: The device.
        size: Bytes of a copy; None for that of `SIZES`.
    """
    n = size or SIZES[place.type]
    sent, received = (torch.ones(n, dtype=torch.uint8, device=place) for _ in range(2))
    pageable = [torch.ones(n, dtype=torch.uint8) for _ in range(2)]
    of_pageable = [n / _seconds([pair], place) for pair in ((pageable[0], sent), (received, pageable[1]))]
    # a CPU without a GPU pins nothing
    pinned = [host.pin_memory() for host in pageable] if place.type == "cuda" else pageable
    pairs = [(pinned[0], sent), (received, pinned[1])]
    out, back = (n / _seconds([pair], place) for pair in pairs)
    both = n / _seconds(pairs, place)
    memory = [host.view(torch.float32) for host in pageable]
    worked = min(_timed(partial(memory[0].add_, memory[1]), torch.device("cpu")) for _ in range(WARM_UP + ROUNDS))
    # other work on the machine may disturb copies of one direction alone
    return HostLink(
        out=out,
        back=back,
        both=min(both, out, back),
        pageable_out=of_pageable[0],
        pageable_back=of_pageable[1],
        # two are read, one is written
        memory=3 * n / worked,
    )


def measure_nodes(place: torch.device, *, size: int | None = None) -> dict[int, HostLink]:
    """Measure the link of a device from each NUMA node whose cores this process may use; nothing for fewer than two.

    The arguments are those of `measure_host_link`.
    """
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set[int]()
    listed = {int(path.parent.name[4:]): _cores(path.read_text()) for path in NODES.glob("node[0-9]*/cpulist")}
    nodes = {node: cores & allowed for node, cores in sorted(listed.items()) if cores & allowed}
    found = dict[int, HostLink]()
    try:
        for node, cores in nodes.items() if len(nodes) > 1 else ():
            # memory lies where the thread runs that first writes to it
            os.sched_setaffinity(0, cores)
            found[node] = measure_host_link(place, size=size)
    finally:
        if len(nodes) > 1:
            os.sched_setaffinity(0, allowed)
    return found


def _cores(listed: str) -> set[int]:
    """Return the cores of a list such as "0-3,8"."""
    ends = [part.partition("-") for part in listed.strip().split(",") if part]
    return {core for first, _, last in ends for core in range(int(first), int(last or first) + 1)}


def nodes_report(found: Mapping[int, HostLink]) -> str:
    """Format the rates of pinned memory of NUMA nodes."""
    rows = [[f"node {node}", _rate(one.out), _rate(one.back), _rate(one.both)] for node, one in found.items()]
    nearest = max(found, key=lambda node: found[node].both)
    return (
        table(["memory of", "to the host", "to the device", "each, both at once"], rows)
        + f"\n\nRun training on the nearest node: numactl --cpunodebind={nearest} --membind={nearest}"
    )


def host_link_report(found: HostLink, before: Rates) -> str:
    """Format the rates; `before` are those of the device without the measurement."""
    if not before.launches:
        return f"{_rate(found.out)} from memory to memory, which is the link to host memory of a CPU"
    rows = [
        ["to the host", _rate(found.out), _rate(found.pageable_out)],
        ["to the device", _rate(found.back), _rate(found.pageable_back)],
        ["each, both at once", _rate(found.both), ""],
        ["before", _rate(before.host_bandwidth), ""],
        ["operators of the host", _rate(found.memory), ""],
        ["before", _rate(before.host_memory), ""],
    ]
    return table(["link to host memory", "pinned", "pageable"], rows)


def _rate(per_second: float) -> str:
    return f"{per_second / 1e9:.3g} GB/s"


def _seconds(pairs: list[tuple[Tensor, Tensor]], place: torch.device) -> float:
    """Return the seconds of the best round of copies, (target, source), which run at once on a GPU."""
    copy = _on_streams(pairs, place) if place.type == "cuda" else lambda: [to.copy_(source) for to, source in pairs]
    return min([_timed(copy, place) for _ in range(WARM_UP + ROUNDS)][WARM_UP:])


def _timed(copy: Callable[[], object], place: torch.device) -> float:
    begin = time.perf_counter()
    copy()
    if place.type == "cuda":
        torch.cuda.synchronize(place)
    return time.perf_counter() - begin


def _on_streams(pairs: list[tuple[Tensor, Tensor]], place: torch.device) -> Callable[[], object]:
    streams = [torch.cuda.Stream(place) for _ in pairs]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(place)

    def copy() -> None:
        for stream, (to, source) in zip(streams, pairs, strict=True):
            with torch.cuda.stream(stream):
                to.copy_(source, non_blocking=True)

    return copy
