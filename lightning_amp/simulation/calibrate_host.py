"""Measure the link between a device and host memory: each direction alone and both at once, of pinned and other memory.

The best of several copies of one large buffer counts. Copies of a GPU run on streams of their own, as those of a step
do. On a CPU a copy is one from memory to memory, no memory is pinned, and two copies run one after the other.
"""

import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from lightning_amp.costs.device_rates import Rates
from lightning_amp.costs.host_link import HostLink
from lightning_amp.text_table import table

SIZES = {"cpu": 2**26, "cuda": 2**28}
"""Bytes of a copy: many times the processor's cache, and few milliseconds of a GPU's link."""
ROUNDS, WARM_UP = 7, 2


def measure_host_link(place: torch.device, *, size: int | None = None) -> HostLink:
    """Measure the link of a device.

    On a machine with several NUMA nodes the memory is where the process runs: `numactl` chooses the node. Operators of
    the host run on as many cores as torch has threads.

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
