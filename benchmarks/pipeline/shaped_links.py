"""Two stages on two ranks that a slow link joins: the cut that knows what is sent, beside the even one, really run.

    sudo python -m benchmarks.pipeline.shaped_links [--mbit 200 20] [--rounds 5] [--quick] [--write]

As root: two network namespaces with a link of limited rate (benchmarks/nodes.py), one gloo rank in each. The model is
VGG-16, every convolution, rectifier and pooling a block of its own, as in torchvision; its even cut is before a
pooling, so that four times as much is sent as after it. Seconds of blocks are measured one by one, what is sent takes
its bytes by the rate, and `cut_pipeline` cuts by both. The two cuts take turns in one run: the median of every round's
steps, and of these. `--write` puts the table into docs/reports/pipeline.md. About two minutes, with --quick (one rate,
one round) half a minute.
"""

import argparse
import json
import time
import warnings
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.nodes import linked, on_nodes, step_seconds
from benchmarks.page import origin, read_part, write_as_it_grows
from benchmarks.pipeline.models import VGG, measured
from benchmarks.pipeline.training import PAGE, ends_of, recut
from lightning_amp import AMPStrategy
from lightning_amp.quantities import format_bytes, format_seconds
from lightning_amp.techniques.pipeline.schedule.cut import cut_pipeline

PART, RANKS, MICRO_BATCHES, SAMPLES, STEPS, REPEATS, SIDE, NARROW = "pipeline.shaped_links", 2, 4, 32, 6, 5, 64, 8
PROBE = 4 * 2**20
"""Bytes of a message that is timed, to know what the link really lets through."""
HEADER = ["link", "cut", "ends", "sent by a micro-batch, each way", "predicted sum", "a step", "rounds"]


def made() -> tuple[VGG, list[torch.Tensor]]:
    """The model, and its batches."""
    torch.manual_seed(0)
    return VGG(side=SIDE, narrow=NARROW, fine=True), [torch.randn(SAMPLES, 3, SIDE, SIDE) for _ in range(STEPS)]


def on_this_rank(mbit: int, rounds: int) -> None:
    """All fits of this rank; rank 0 prints one line of JSON."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    module, batches = made()
    box: list[Any] = [cuts(module, batches[0], mbit) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box, 0)
    probed, seconds = probe(), {name: list[float]() for name in box[0]}
    strategy = AMPStrategy(strategies="pipeline", micro_batches=MICRO_BATCHES, model_parallel_size=RANKS)
    step_seconds(strategy, *made())
    assert strategy.plan is not None, "it was carried out"
    for _ in range(rounds):
        for name, cut in box[0].items():
            # the first step looks at the samples, and settles who holds what
            seconds[name].append(step_seconds(AMPStrategy(plan=recut(strategy.plan, cut["ends"])), *made()))
    if dist.get_rank() == 0:
        print(json.dumps({"probe": probed, "cuts": box[0], "seconds": seconds}), flush=True)
    dist.destroy_process_group()


def cuts(module: VGG, batch: torch.Tensor, mbit: int) -> dict[str, Any]:
    """Both cuts: their ends, what a micro-batch sends, and the slowest stage or sending, forward and backward."""
    times = measured(module, batch[: SAMPLES // MICRO_BATCHES], REPEATS)
    sends = times["sent"] * 8 / (mbit * 1e6)
    back = [0.0, *sends[:-1]]
    best = cut_pipeline(times["forward"], times["backward"], RANKS, send_forward=sends, send_backward=back).ends
    found = {}
    for name, ends in {"knows what is sent": best, "even": ends_of("even", len(sends), RANKS)}.items():
        at, both = ends[0], (times["forward"], times["backward"])
        total = sum(max(float(one[:at].sum()), float(one[at:].sum()), float(sends[at - 1])) for one in both)
        found[name] = {"ends": list(ends), "sent": int(times["sent"][at - 1]), "sum": total}
    return found


def probe() -> float:
    """Bits per second that a large message has from rank 0 to rank 1."""
    data = torch.zeros(PROBE, dtype=torch.uint8)
    dist.barrier()
    begin = time.perf_counter()
    # an answer says that it has come
    if dist.get_rank() == 0:
        dist.send(data, 1)
        dist.recv(data[:1], 1)
    else:
        dist.recv(data, 0)
        dist.send(data[:1], 0)
    return 8 * PROBE / (time.perf_counter() - begin)


def rows(found: dict[int, Any]) -> Iterator[list[str]]:
    """Of the table, from what was found by rate."""
    for mbit, one in found.items():
        for name, cut in one["cuts"].items():
            times = one["seconds"][name]
            yield [
                *(f"{mbit} Mbit/s", name, ",".join(map(str, cut["ends"])), format_bytes(cut["sent"])),
                *(format_seconds(cut["sum"]), format_seconds(median(times))),
                f"{format_seconds(min(times))} to {format_seconds(max(times))}",
            ]


def main() -> None:
    """Run, and print or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=int, nargs="+", default=[200, 20], help="rates of the link")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="20 Mbit/s, one round")
    parser.add_argument("--write", action="store_true", help="put the table into docs/reports/pipeline.md")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    rates, rounds = ([20], 1) if asked.quick else (asked.mbit, asked.rounds)
    if asked.rank:
        on_this_rank(asked.mbit[0], asked.rounds)
        return
    if asked.write:
        read_part(PAGE, PART)  # a page without markers is refused before anything is measured
    found = {}
    for mbit in rates:
        with linked(mbit):
            words = ["--rank", "--mbit", str(mbit), "--rounds", str(rounds)]
            found[mbit] = on_nodes("benchmarks.pipeline.shaped_links", words)
    probes = " and ".join(f"{one['probe'] / 1e6:.0f} Mbit/s for {mbit}" for mbit, one in found.items())
    first = f"""Real runs on shaped links. {origin("python -m benchmarks.pipeline.shaped_links --write")} Two gloo ranks
        of one thread, each in a network namespace of its own, joined by a link whose rate `tc` limits in both
        directions; a message of {format_bytes(PROBE)} passed at {probes}. VGG-16 {NARROW} times narrower, each
        convolution, rectifier and pooling a block, images of {SIDE} x {SIDE} in float32, {SAMPLES} in {MICRO_BATCHES}
        micro-batches by 1f1b. The two cuts took turns; seconds of a step are the median of {rounds} rounds, beside the
        least and the most. The predicted sum is that of the slowest stage or sending forward, and the slowest backward
        (Eq. 9), from blocks measured one by one."""
    write_as_it_grows(PAGE, PART, first, HEADER, rows(found), write=asked.write)


if __name__ == "__main__":
    main()
