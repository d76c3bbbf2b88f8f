"""Two stages on two ranks that a slow link joins: the cut that knows what is sent, beside the even one, really run.

    sudo python -m benchmarks.pipeline.shaped_links [--mbit 200 20] [--rounds 5] [--quick] [--write]

As root: two network namespaces, joined by a pair of virtual links whose rate `tc` limits in both directions (a token
bucket; no delay is added), one gloo rank in each. The model is VGG-16, every convolution, rectifier and pooling a block
of its own, as in torchvision; its even cut is before a pooling, so that four times as much is sent as after it. Seconds
of blocks are measured one by one, what is sent takes its bytes by the rate, and `cut_pipeline` cuts by both. The two
cuts take turns in one run: the median of every round's steps, and of these. `--write` puts the table into
docs/reports/pipeline.md. About two minutes.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch.utils.data import DataLoader

from benchmarks.page import ROOT, origin, paragraph, read_part, table, write_part
from benchmarks.pipeline.models import VGG, measured
from benchmarks.pipeline.training import PAGE, Watch, ends_of, recut
from benchmarks.training.whole_step import QUIET
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.quantities import format_bytes, format_seconds
from lightning_amp.techniques.pipeline.schedule.cut import cut_pipeline

PART = "pipeline.shaped_links"
RANKS, MICRO_BATCHES, SAMPLES, STEPS, REPEATS = 2, 4, 32, 6, 5
SIZE = {"side": 64, "narrow": 8, "fine": True}
NAMESPACES, LINKS = ("amp-stage-0", "amp-stage-1"), ("amp-veth-0", "amp-veth-1")
ADDRESSES, PORT = ("10.231.7.1", "10.231.7.2"), 29_731
BURST = 32 * 1024
"""Bytes that may pass at once."""
PROBE = 4 * 2**20
"""Bytes of a message that is timed, to know what the link really lets through."""


def refuse_without_root() -> None:
    """Say what is needed.

    Raises:
        SystemExit: The user is not root, or a program is not there.
    """
    if os.geteuid() != 0:
        raise SystemExit(
            f"network namespaces and shaped links need root, found user {os.geteuid()!r}: run this command by sudo"
        )
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise SystemExit(
                f"shaped links need the program {program!r} (iproute2), which is not there: install it"
            )


@contextmanager
def linked(mbit: int) -> Iterator[None]:
    """Two namespaces with a link of this rate between them, for as long as the block lasts."""

    def call(*words: object) -> None:
        subprocess.run([str(word) for word in words], check=True)

    made = []
    try:
        for name in NAMESPACES:
            call("ip", "netns", "add", name)
            made.append(name)
        call(
            "ip",
            "link",
            "add",
            LINKS[0],
            "netns",
            NAMESPACES[0],
            "type",
            "veth",
            "peer",
            LINKS[1],
            "netns",
            NAMESPACES[1],
        )
        for name, link, address in zip(NAMESPACES, LINKS, ADDRESSES, strict=True):
            inside = ("ip", "netns", "exec", name)
            call(*inside, "ip", "addr", "add", f"{address}/24", "dev", link)
            call(*inside, "ip", "link", "set", link, "up")
            call(*inside, "ip", "link", "set", "lo", "up")
            limit = ("rate", f"{mbit}mbit", "burst", BURST, "latency", "1s")
            call(*inside, "tc", "qdisc", "add", "dev", link, "root", "tbf", *limit)
    except BaseException:
        remove(made)
        raise
    try:
        yield
    finally:
        remove(made)


def remove(names: list[str]) -> None:
    """Namespaces, with the links in them."""
    for name in names:
        subprocess.run(["ip", "netns", "del", name], check=False)


def run(mbit: int, rounds: int) -> dict[str, Any]:
    """Both ranks, each in its namespace; what rank 0 has found.

    Raises:
        SystemExit: A rank was lost.
    """
    paths = os.pathsep.join([str(ROOT), *sys.path])
    asked = ["--rank", "--mbit", str(mbit), "--rounds", str(rounds)]
    ranks = []
    for rank, (name, link) in enumerate(zip(NAMESPACES, LINKS, strict=True)):
        environment = os.environ | {
            **{"OMP_NUM_THREADS": "1", "PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": link},
            **{"RANK": str(rank), "LOCAL_RANK": "0", "GROUP_RANK": str(rank), "WORLD_SIZE": str(RANKS)},
            **{"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(PORT), "TORCHELASTIC_RUN_ID": "shaped_links"},
        }
        command = [
            "ip",
            "netns",
            "exec",
            name,
            sys.executable,
            "-m",
            "benchmarks.pipeline.shaped_links",
            *asked,
        ]
        ranks.append(
            subprocess.Popen(
                command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
        )
    said = [rank.communicate() for rank in ranks]
    lines = [line for line in said[0][0].splitlines() if line.startswith("{")]
    if any(rank.returncode for rank in ranks) or not lines:
        raise SystemExit("\n".join(errors[-3000:] for _, errors in said))
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def on_this_rank(mbit: int, rounds: int) -> None:
    """All fits of this rank; rank 0 prints one line of JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    module, batches = made()
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        box[0] = cuts(module, batches[0], mbit)
    dist.broadcast_object_list(box, 0)
    probed = probe()
    strategy = AMPStrategy(strategies="pipeline", micro_batches=MICRO_BATCHES, model_parallel_size=RANKS)
    fit(strategy)
    assert strategy.plan is not None, "it was carried out"
    seconds: dict[str, list[float]] = {name: [] for name in box[0]}
    for _ in range(rounds):
        for name, cut in box[0].items():
            watch = fit(AMPStrategy(plan=recut(strategy.plan, cut["ends"])))
            # the first step looks at the samples, and settles who holds what
            steps = [b - a for a, b in zip(watch.ends[1:], watch.ends[2:], strict=False)]
            seconds[name].append(median(steps))
    if dist.get_rank() == 0:
        print(json.dumps({"probe": probed, "cuts": box[0], "seconds": seconds}), flush=True)
    dist.destroy_process_group()


def made() -> tuple[VGG, list[torch.Tensor]]:
    """The model, and its batches."""
    torch.manual_seed(0)
    module = VGG(**SIZE)  # type: ignore[arg-type]
    return module, [torch.randn(SAMPLES, 3, 64, 64) for _ in range(STEPS)]


def fit(strategy: AMPStrategy) -> Watch:
    """Some steps."""
    module, batches = made()
    watch = Watch(None)
    watch.norms = []
    trainer = Trainer(
        **{
            "strategy": strategy,
            "devices": 1,
            "num_nodes": RANKS,
            "accelerator": "cpu",
            "max_epochs": 1,
            **QUIET,
        },
        plugins=[TorchElasticEnvironment()],
        callbacks=[watch],
        use_distributed_sampler=False,
    )
    trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return watch


def cuts(module: VGG, batch: torch.Tensor, mbit: int) -> dict[str, Any]:
    """Both cuts: their ends, what a micro-batch sends, and the slowest stage or sending, forward and backward."""
    times = measured(module, batch[: SAMPLES // MICRO_BATCHES], REPEATS)
    sends = times["sent"] * 8 / (mbit * 1e6)
    back = [0.0, *sends[:-1]]
    best = cut_pipeline(
        times["forward"], times["backward"], RANKS, send_forward=sends, send_backward=back
    ).ends
    found = {}
    for name, ends in {"knows what is sent": best, "even": ends_of("even", len(sends), RANKS)}.items():
        at = ends[0]
        found[name] = {
            "ends": list(ends),
            "sent": int(times["sent"][at - 1]),
            "sum": sum(
                max(float(times[way][:at].sum()), float(times[way][at:].sum()), float(sends[at - 1]))
                for way in ("forward", "backward")
            ),
        }
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


def lines_of(found: dict[int, dict[str, Any]], rounds: int, *, command: str) -> Iterator[str]:
    """The part of the page, from what was found by rate."""
    probes = " and ".join(f"{one['probe'] / 1e6:.0f} Mbit/s for {mbit}" for mbit, one in found.items())
    yield from paragraph(
        f"""Real runs on shaped links. {origin(command)} Two gloo ranks of one thread, each in a network namespace of
        its own, joined by a link whose rate `tc` limits in both directions; a message of {format_bytes(PROBE)}
        passed at {probes}. VGG-16 {SIZE["narrow"]} times narrower, each convolution, rectifier and pooling a block,
        images of {SIZE["side"]} x {SIZE["side"]} in float32, {SAMPLES} in {MICRO_BATCHES} micro-batches by 1f1b. The
        two cuts took turns; seconds of a step are the median of {rounds} rounds, beside the least and the most. The
        predicted sum is that of the slowest stage or sending forward, and the slowest backward (Eq. 9), from blocks
        measured one by one."""
    )
    rows = []
    for mbit, one in found.items():
        for name, cut in one["cuts"].items():
            times = one["seconds"][name]
            rows.append(
                [
                    *(f"{mbit} Mbit/s", name, ",".join(map(str, cut["ends"])), format_bytes(cut["sent"])),
                    *(format_seconds(cut["sum"]), format_seconds(median(times))),
                    f"{format_seconds(min(times))} to {format_seconds(max(times))}",
                ]
            )
    header = ["link", "cut", "ends", "sent by a micro-batch, each way", "predicted sum", "a step", "rounds"]
    yield from table(header, rows)


def main() -> None:
    """Run, and print or write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mbit", type=int, nargs="+", default=[200, 20], help="rates of the link")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--write", action="store_true", help="put the table into docs/reports/pipeline.md")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    rounds = 1 if asked.quick else asked.rounds
    if asked.rank:
        on_this_rank(asked.mbit[0], rounds)
        return
    refuse_without_root()
    if asked.write:
        read_part(PAGE, PART)  # a page without markers is refused before anything is measured
    found = {}
    for mbit in asked.mbit:
        with linked(mbit):
            found[mbit] = run(mbit, rounds)
    command = f"python -m benchmarks.pipeline.shaped_links{' --quick' * asked.quick} --write"
    lines = list(lines_of(found, rounds, command=command))
    if asked.write:
        write_part(PAGE, PART, lines)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
