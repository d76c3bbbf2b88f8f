"""Several processes on one device: every technique of several ranks against one process.

A device that several processes share has no NCCL, which refuses it. Each process is a node of its own with one device,
and gloo carries the tensors of CUDA through the host's memory. So seconds and bytes say nothing here; streams, events,
devices, types and kernels are those of several GPUs. Compared are the losses, the gradients of the first step and the
parameters after three: in float64 with one process, in bf16-mixed with float64, beside the error of one process.

A rank may do the same in a shell: `NODE_RANK=0 LOCAL_RANK=0 MASTER_ADDR=localhost MASTER_PORT=29500 python train.py`
and `Trainer(accelerator="gpu", devices=1, num_nodes=2, strategy=AMPStrategy(process_group_backend="gloo"))`.
"""

import os
import tempfile
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment  # type: ignore[attr-defined]

from benchmarks.gpu.runner import Work
from benchmarks.models import GPT
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.verification.compare import ALLOWED, Record, Recorder, errors, loss_errors
from lightning_amp.verification.training_run import RankLoader, converted
from tests.any_module import QUIET
from tests.lightning.conformance import cases
from tests.ranks import run_ranks

STEPS = 3
EXACT, MIXED = "64-true", "bf16-mixed"
TIMES = 3.0
"""How often the error of one process in bf16-mixed several ranks may have."""
LEAST = 1e-3
"""An error that is rounding in bf16-mixed where one process has less."""
EXACTLY = {
    "losses": ALLOWED["float64"]["later losses"],
    "gradients": ALLOWED["float64"]["gradients"],
    "parameters": ALLOWED["float64"]["parameters"],
}
"""Errors that are rounding in float64."""
START_S, MOST_S = 15.0, 30.0
"""For processes that import the library and ask for the device; the most seconds of a row, whose ranks may hang."""
Errors = dict[str, float]


class Trained(NamedTuple):
    """What a process has recorded, its rank of the data axis, and its techniques."""

    record: Record
    data_rank: int = 0
    plan: str = ""


class Case(NamedTuple):
    """A technique on a model, "words" or "decoder"; its options of AMPStrategy for so many ranks."""

    strategies: str
    model: str = "words"

    def options(self, ranks: int) -> dict[str, Any]:
        """The mesh is named, for a node has one rank."""
        found: dict[str, Any] = {"strategies": self.strategies}
        if "tensor3d" in self.strategies:
            return found | {"tensor_grid": (2, ranks // 2, 1)}
        if self.model == "decoder":
            return found | {"model_parallel_size": 2}
        split = {"sequence", "pipeline"} & {*self.strategies.split(",")}
        return found | ({"model_parallel_size": ranks} if split else {})


CASES = (
    *map(Case, ("S1", "fsdp", "sequence", "tensor3d", "pipeline")),
    *(Case(strategies, "decoder") for strategies in (cases.STRATA, cases.NODES, cases.WIDE)),
)


class Words(GPT):
    """The shared GPT under descent, so that an error in a gradient is one in a parameter."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Momentum is a state."""
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.5)


def subject(model: str, *, tiny: bool) -> tuple[pl.LightningModule, list[Any]]:
    """A module in float64, and the batches of all ranks."""
    torch.manual_seed(0)
    if model == "decoder":
        return cases.Tiny().double(), [converted(batch, torch.float64) for batch in cases.batches(STEPS)]
    width, heads, words, positions = (16, 2, 50, 16) if tiny else (256, 4, 1000, 512)
    module = Words(width, heads, 4, words, positions).double()
    return module, [torch.randint(words, (4, positions + 1)) for _ in range(STEPS)]


def train(device: torch.device, precision: str, model: str, *, tiny: bool, ranks: int = 1, **options: Any) -> Trained:
    """Train as this process, with options as one of the ranks."""
    module, batches = subject(model, tiny=tiny)
    if precision == MIXED:
        module, batches = module.float(), [converted(batch, torch.float32) for batch in batches]
    strategy = AMPStrategy(process_group_backend="gloo", on_predicted_oom="warn", **options) if options else None

    def place() -> tuple[int, int]:
        found = strategy.distributed_sampler_kwargs if strategy else {"rank": 0, "num_replicas": 1}
        return found["rank"], found["num_replicas"]

    recorder, cuda = Recorder(), device.type == "cuda"
    trainer = pl.Trainer(
        **QUIET,
        accelerator="gpu" if cuda else "cpu",
        devices=[device.index] if cuda else 1,
        num_nodes=ranks,
        strategy=strategy or "auto",
        plugins=[LightningEnvironment()],
        precision=precision,  # type: ignore[arg-type]
        callbacks=[recorder],
        max_epochs=1,
        limit_val_batches=0,
        use_distributed_sampler=False,
    )
    trainer.fit(module, RankLoader(batches, ranks=ranks, place=place))
    record = recorder.record
    for kind in ("gradients", "parameters", "buffers"):
        setattr(record, kind, {name: value.cpu() for name, value in getattr(record, kind).items()})
    if strategy is None or strategy.plan is None:
        return Trained(record)
    return Trained(record, place()[0], ",".join(strategy.plan.strategies))


def _as_rank(
    rank: int, ranks: int, device: str, precision: str, case: Case, tiny: bool, options: Mapping[str, Any]
) -> Trained:
    # as a launcher of several nodes sets them
    os.environ.update(NODE_RANK=str(rank), LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="0")
    place = torch.device(device)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    return train(place, precision, case.model, tiny=tiny, ranks=ranks, **options)


def run(work: Work) -> None:
    """A row for each number of ranks, technique and precision."""
    one = {
        (model, precision): train(work.device, precision, model, tiny=work.tiny)
        for model in ("words", "decoder")
        for precision in (EXACT, MIXED)
    }
    wrong = list[str]()
    with tempfile.TemporaryDirectory() as folder:
        for ranks in work.ranks:
            for case in CASES:
                for precision in (EXACT, MIXED):
                    name = f"{case.strategies}, {precision}, {ranks} ranks"
                    if work.has_time(name, START_S):
                        plain = one[case.model, EXACT], one[case.model, precision]
                        wrong += [] if _row(work, Path(folder), ranks, case, precision, *plain) else [name]
    if work.device.type == "cuda":
        work.record.note(
            "gloo's messages from rank to rank are of the host's memory: pipelines send theirs through it."
        )
    if wrong:
        raise AssertionError(f"{wrong!r} failed, or are wrong by more than rounding")


def _row(work: Work, folder: Path, ranks: int, case: Case, precision: str, exact: Trained, one: Trained) -> bool:
    """Whether the ranks are right."""
    row: dict[str, Any] = {"ranks": ranks, "strategies": case.strategies, "precision": precision}
    arguments = str(work.device), precision, case, work.tiny, case.options(ranks)
    try:
        found = run_ranks(_as_rank, ranks, folder, *arguments, timeout=MOST_S)
    except pytest.fail.Exception as error:
        # of the first rank that has failed
        said = str(error).strip().splitlines()
        work.record.row(**row, answer="**failed**", said=" ".join(said[-3:]))
        return False
    off, plain = _errors(found, exact.record), _errors([one], exact.record)
    mixed = {kind: max(LEAST, TIMES * error) for kind, error in plain.items()}
    allowed = mixed if precision == MIXED else EXACTLY
    right = all(error <= allowed[kind] for kind, error in off.items())
    beside = {f"{kind}_of_one": error for kind, error in plain.items()}
    work.record.row(**row, plan=found[0].plan, answer="exact" if right else "**wrong**", **off, **beside)
    return right


def _errors(found: Sequence[Trained], exact: Record) -> Errors:
    """The largest relative error of each kind, over ranks and tensors; inf for what is not a number."""
    # ranks of a model group have one loss
    of_data = {rank.data_rank: rank.record.losses for rank in found}.values()
    mean = [[sum(each) / len(each) for each in zip(*step, strict=True)] for step in zip(*of_data, strict=True)]
    result = {"losses": _largest(loss_errors(mean, exact.losses))}
    for kind in ("gradients", "parameters"):
        result[kind] = max(_largest(errors(getattr(rank.record, kind), getattr(exact, kind))) for rank in found)
    return result


def _largest(found: Errors) -> float:
    return max(inf if error != error else error for error in found.values())
