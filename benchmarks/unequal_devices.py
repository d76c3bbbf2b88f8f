"""Two stages on two ranks of which one has half of the processor: dealt as to equals, and by measured speeds.

    sudo python -m benchmarks.unequal_devices [--percent 40] [--rounds 3] [--write]

As root: each rank is in a control group of its own, whose CPU quota is some percent of a core for the first rank, half
of that for the second. The model has alike blocks and next to nothing beside them. The ideal is what the first rank
takes for the whole step alone, by what both can do together, 1 + 1/2; a schedule's bubble comes on top of it.
`AMPStrategy(device_speeds="measure")` and the plan without take turns; medians. Quotas have to be smaller than what
else runs on the machine leaves, or they hold nobody back. `--write` puts the table into docs/pipeline.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.page import ROOT, origin, paragraph, read_part, table, write_part
from benchmarks.pipeline.training import PAGE, Watch
from benchmarks.whole_step import QUIET
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.quantities import format_seconds

PART = "unequal_devices"
GROUPS = Path("/sys/fs/cgroup")
PERIOD = 20_000
"""Microseconds of a quota's period: short beside a micro-batch's pass."""
BLOCKS, WIDTH, SAMPLES, MICRO_BATCHES, STEPS = 18, 1024, 768, 12, 3


class Tower(pl.LightningModule):
    """Alike blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS))
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """A mean over samples."""
        loss: Tensor = self.blocks(batch).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        """Without state."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


@contextmanager
def held(names: dict[str, float]) -> Iterator[dict[str, Path]]:
    """Control groups with so many cores each: files that take the ids of processes.

    Raises:
        SystemExit: No root, or no control groups of processors.
    """
    if os.geteuid() != 0:
        raise SystemExit(f"CPU quotas need root, found user {os.geteuid()!r}: run this command by sudo")
    first = (GROUPS / "cpu" / "cpu.cfs_quota_us").parent
    v1 = first.is_dir()
    parent = first if v1 else GROUPS
    if not v1 and "cpu" not in (GROUPS / "cgroup.controllers").read_text().split():
        raise SystemExit(f"{GROUPS}: no control groups of processors, neither of version 1 nor of version 2")
    made = []
    try:
        for name, cores in names.items():
            group = parent / name
            group.mkdir()
            made.append(group)
            if v1:
                (group / "cpu.cfs_period_us").write_text(str(PERIOD))
                (group / "cpu.cfs_quota_us").write_text(str(int(cores * PERIOD)))
            else:
                (group / "cpu.max").write_text(f"{int(cores * PERIOD)} {PERIOD}")
        yield {group.name: group / "cgroup.procs" for group in made}
    finally:
        for group in made:
            group.rmdir()


def run(files: list[Path], rounds: int) -> dict[str, Any]:
    """A rank in each group; what rank 0 has found.

    Raises:
        SystemExit: A rank was lost.
    """
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank, file in enumerate(files):
            environment = os.environ | {
                **{"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
                **{
                    "RANK": str(rank),
                    "LOCAL_RANK": "0",
                    "GROUP_RANK": str(rank),
                    "WORLD_SIZE": str(len(files)),
                },
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29733", "TORCHELASTIC_RUN_ID": "unequal"},
            }
            command = [sys.executable, "-m", "benchmarks.unequal_devices", "--rounds", str(rounds)]
            command += ["--rank", str(file), "--folder", folder]
            ranks.append(
                subprocess.Popen(command, env=environment, cwd=ROOT, stderr=subprocess.PIPE, text=True)
            )
        said = [rank.communicate()[1] for rank in ranks]
        if any(rank.returncode for rank in ranks):
            raise SystemExit("\n".join(errors[-3000:] for errors in said))
        found: dict[str, Any] = json.loads((Path(folder) / "found").read_text())
        return found


def on_this_rank(group: Path, folder: Path, rounds: int) -> None:
    """All fits; rank 0 writes what it has found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    # imports are done by the whole processor, what is measured by its part
    group.write_text(str(os.getpid()))
    found: dict[str, Any] = {"alone": [], "alike": [], "measured": [], "ends": {}}
    for _ in range(rounds):
        if dist.get_rank() == 0:
            found["alone"].append(alone())
        dist.barrier()
        for name in ("alike", "measured"):
            strategy = AMPStrategy(
                strategies="pipeline",
                schedule="gpipe",
                micro_batches=MICRO_BATCHES,
                model_parallel_size=2,
                device_speeds="measure" if name == "measured" else None,
            )
            found[name].append(fit(strategy))
            assert strategy.plan is not None, "it was carried out"
            ends = ",".join(str(stage.end) for stage in strategy.plan.stages)
            found["ends"].setdefault(name, []).append(ends)
    if dist.get_rank() == 0:
        (folder / "found").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def alone() -> float:
    """Seconds of a step's micro-batches on this rank by itself, median."""
    import time

    module, batch = Tower(), torch.randn(SAMPLES, WIDTH)
    optimizer = module.configure_optimizers()
    times = []
    for _ in range(STEPS):
        begin = time.perf_counter()
        for part in batch.split(SAMPLES // MICRO_BATCHES):
            (module.training_step(part, 0) / MICRO_BATCHES).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter() - begin)
    return median(times[1:])


def fit(strategy: AMPStrategy) -> float:
    """Seconds of a step, median."""
    watch = Watch(None)
    trainer = pl.Trainer(
        **{
            "strategy": strategy,
            "devices": 1,
            "num_nodes": 2,
            "accelerator": "cpu",
            "max_epochs": 1,
            **QUIET,
        },
        plugins=[TorchElasticEnvironment()],
        callbacks=[watch],
        use_distributed_sampler=False,
    )
    # all ranks have the same
    torch.manual_seed(1)
    batches = [torch.randn(SAMPLES, WIDTH) for _ in range(STEPS + 1)]
    trainer.fit(Tower(), DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return median(b - a for a, b in zip(watch.ends[1:], watch.ends[2:], strict=False))


def main() -> None:
    """Run, and print or write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--percent", type=int, default=40, help="of a core, for the first rank")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="put the table into docs/pipeline.md")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rank:
        on_this_rank(asked.rank, asked.folder, asked.rounds)
        return
    if asked.write:
        read_part(PAGE, PART)  # a page without markers is refused before anything is measured
    with held({"amp-fast": asked.percent / 100, "amp-slow": asked.percent / 200}) as files:
        found = run(list(files.values()), asked.rounds)
    ideal = median(found["alone"]) / 1.5
    rows = [
        [
            name,
            " and ".join(sorted(set(found["ends"][name]))),
            format_seconds(median(found[name])),
            f"{median(found[name]) / ideal:.2f}",
        ]
        for name in ("alike", "measured")
    ]
    lines = [
        *paragraph(
            f"""{origin(f"python -m benchmarks.unequal_devices --percent {asked.percent} --write")} Two gloo ranks with
            quotas of {asked.percent} and {asked.percent // 2} % of a core, {BLOCKS} alike blocks, {MICRO_BATCHES}
            micro-batches by gpipe, medians of {asked.rounds} rounds in turn. The ideal is {format_seconds(ideal)}: what
            the first rank takes alone ({format_seconds(median(found["alone"]))}), by 1.5."""
        ),
        *table(["ranks taken as", "ends", "a step", "by the ideal"], rows),
    ]
    if asked.write:
        write_part(PAGE, PART, lines)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
