"""A tiny training whose ranks fail as they are told, started in the ways that Lightning knows.

A `Case` says which rank fails, where, and how. `run_group` forks ranks from one process that has imported torch,
`run_script` starts this file as a user's script, by itself or by torchrun. Used by test_faults.py and
test_several_nodes.py.
"""

import dataclasses
import json
import multiprocessing
import os
import resource
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_amp.lightning.strategy.strategy import AMPStrategy
from tests.any_module import QUIET
from tests.optimised import Optimised

SAVED_EVERY = 2
AT = 5
"""The step in which a rank fails, after two checkpoints."""
LIMIT_S = 60.0
START_S = 120.0
"""For importing torch in every process of a script, on a busy machine."""
MARK = "LIGHTNING_AMP_TEST"
UNLIMITED = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


@dataclass(frozen=True)
class Case:
    """One fault: `rank` does `how` (of `HOW`, or "nan") in `hook`; `epoch` in steps, `resume` a file in the folder,
    `batch` the samples of a data rank.
    """

    rank: int = -1
    hook: str = ""
    how: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    settings_of_faulty: dict[str, Any] = field(default_factory=dict)
    workers: int = 0
    resume: str = ""
    steps: int = 8
    epoch: int = 8
    nodes: int = 1
    batch: int = 1
    saves_on_exception: bool = False


def boom() -> None:
    raise ValueError("boom")


def full_disk() -> None:
    """No file may grow beyond a kilobyte, as on a disk that is full."""
    # else modules that are imported later would be compiled into files of 1,000 bytes
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))


def killed_while_saving() -> None:
    """The first flush of a checkpoint to the disk is this process's last deed."""
    os.fsync = lambda _: os.kill(os.getpid(), signal.SIGKILL)


def yourself(signum: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), signum)


HOW: dict[str, Callable[[], Any]] = {
    "raise": boom,
    "kill": yourself(signal.SIGKILL),
    "stop": yourself(signal.SIGSTOP),
    "term": yourself(signal.SIGTERM),
    "interrupt": yourself(signal.SIGINT),
    "stick": lambda: time.sleep(600),
    "memory": lambda: torch.empty(1 << 50),
    "full disk": full_disk,
    "killed while saving": killed_while_saving,
    "another collective": lambda: dist.barrier(),
}


class Numbers(Dataset[Tensor]):
    def __init__(self, case: Case, folder: Path) -> None:
        self.case, self.folder = case, folder
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(2 * case.batch * case.epoch, 3, generator=generator, dtype=torch.float64)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Tensor:
        if self.case.hook == "worker" and os.environ["RANK_OF_CASE"] == str(self.case.rank):
            (self.folder / "fault").touch()
            HOW[self.case.how]()
        return self.x[index]


class Model(Optimised, by=torch.optim.Adam, lr=0.1):
    """Two layers, and faults; in a list where they are to be stages."""

    def __init__(self, case: Case, folder: Path) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.case, self.folder = case, folder
        layers = [torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)]
        if case.settings.get("strategies") == "pipeline":
            self.layers = torch.nn.Sequential(*layers)
        else:
            self.first, self.last = layers
        self.double()

    def fail(self, hook: str, step: int = AT) -> bool:
        here = self.case.hook == hook and self.case.rank == self.global_rank and step == AT
        if here:
            (self.folder / "fault").touch()
            HOW.get(self.case.how, lambda: None)()
        return here

    def setup(self, stage: str) -> None:
        self.fail("setup")

    def on_train_start(self) -> None:
        self.fail("on_train_start")

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.fail("on_train_batch_start", self.global_step)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.fail("training_step", self.global_step) and self.case.how == "nan":
            self.last.weight.data.fill_(torch.nan)
        y = self.layers(batch) if hasattr(self, "layers") else self.last(self.first(batch))
        return y.square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.fail("validation_step")

    def loader(self) -> DataLoader[Tensor]:
        return DataLoader(
            Numbers(self.case, self.folder),
            batch_size=self.case.batch,
            num_workers=self.case.workers,
            multiprocessing_context="fork" if self.case.workers else None,
        )

    train_dataloader = val_dataloader = loader


class FailingSave(Callback):
    """A fault in the checkpoint after the faulty batch; the disk is there again for what a person reads."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step > AT:
            pl_module.fail("save_checkpoint")

    def on_exception(self, *_: Any) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, UNLIMITED)


def fit(case: Case, folder: Path, *, devices: int) -> None:
    """One training, on this rank, which writes what has come of it."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    model = Model(case, folder)
    validates = case.hook == "validation_step"
    trainer = Trainer(
        accelerator="cpu",
        devices=devices,
        num_nodes=case.nodes,
        max_steps=case.steps,
        strategy=AMPStrategy(**case.settings),
        num_sanity_val_steps=0,
        callbacks=[
            FailingSave(),
            ModelCheckpoint(folder, "{step}", every_n_train_steps=SAVED_EVERY, save_top_k=-1),
            *([OnExceptionCheckpoint(folder)] if case.saves_on_exception else []),
        ],
        val_check_interval=AT if validates else None,
        limit_val_batches=1.0 if validates else 0,
        default_root_dir=folder,
        **QUIET | {"enable_checkpointing": True},
    )
    os.environ["RANK_OF_CASE"] = str(trainer.global_rank)
    trainer.fit(model, ckpt_path=folder / case.resume if case.resume else None)
    strategy: Any = trainer.strategy
    mesh = strategy.plan.mesh
    found = {
        "state": model.state_dict(),
        "environment": type(strategy.cluster_environment).__name__,
        "node": trainer.node_rank,
        "mesh": [mesh.data, mesh.model],
        "notes": list(map(str, strategy.plan.notes)),
    }
    torch.save(found, folder / f"end{trainer.global_rank}.pt")


def serve(case: Case, folder: Path, rank: int, environment: dict[str, str], devices: int) -> None:
    """A rank: its output goes to a file."""
    os.setpgid(0, 0)
    out = (folder / f"rank{rank}.txt").open("w")
    os.dup2(out.fileno(), 1)
    os.dup2(out.fileno(), 2)
    os.environ.update(environment)
    if rank == case.rank:
        case = dataclasses.replace(case, settings={**case.settings, **case.settings_of_faulty})
    signal.signal(signal.SIGINT, signal.default_int_handler)
    fit(case, folder, devices=devices)


@dataclass
class Outcome:
    """How a run ended: seconds from the fault, exit statuses, what was said, and the processes that are left."""

    seconds: float
    statuses: list[int | None]
    texts: list[str]
    left: list[int]


def environment_of(rank: int, ranks: int, port: int) -> dict[str, str]:
    """Of ranks on one machine that something else has started."""
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "NODE_RANK": "0",
    }


def run_group(
    case: Case,
    folder: Path,
    *,
    ranks: int = 2,
    environment: Callable[[int, int, int], dict[str, str]] = environment_of,
    devices: int | None = None,
) -> Outcome:
    """Fork ranks, and wait until all have ended; one that was stopped is woken when the others have."""
    folder.mkdir(parents=True, exist_ok=True)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.lightning.faults.fault_cases"])
    port = free_port()
    processes = [
        context.Process(target=serve, args=(case, folder, rank, environment(rank, ranks, port), devices or ranks))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    groups = [process.pid for process in processes]
    waited_for = [p for r, p in enumerate(processes) if case.how != "stop" or r != case.rank]
    seconds = wait_for(lambda: all(p.exitcode is not None for p in waited_for), folder)
    if case.how == "stop" and processes[case.rank].exitcode is None:
        os.kill(processes[case.rank].pid or 0, signal.SIGCONT)
    for process in processes:
        process.join(timeout=20)
    left = left_after(lambda: [p.pid for p in psutil.process_iter() if _group(p) in groups])
    texts = [(folder / f"rank{r}.txt").read_text() for r in range(ranks)]
    return Outcome(seconds, [p.exitcode for p in processes], texts, left)


def run_scripts(
    case: Case,
    folder: Path,
    commands: Sequence[Sequence[str]],
    *,
    devices: int,
    after_fault: Callable[[list["subprocess.Popen[str]"]], None] = lambda _: None,
) -> Outcome:
    """Start this file as scripts, such as two torchrun agents, and wait until all processes have ended.

    `after_fault` is called with the started processes once the fault has happened.
    """
    folder.mkdir(parents=True, exist_ok=True)
    arguments = [__file__, json.dumps(dataclasses.asdict(case)), str(folder), str(devices)]
    mark = str(folder)
    environment = {**os.environ, MARK: mark, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())}
    started = []
    for i, command in enumerate(commands):
        with (folder / f"script{i}.txt").open("w") as out:
            process = subprocess.Popen(
                [*command, *arguments], env=environment, stdout=out, stderr=subprocess.STDOUT, text=True
            )
        started.append(process)
    fault = folder / "fault"
    wait_for(lambda: fault.exists() or all(p.poll() is not None for p in started), folder, limit=START_S)
    after_fault(started)
    seconds = wait_for(lambda: all(p.poll() is not None for p in started), folder)
    left = left_after(lambda: _marked(mark))
    texts = [(folder / f"script{i}.txt").read_text() for i in range(len(commands))]
    return Outcome(seconds, [p.poll() for p in started], texts, left)


def wait_for(done: Callable[[], bool], folder: Path, *, limit: float = LIMIT_S) -> float:
    begin = since = time.monotonic()
    seen = False
    while not done() and time.monotonic() - begin < limit:
        if not seen and (folder / "fault").exists():
            seen, since = True, time.monotonic()
        time.sleep(0.02)
    return time.monotonic() - since


def left_after(find: Callable[[], list[int]], *, seconds: float = 6.0) -> list[int]:
    """Processes that are still there; torch's loader workers look for their parent every 5 s."""
    until = time.monotonic() + seconds
    while found := find():
        if time.monotonic() > until:
            for pid in found:
                os.kill(pid, signal.SIGKILL)
            return found
        time.sleep(0.05)
    return []


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def _group(process: psutil.Process) -> int:
    try:
        return -1 if process.status() == psutil.STATUS_ZOMBIE else os.getpgid(process.pid)
    except (ProcessLookupError, psutil.Error):
        return -1


def _marked(mark: str) -> list[int]:
    return [process.pid for process in psutil.process_iter() if _mark_of(process) == mark]


def _mark_of(process: psutil.Process) -> str:
    try:
        return "" if process.status() == psutil.STATUS_ZOMBIE else process.environ().get(MARK, "")
    except psutil.Error:
        return ""


if __name__ == "__main__":
    # a shell's background jobs ignore it, and so do their children
    signal.signal(signal.SIGINT, signal.default_int_handler)
    fit(Case(**json.loads(sys.argv[1])), Path(sys.argv[2]), devices=int(sys.argv[3]))
