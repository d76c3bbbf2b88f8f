"""Measure memory after every stratum of a training step, and compare it with the plan's prediction.

Columns of a row: rank, step (training batches so far), decoder (its name in the module), stratum (0-based, or "step"
for the complete step), current_bytes (alive at the end of the stratum or step), peak_bytes (since the step began),
predicted_bytes (None without a plan) and rss_bytes (resident set size of the process). On CUDA a row with the stratum
"reserved" has what torch's allocator has reserved.

For a module without a decoder, the complete step is measured, by module and by kind of tensor. For a pipeline, the
times of all passes are recorded too (schedule_files.py).
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
from lightning_amp.footprint.copies.copy_batch import length_of
from lightning_amp.footprint.host_state import on_device
from lightning_amp.footprint.live_bytes import LiveBytes
from lightning_amp.footprint.module_profile import REAL, ModuleProfile, summarize
from lightning_amp.footprint.step_recorder import StepRecorder
from lightning_amp.lightning.callbacks.schedule_files import Ran, write_schedule
from lightning_amp.techniques.contract.protocol import DecomposedDecoder, find_decoders

COLUMNS = (*("rank", "step", "decoder", "stratum"), *("current_bytes", "peak_bytes", "predicted_bytes", "rss_bytes"))
WHOLE_STEP, RESERVED = "step", "reserved"
"""Rows of a complete step: its tensors; on CUDA also what torch's allocator has reserved, fragments included."""
SHOWN = 10
"""Largest number of modules in a table, those with most bytes first."""
Row = dict[str, Any]


class StratumMemoryMonitor(pl.Callback):
    """Measure the second training step and every n-th, and write memory.csv, memory.jsonl and memory.png.

    On CUDA the numbers come from the allocator. Elsewhere `LiveBytes` counts exactly the bytes of the module's
    parameters, buffers, gradients and optimiser states, of the batch's tensors, and of all tensors that the step
    creates; other live tensors are not counted. Counting costs 10 to 20 microseconds per operator: a step at 2,000
    anchors took a quarter longer, a step at 300 anchors twice as long. Other steps are not slowed down. If a step runs
    through the strata more than once, the first pass counts.

    The callback logs `amp/peak_bytes`, the largest peak of the epoch's measured steps on any rank, and
    `amp/peak_predicted_bytes` if the strategy has a plan. On CUDA these are also logged of what torch's allocator has
    reserved: `amp/reserved_bytes` and `amp/reserved_predicted_bytes`. The files contain the rows of all ranks; if the
    fit ended with an exception, only those of rank 0. `written` lists the files, on rank 0.

    For a module without a decoder, `measured_step` is the last measured step of this rank as a ModuleProfile, and
    `modules()` compares its modules with the prediction. memory_step.json has both steps, and memory.png draws them by
    kind over the step. Bytes by module are also counted on CUDA.

    For a pipeline, schedule.csv has the measured and planned begin and end of every pass, and schedule.png draws them.
    They are of the last training step whose memory was not measured, because measuring slows a step down.

    Args:
        every_n_steps: Interval of measured steps; steps are training batches. With `accumulate_grad_batches`, the last
            batch before the optimiser's step is measured, from the second optimiser step on.
        dirpath: Folder of the files; None uses `amp_memory` in the Trainer's log_dir or default_root_dir.
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
        """Choose the folder while all ranks are here, because log_dir is a broadcast; drop rows of an earlier run."""
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
        """Start measuring if this step is due."""
        self._stop()
        step = trainer.fit_loop.epoch_loop.total_batch_idx
        if self._is_due(step, batch_idx, trainer.accumulate_grad_batches):
            self._open = _MeasuredStep(trainer, pl_module, batch, step)

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        """Attribute the memory that follows to the optimiser."""
        if self._open is not None and self._open.by_module is not None:
            self._open.by_module.begin_optimiser()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Store the rows of a measured step and log its peak."""
        if self._open is None:
            steps = getattr(trainer.strategy, "pipelined_steps", None)
            if steps is not None and steps.times is not None:
                step = trainer.fit_loop.epoch_loop.total_batch_idx
                self._passes = [(trainer.global_rank, step, steps.times)]
            return
        self._open.record_step()
        rows, found = self._open.rows, self._open.by_module
        self._stop()
        self.rows += rows
        if found is not None:
            size = length_of(batch)
            self.measured_step = summarize(found.lives, found.work, found.head, measured=REAL, batch_size=size)
            self._predicted_step = getattr(trainer.strategy, "predicted_step", None)
        words = {WHOLE_STEP: "peak", RESERVED: "reserved"}
        for row in (row for row in rows if row["stratum"] in words):
            name = f"amp/{words[row['stratum']]}"
            for logged, column in ((f"{name}_bytes", "peak_bytes"), (f"{name}_predicted_bytes", "predicted_bytes")):
                if row[column] is not None:
                    value = float(row[column])
                    # per epoch: the steps at which loggers log need not be measured
                    pl_module.log(logged, value, reduce_fx="max", on_step=False, on_epoch=True, sync_dist=True)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Stop measuring a step that another hook has skipped."""
        self._stop()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Gather the rows of all ranks and write the files on rank 0."""
        self._stop()
        self.rows = _unique(_gather(self.rows))
        passes, self._passes = _gather(self._passes), []
        target = self._target
        self._write(trainer)
        if passes and target is not None and trainer.is_global_zero:
            self.written += write_schedule(target, passes, _plan(trainer), plot=self.plot)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Write the rows of rank 0, without a collective, because other ranks may have stopped."""
        self._stop()
        # the run may have failed because of a full disk: only the original error is reported, also to other ranks
        with suppress(OSError, DataError):
            self._write(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Return the rows of this rank."""
        return {"rows": [dict(row) for row in self.rows]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the rows of a checkpoint."""
        self.rows = [dict(row) for row in state_dict["rows"]]

    def table(self) -> list[Row]:
        """Return the rows of the last measured step: decoder, stratum, predicted, measured (bytes) and their ratio.

        `measured` is the bytes alive after a stratum, and the peak for "step" and "reserved". It is the largest over
        the ranks whose rows are present: all ranks on rank 0 after a fit.
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
        """Return the modules of this rank's last measured step: module, predicted, measured (peak bytes) and ratio."""
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
        """With gradient accumulation, measure the last batch, which also has the gradients of the others."""
        # due if a multiple of `every_n_steps` is among the accumulated batches
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
        # all files are written aside, so that a full disk leaves no incomplete file
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
    """The measurement of one step: hooks on the strata, and byte counts, until `close`."""

    def __init__(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, step: int) -> None:
        decoders, device = find_decoders(module), module.device
        self.rows: list[Row] = []
        # on a GPU, tensors in host memory, such as fsdp's offloaded shards, are not counted
        other = None if device.type == "cpu" else device.type
        self.by_module = recorder = None if decoders else StepRecorder(module, device_type=other)
        self._place = {"rank": trainer.global_rank, "step": step}
        self._predicted = _predicted(decoders, _plan(trainer))
        self._seen: set[tuple[str, int]] = set()
        self._process = psutil.Process()
        self._stack = ExitStack()
        self.read: Callable[[], tuple[int, int]]
        self.reserved: Callable[[], tuple[int, int]] | None = None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.reserved = lambda: (torch.cuda.memory_reserved(device), torch.cuda.max_memory_reserved(device))
            self.read = lambda: (torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device))
        elif recorder is not None:
            self.read = lambda: (recorder.current, recorder.peak)
        else:
            live = LiveBytes()
            live.watch([*module.parameters(), *module.buffers(), *(p.grad for p in module.parameters())])
            live.watch([[optimizer.state for optimizer in on_device(trainer.optimizers)], batch])
            self._stack.enter_context(live)
            self.read = lambda: (live.current, live.peak)
        if recorder is not None:
            recorder.start(batch, trainer.optimizers)
            # callbacks run in reverse order: gradients are recorded before the recorder stops
            self._stack.callback(recorder.stop)
            self._stack.callback(recorder.hold_gradients)
        for fqn, decoder in decoders.items():
            for k, stratum in enumerate(decoder.strata):
                self._stack.callback(stratum.register_forward_hook(partial(self._after, fqn, k)).remove)

    def close(self) -> None:
        """Remove the hooks and stop counting."""
        self._stack.close()

    def _after(self, fqn: str, k: int, module: nn.Module, args: Any, output: Any) -> None:
        if (fqn, k) not in self._seen:
            self._seen.add((fqn, k))
            self.record(fqn, k, self.read())

    def record_step(self) -> None:
        """Add the rows of the complete step."""
        self.record("", WHOLE_STEP, self.read())
        if self.reserved is not None:
            self.record("", RESERVED, self.reserved())

    def record(self, fqn: str, stratum: int | str, measured: tuple[int, int]) -> None:
        """Add the row of a stratum, or of the complete step, with its bytes alive now and at the peak."""
        current, peak = measured
        predicted = self._predicted.get((fqn, stratum))
        rss = self._process.memory_info().rss
        values = (fqn, stratum, current, peak, predicted, rss)
        self.rows.append(self._place | dict(zip(COLUMNS[2:], values, strict=True)))


def _draw(path: Path, rows: list[Row], *, budget_bytes: int | None) -> list[Path]:
    last = max(row["step"] for row in rows)
    steps = [row for row in rows if row["step"] == last and row["stratum"] == WHOLE_STEP]
    rank = max(steps, key=_measured)["rank"]
    strata = [r for r in rows if (r["rank"], r["step"]) == (rank, last) and r["stratum"] not in (WHOLE_STEP, RESERVED)]
    # one decoder per picture: the one with a prediction, else the one with most strata
    sizes = {r["decoder"]: (r["predicted_bytes"] is not None, r["stratum"]) for r in strata}
    if not sizes:
        return []
    # imported late: matplotlib is slow to load
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
    """Return predicted bytes by decoder and stratum; a plan predicts one decoder, the largest."""
    found: dict[tuple[str, int | str], int] = {}
    strata_bytes = tuple(getattr(plan, "strata_bytes", None) or ())
    fqn = max(decoders, key=lambda name: decoders[name].n_anchors * len(decoders[name].strata), default=None)
    if fqn is not None and len(strata_bytes) == len(decoders[fqn].strata):
        found = {(fqn, k): n for k, n in enumerate(strata_bytes)}
    if getattr(plan, "predicted_peak_bytes", 0):
        found["", WHOLE_STEP] = plan.predicted_peak_bytes
    if getattr(plan, "on_device", None) is not None:
        found["", RESERVED] = plan.on_device.reserved_bytes
    return found


def _measured(row: Row) -> int:
    return int(row["peak_bytes" if row["stratum"] in (WHOLE_STEP, RESERVED) else "current_bytes"])


def _gather(rows: list[Any]) -> list[Any]:
    """Return the rows of all ranks on rank 0, and a rank's own rows elsewhere."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return rows
    every: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(rows, every, dst=0)
    return rows if every is None else [row for of_rank in every for row in of_rank]


def _unique(rows: Iterable[Row]) -> list[Row]:
    """Keep the latest row per key: a checkpoint gives rank 0's rows to every rank."""
    return list({tuple(row[name] for name in COLUMNS[:4]): row for row in rows}.values())
