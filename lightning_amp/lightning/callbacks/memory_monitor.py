"""Measure memory after every stratum of a training step, and compare it with the plan's prediction.

A row holds: rank, step (training batches so far), decoder (its name in the module), stratum (0-based, or "step"
for the whole step), current_bytes (alive when the stratum, or the step, was done), peak_bytes (since the step
began), predicted_bytes (None without a plan) and rss_bytes (of the process, as the operating system sees it).

Of a module without a decoder the whole step is measured, by module and by kind; of a pipeline when which micro-batch
was computed where, too (schedule_files.py).
"""

import csv
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import psutil
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from lightning_amp.data.files.directory import written_aside
from lightning_amp.errors import DataError, InstallError
from lightning_amp.footprint.copies.fake_copy import length_of
from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.footprint.module_profile import ModuleProfile, summarize
from lightning_amp.footprint.profile_module import REAL
from lightning_amp.footprint.step_recorder import StepRecorder
from lightning_amp.lightning.callbacks.schedule_files import Ran, write_schedule
from lightning_amp.techniques.contract.protocol import DecomposedDecoder, find_decoders

COLUMNS = (*("rank", "step", "decoder", "stratum"), *("current_bytes", "peak_bytes", "predicted_bytes", "rss_bytes"))
WHOLE_STEP = "step"
SHOWN = 10
"""Modules in a table: those that hold most."""
Row = dict[str, Any]


class StratumMemoryMonitor(pl.Callback):
    """Measures the second training step and every n-th, and writes memory.csv, memory.jsonl and memory.png.

    On CUDA the allocator is asked. Elsewhere `LiveBytes` counts exactly the bytes of the module's parameters,
    buffers, gradients and optimiser states, of the batch's tensors, and of all that the step makes; tensors that
    were alive for other reasons are not counted. That costs 10 to 20 microseconds per operator: a step at 2,000
    anchors took a quarter longer, one at 300 anchors twice as long. Other steps are untouched. When a step runs
    through the strata more than once, the first pass counts.

    Logged are `amp/peak_bytes`, the largest peak of the epoch's measured steps on any rank, and
    `amp/peak_predicted_bytes` where the strategy has a plan. The files hold the rows of all ranks, only
    rank 0's when the fit ended with an exception. `written` names them, on rank 0.

    Of a module without a decoder `measured_step` is the last measured step of this rank as a ModuleProfile, and
    `modules()` has its modules with the prediction; memory_step.json has both steps, and memory.png draws them, by
    kind over the step. Who holds what is counted on CUDA too, as on a CPU.

    Of a pipeline schedule.csv has the begin and end of every pass of the last training step that was not measured
    otherwise, which takes longer, with the plan's; schedule.png draws both.

    Args:
        every_n_steps: Distance of measured steps; steps are training batches. With `accumulate_grad_batches` the last
            batch before the optimiser's step is measured, from the second such step on.
        dirpath: Folder of the files; `amp_memory` in the trainer's log_dir or default_root_dir if None.
        plot: Draw memory.png, and schedule.png of a pipeline.

    Raises:
        InstallError: every_n_steps is not a positive number.
    """

    def __init__(self, every_n_steps: int = 50, dirpath: str | Path | None = None, *, plot: bool = True) -> None:
        if every_n_steps < 1:
            raise InstallError(
                f"StratumMemoryMonitor(every_n_steps={every_n_steps!r}) is not supported; allowed are whole numbers"
                " from 1: use 1 to measure every step, or leave the callback out to measure none"
            )
        self.every_n_steps = every_n_steps
        self.dirpath = None if dirpath is None else Path(dirpath)
        self.plot = plot
        self.rows: list[Row] = []
        self.written: list[Path] = []
        self.measured_step: ModuleProfile | None = None
        self._predicted_step: ModuleProfile | None = None
        self._passes: list[Ran] = []
        self._target: Path | None = None
        self._open: _MeasuredStep | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Choose the folder, while all ranks are here: log_dir is a broadcast. Forget what another run has measured."""
        done = trainer.fit_loop.epoch_loop.total_batch_idx
        self.rows = [row for row in self.rows if row["step"] <= done]
        self.measured_step = self._predicted_step = None
        self._target = self.dirpath or Path(trainer.log_dir or trainer.default_root_dir) / "amp_memory"
        if not find_decoders(pl_module):
            rank_zero_info(
                f"StratumMemoryMonitor: {type(pl_module).__name__} has no decomposed decoder, so steps are measured by"
                " module and by kind"
            )

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin to measure, if this is a step to be measured."""
        self._stop()
        step = trainer.fit_loop.epoch_loop.total_batch_idx
        if self._is_due(step, batch_idx, trainer.accumulate_grad_batches):
            self._open = _MeasuredStep(trainer, pl_module, batch, step)

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        """What follows is the optimiser's."""
        if self._open is not None and self._open.by_module is not None:
            self._open.by_module.begin_optimiser()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the rows of a measured step and log its peak."""
        if self._open is None:
            steps = getattr(trainer.strategy, "pipelined_steps", None)
            if steps is not None and steps.times is not None:
                step = trainer.fit_loop.epoch_loop.total_batch_idx
                self._passes = [(trainer.global_rank, step, steps.times)]
            return
        self._open.record("", WHOLE_STEP)
        rows, found = self._open.rows, self._open.by_module
        self._stop()
        self.rows += rows
        if found is not None:
            size = length_of(batch)
            self.measured_step = summarize(found.lives, found.work, found.head, measured=REAL, batch_size=size)
            self._predicted_step = getattr(trainer.strategy, "predicted_step", None)
        logged = {"amp/peak_bytes": "peak_bytes", "amp/peak_predicted_bytes": "predicted_bytes"}
        for name, column in logged.items():
            if rows[-1][column] is not None:
                value = float(rows[-1][column])
                # Once per epoch: the steps at which loggers listen need not be those that are measured.
                pl_module.log(name, value, reduce_fx="max", on_step=False, on_epoch=True, sync_dist=True)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop at a step that was begun and then skipped by another hook."""
        self._stop()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Bring the rows of all ranks together and write the files on rank 0."""
        self._stop()
        self.rows = _unique(_gather(self.rows))
        passes, self._passes = _gather(self._passes), []
        target = self._target
        self._write(trainer)
        if passes and target is not None and trainer.is_global_zero:
            self.written += write_schedule(target, passes, _plan(trainer), plot=self.plot)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Write what rank 0 has: other ranks may be gone, so no collective."""
        self._stop()
        # a full disk may have ended the run, whose own error is the one to tell, to the other ranks too
        with suppress(OSError, DataError):
            self._write(trainer)

    def state_dict(self) -> dict[str, Any]:
        """The rows of this rank."""
        return {"rows": [dict(row) for row in self.rows]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on after the rows of a checkpoint."""
        self.rows = [dict(row) for row in state_dict["rows"]]

    def table(self) -> list[Row]:
        """The last measured step: decoder, stratum, predicted, measured (bytes) and their ratio.

        Measured is what was alive after the stratum, and the peak for "step"; the largest over the ranks whose
        rows are here: all of them on rank 0 after a fit.
        """
        last = max((row["step"] for row in self.rows), default=None)
        worst: dict[tuple[Any, Any], Row] = {}
        for row in _unique(row for row in self.rows if row["step"] == last):
            key = (row["decoder"], row["stratum"])
            if key not in worst or _measured(row) > _measured(worst[key]):
                worst[key] = row
        return [
            {
                "decoder": row["decoder"],
                "stratum": row["stratum"],
                "predicted": row["predicted_bytes"],
                "measured": _measured(row),
                "ratio": _measured(row) / row["predicted_bytes"] if row["predicted_bytes"] else None,
            }
            for row in worst.values()
        ]

    def modules(self) -> list[Row]:
        """The last measured step of this rank: module, predicted, measured (bytes at the peak) and their ratio."""
        if self.measured_step is None:
            return []
        before = self._predicted_step
        known = {} if before is None else {row.fqn: row.n_bytes for row in before.modules}
        return [
            {
                "module": row.fqn,
                "predicted": known.get(row.fqn),
                "measured": row.n_bytes,
                "ratio": row.n_bytes / known[row.fqn] if known.get(row.fqn) else None,
            }
            for row in self.measured_step.modules[:SHOWN]
        ]

    def _is_due(self, step: int, batch_idx: int, added_up: int) -> bool:
        """Of batches whose gradients are added up the last one is measured, which has those of the others too."""
        # a multiple of `every_n_steps` may lie anywhere among the batches that are added up, of which the last is
        # measured
        nth = step // self.every_n_steps > (step - added_up) // self.every_n_steps
        return step == 2 * added_up - 1 or (step >= 2 * added_up and (batch_idx + 1) % added_up == 0 and nth)

    def _stop(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    def _write(self, trainer: pl.Trainer) -> None:
        target, self._target = self._target, None
        if target is None or not self.rows or not trainer.is_global_zero:
            return
        target.mkdir(parents=True, exist_ok=True)
        table, lines = target / "memory.csv", target / "memory.jsonl"
        ordered = sorted(self.rows, key=lambda row: (row["rank"], row["step"]))
        with written_aside(table) as aside, aside.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(ordered)
        with written_aside(lines) as aside:
            aside.write_text("".join(json.dumps(row) + "\n" for row in ordered))
        self.written = [table, lines]
        budget = getattr(_plan(trainer), "budget_bytes", None)
        measured, predicted, picture = self.measured_step, self._predicted_step, target / "memory.png"
        if measured is not None:
            path = target / "memory_step.json"
            plain = {"measured": measured.to_dict(), "predicted": None if predicted is None else predicted.to_dict()}
            with written_aside(path) as aside:
                aside.write_text(json.dumps(plain))
            self.written.append(path)
        if measured is not None and self.plot:
            title = "memory of a measured step"
            with written_aside(picture) as aside:
                measured.plot(aside, predicted=predicted, budget_bytes=budget, title=title)
            self.written.append(picture)
        elif self.plot:
            self.written += _draw(picture, self.rows, budget_bytes=budget)


class _MeasuredStep:
    """One step while it is measured: hooks on the strata, and counts of bytes, until `close`."""

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, step: int) -> None:
        decoders, device = find_decoders(module), module.device
        self.rows: list[Row] = []
        # on a GPU nothing counts that lies in the host's memory, as fsdp's rows may
        other = None if device.type == "cpu" else device.type
        self.by_module = recorder = None if decoders else StepRecorder(module, device_type=other)
        self._place = {"rank": trainer.global_rank, "step": step}
        self._predicted = _predicted(decoders, _plan(trainer))
        self._seen: set[tuple[str, int]] = set()
        self._process = psutil.Process()
        self._stack = ExitStack()
        self.read: Callable[[], tuple[int, int]]
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.read = lambda: (torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device))
        elif recorder is not None:
            self.read = lambda: (recorder.current, recorder.peak)
        else:
            live = LiveBytes()
            live.watch([*module.parameters(), *module.buffers(), *(p.grad for p in module.parameters())])
            live.watch([[optimizer.state for optimizer in trainer.optimizers], batch])
            self._stack.enter_context(live)
            self.read = lambda: (live.current, live.peak)
        if recorder is not None:
            recorder.start(batch, trainer.optimizers)
            # gradients are looked at before that
            self._stack.callback(recorder.stop)
            self._stack.callback(recorder.hold_gradients)
        for fqn, decoder in decoders.items():
            for k, stratum in enumerate(decoder.strata):
                self._stack.callback(stratum.register_forward_hook(partial(self._after, fqn, k)).remove)

    def close(self) -> None:
        """Remove the hooks and count no further."""
        self._stack.close()

    def _after(self, fqn: str, k: int, module: nn.Module, args: Any, output: Any) -> None:
        if (fqn, k) not in self._seen:
            self._seen.add((fqn, k))
            self.record(fqn, k)

    def record(self, fqn: str, stratum: int | str) -> None:
        """Add the row of a stratum, or of the whole step."""
        current, peak = self.read()
        predicted = self._predicted.get((fqn, stratum))
        rss = self._process.memory_info().rss
        values = (fqn, stratum, current, peak, predicted, rss)
        self.rows.append(self._place | dict(zip(COLUMNS[2:], values, strict=True)))


def _draw(path: Path, rows: list[Row], *, budget_bytes: int | None) -> list[Path]:
    last = max(row["step"] for row in rows)
    steps = [row for row in rows if row["step"] == last and row["stratum"] == WHOLE_STEP]
    rank = max(steps, key=_measured)["rank"]
    strata = [r for r in rows if (r["rank"], r["step"]) == (rank, last) and r["stratum"] != WHOLE_STEP]
    # One decoder to a picture: the one that the prediction is for, else the one with most strata.
    sizes = {r["decoder"]: (r["predicted_bytes"] is not None, r["stratum"]) for r in strata}
    if not sizes:
        return []
    # matplotlib is slow to load, and only needed where a picture is drawn.
    from lightning_amp.figures import memory_curve

    shown = [r for r in strata if r["decoder"] == max(sizes, key=lambda fqn: sizes[fqn])]
    shown.sort(key=lambda row: int(row["stratum"]))
    predicted = [r["predicted_bytes"] for r in shown]
    with written_aside(path) as aside:
        memory_curve(
            aside,
            predicted_bytes=None if None in predicted else predicted,
            measured_bytes=[r["current_bytes"] for r in shown],
            budget_bytes=budget_bytes,
            title=f"{shown[0]['decoder']}: memory after each stratum, step {last}",
            rank_label=f"rank {rank}",
        )
    return [path]


def _plan(trainer: pl.Trainer) -> Any:
    return getattr(trainer.strategy, "plan", None)


def _predicted(decoders: Mapping[str, DecomposedDecoder], plan: Any) -> dict[tuple[str, int | str], int]:
    """Predicted bytes by row: a plan is about one decoder, the largest."""
    found: dict[tuple[str, int | str], int] = {}
    strata_bytes = tuple(getattr(plan, "strata_bytes", None) or ())
    fqn = max(decoders, key=lambda name: decoders[name].n_anchors * len(decoders[name].strata), default=None)
    if fqn is not None and len(strata_bytes) == len(decoders[fqn].strata):
        found = {(fqn, k): n for k, n in enumerate(strata_bytes)}
    if getattr(plan, "predicted_peak_bytes", 0):
        found["", WHOLE_STEP] = plan.predicted_peak_bytes
    return found


def _measured(row: Row) -> int:
    return int(row["peak_bytes" if row["stratum"] == WHOLE_STEP else "current_bytes"])


def _gather(rows: list[Any]) -> list[Any]:
    """The rows of all ranks on rank 0, a rank's own elsewhere."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return rows
    every: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(rows, every, dst=0)
    return rows if every is None else [row for of_rank in every for row in of_rank]


def _unique(rows: Iterable[Row]) -> list[Row]:
    """One row per place, the latest: a checkpoint gives rank 0's rows to every rank."""
    return list({tuple(row[name] for name in COLUMNS[:4]): row for row in rows}.values())
