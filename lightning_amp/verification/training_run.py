"""One training run of a few steps, as a worker carries it out: on one process, or as one of several ranks.

The single process takes the batches from the user's data once and keeps them in a file; ranks take their parts of the
same ones, and compare themselves with what the single process has kept. Files lie in a folder that all workers see:

    subject.pt    the module and the data, as the user gave them
    batches.pt    the global batches
    one.pt        what the single process has recorded last
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.plugins.environments import TorchElasticEnvironment  # type: ignore[attr-defined]
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor

# the common base of BatchNorm1d, 2d and 3d has no public name
from lightning_amp._torch import AnyBatchNorm
from lightning_amp.data.files.write_aside import written_aside
from lightning_amp.errors import DataError
from lightning_amp.lightning.checkpoints.atomic_file import write_state
from lightning_amp.lightning.steps.cell_weight import count_cells
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.verification import split_batch as cut
from lightning_amp.verification.module_outputs import origins, output_errors
from lightning_amp.verification.recorder import Record, Recorder
from lightning_amp.verification.tolerances import ALLOWED, DTYPES, Precision, errors, loss_errors

QUIET: dict[str, Any] = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)
SEED = 0
CUTS = {"as given": lambda batch, parts: batch, "equal": cut.equal_parts, "same": cut.same_parts}


@dataclass(frozen=True, kw_only=True, slots=True)
class Treatment:
    """What is put right for an experiment.

    Attributes:
        native: Sites whose random draws are left alone, while all others are keyed by the cell; None leaves all alone.
        share: Whether batch statistics are shared; None means as asked.
        cells: The ranks' cells: as given, cut to equal numbers, or the same ones on every rank.
    """

    native: frozenset[str] | None = None
    share: bool | None = None
    cells: Literal["as given", "equal", "same"] = "as given"


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run.

    Attributes:
        ranks: Ranks in all that are compared with one process.
        data_ranks: Ranks of the data axis; None until a run of the ranks has told.
    """

    precision: Precision
    steps: int
    ranks: int
    options: Mapping[str, Any] = field(default_factory=dict)
    treatment: Treatment = Treatment()
    data_ranks: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What one rank has found, against the single process.

    Attributes:
        place: Data rank and number of data ranks.
        losses, one_losses, cells: Per step, losses of the rank and of the single process, and cells on the rank.
        all_cells: Cells of the first global batch.
        errors: Kind of quantity -> relative error of every tensor of it.
        products: Of all gradients: <rank, one>, <rank, rank>, <one, one>.
        sites: Places where the single process drew numbers for cells.
        elsewhere: Generators other than torch's that the rank's steps have drawn from.
        origins: Modules that differ though what they read agrees.
        apart: Buffers that differ between the ranks.
        uneven: Whether the cells do not divide by the data ranks.
    """

    place: tuple[int, int]
    losses: list[list[float]]
    one_losses: list[list[float]]
    cells: list[int | None]
    all_cells: int
    errors: dict[str, dict[str, float]]
    products: tuple[float, float, float]
    sites: list[str]
    elsewhere: list[str]
    origins: list[str]
    apart: list[str]
    strategies: tuple[str, ...]
    mesh: tuple[int, int]
    module: str
    norms: list[str]
    uneven: bool


def run_one(rank: int, folder: Path, run: Run) -> None:
    """Train on the global batch in this process, as a Trainer without this package would."""
    module, data = _subject(folder)
    record, _, _ = _fit(module, data, run, folder=folder, strategy=None)
    _keep(record, folder / "one.pt")


def run_nudged(rank: int, folder: Path, run: Run) -> dict[str, dict[str, float]]:
    """What becomes of one rounding in every weight, on the single process: relative errors of every kind."""
    module, data = _subject(folder)
    record, _, _ = _fit(module, data, run, folder=folder, strategy=None, nudged=True)
    one = _record_of_one(folder)
    return _errors(record, one) | {"losses": loss_errors(record.losses, one.losses)}


def run_rank(rank: int, folder: Path, run: Run) -> Report:
    """Train as one of the ranks, under the plan, and compare."""
    module, data = _subject(folder)
    options = dict(run.options)
    if run.treatment.share is not None:
        options["share_batch_statistics"] = run.treatment.share
    strategy = AMPStrategy(**options)
    # they are compared and named here
    strategy.own_statistics = True
    record, place, given = _fit(module, data, run, folder=folder, strategy=strategy)
    one = _record_of_one(folder)
    plan = strategy.plan
    assert plan is not None, "there is a plan after a fit"
    return Report(
        place=place,
        losses=record.losses,
        one_losses=one.losses,
        cells=record.cells,
        all_cells=count_cells(given) or 0,
        errors=_errors(record, one),
        products=_products(record.gradients, one.gradients),
        sites=one.sites,
        elsewhere=sorted(record.elsewhere),
        origins=origins(record.calls, one.calls, allowed=ALLOWED[run.precision]["forward"]),
        apart=record.apart,
        strategies=plan.strategies,
        mesh=(plan.mesh.data, plan.mesh.model),
        module=type(module).__name__,
        norms=[n for n, m in module.named_modules() if isinstance(m, AnyBatchNorm)],
        uneven=place[1] > 1 and any(n % place[1] for n in cut.sizes_of(given)),
    )


def _errors(record: Record, one: Record) -> dict[str, dict[str, float]]:
    return {
        "forward": output_errors(record.calls, one.calls),
        "gradients": errors(record.gradients, one.gradients),
        "parameters": errors(record.parameters, one.parameters),
        "buffers": errors(record.buffers, one.buffers),
    }


def _record_of_one(folder: Path) -> Record:
    record: Record = torch.load(folder / "one.pt", weights_only=False)
    return record


def _subject(folder: Path) -> tuple[LightningModule, Any]:
    module, data = torch.load(folder / "subject.pt", map_location="cpu", weights_only=False)
    return module, data


def _fit(
    module: LightningModule,
    data: Any,
    run: Run,
    *,
    folder: Path,
    strategy: AMPStrategy | None,
    nudged: bool = False,
) -> tuple[Record, tuple[int, int], Any]:
    """The record, the place of the rank and the first global batch."""
    seed_everything(SEED, verbose=False)
    dtype = DTYPES[run.precision]
    module = module.to(dtype)

    def place() -> tuple[int, int]:
        if strategy is None:
            return 0, 1
        kwargs = strategy.distributed_sampler_kwargs
        return kwargs["rank"], kwargs["num_replicas"]

    used: list[Any] = []
    recorder = Recorder(
        lambda step: cut.starts(used[step], *place()), native=run.treatment.native, nudged=nudged
    )
    ranks = 1 if strategy is None else run.ranks
    trainer = Trainer(
        **QUIET,
        accelerator="cpu",
        devices=ranks,
        precision="64-true" if dtype is torch.float64 else "32-true",
        strategy=strategy or "auto",
        plugins=[TorchElasticEnvironment()],
        callbacks=[recorder],
        max_epochs=1,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
    )

    def loader() -> cut.Parts:
        given = _batches(data, run, folder)
        if run.data_ranks is not None:
            change = CUTS[run.treatment.cells]
            given = [change(batch, run.data_ranks) for batch in given]
        used.extend(given)
        return cut.Parts([cut.cast(batch, dtype) for batch in given], ranks=ranks, place=place)

    if isinstance(data, LightningDataModule):
        data.original_train_dataloader = data.train_dataloader  # type: ignore[attr-defined]
        data.train_dataloader = loader  # type: ignore[method-assign]
        trainer.fit(module, datamodule=data)
    else:
        trainer.fit(module, loader())
    return recorder.record, place(), used[0]


def _batches(data: Any, run: Run, folder: Path) -> list[Any]:
    """The global batches of a run: the first ones of the data, the same in every run."""
    path = folder / "batches.pt"
    if path.exists():
        kept: list[Any] = torch.load(path, weights_only=False)
        return kept[: run.steps]
    if isinstance(data, LightningDataModule):
        combined = CombinedLoader(data.original_train_dataloader(), "max_size_cycle")  # type: ignore[attr-defined]
        drawn = cut.first_of((batch for batch, _, _ in iter(combined)), run.steps)
    else:
        drawn = cut.first_of(data, run.steps)
    _keep(drawn, path)
    return drawn


def _keep(value: Any, path: Path) -> None:
    try:
        with written_aside(path) as aside, aside.open("wb", buffering=0) as file:
            write_state(value, file)
    except DataError as error:
        raise DataError(f"{error}. TMPDIR says where verify keeps its files") from error


def _products(found: Mapping[str, Tensor], one: Mapping[str, Tensor]) -> tuple[float, float, float]:
    names = [name for name in one if name in found and found[name].shape == one[name].shape]
    pairs = [(found[name].double().flatten(), one[name].double().flatten()) for name in names]
    return (
        float(sum(float(a @ b) for a, b in pairs)),
        float(sum(float(a @ a) for a, _ in pairs)),
        float(sum(float(b @ b) for _, b in pairs)),
    )
