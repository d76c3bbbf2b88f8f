"""What the Trainer does on one device: a process group of one rank, two equal runs, the memory monitor, loading.

The model is the reference model, on cells made in memory.
"""

import tempfile
import time
from collections.abc import Mapping
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.decoders import Size
from benchmarks.gpu.device import wait
from benchmarks.gpu.runner import SkipPart, Work
from benchmarks.gpu.subject import EAGER, OURS, CellsInMemory, decoder_batch
from lightning_amp.costs.device_memory import CONTEXT_BYTES, TENSORS_SHARE
from lightning_amp.lightning.callbacks.memory_monitor import RESERVED, WHOLE_STEP, StratumMemoryMonitor
from lightning_amp.lightning.strategy.hardware import take_workspaces
from lightning_amp.lightning.strategy.strategy import AMPStrategy
from lightning_amp.models.glue import GLUE
from lightning_amp.simulation.models_without_values import DecoderAlone
from tests.any_module import QUIET

BACKENDS = {"cuda": "nccl", "cpu": "gloo"}
WARM_UP = 3
TRIALS: tuple[tuple[int, bool], ...] = ((0, False), (0, True), (4, True), (4, False), (8, True))
"""Workers, and whether memory is pinned."""


def data(*, tiny: bool, **options: Any) -> CellsInMemory:
    """Cells of about 500 kb bins; of few ones if tiny."""
    sizes = {"bins": 60, "strata": 3, "genes": 10} if tiny else {"bins": 5400, "strata": 32, "genes": 2000}
    return CellsInMemory(**sizes, **options)


def fit(
    work: Work,
    cells: CellsInMemory,
    *,
    strategies: tuple[str, ...] | None,
    steps: int,
    callbacks: list[pl.Callback] | None = None,
    **options: Any,
) -> tuple[GLUE, pl.Trainer, AMPStrategy]:
    """Train the reference model for some steps; options are the Trainer's, no strategies mean policy "auto"."""
    pl.seed_everything(0, verbose=False)
    module = GLUE(16 if work.tiny else 128, window=16 if work.tiny else None)
    # the reference model's discriminator steps too
    trainer, strategy = trainer_for(work, strategies=strategies, steps=2 * steps, callbacks=callbacks, **options)
    trainer.fit(module, datamodule=cells)
    return module, trainer, strategy


def trainer_for(
    work: Work, *, strategies: tuple[str, ...] | None, steps: int, amp: Mapping[str, Any] | None = None, **options: Any
) -> tuple[pl.Trainer, AMPStrategy]:
    """A quiet Trainer on the one device, for so many steps of optimisers; `amp` are the strategy's options."""
    chosen = None if strategies is None else list(strategies)
    strategy = AMPStrategy(strategies=chosen, **{"on_predicted_oom": "warn", **(amp or {})})
    place = work.device
    trainer = pl.Trainer(
        **QUIET,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        strategy=strategy,
        accelerator="gpu" if place.type == "cuda" else "cpu",
        devices=[place.index or 0] if place.type == "cuda" else 1,
        max_epochs=-1,
        max_steps=steps,
        **options,
    )
    return trainer, strategy


class Backend(pl.Callback):
    """Looks which process group there is, and keeps the losses."""

    def __init__(self) -> None:
        self.backend, self.ranks = "none", 0
        self.losses: list[Tensor] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Of the ranks that the strategy has connected."""
        if dist.is_initialized():
            self.backend, self.ranks = dist.get_backend(), dist.get_world_size()

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """The loss that the step has logged."""
        self.losses.append(trainer.callback_metrics["loss"].detach().clone())


def one_rank(work: Work) -> None:
    """A fit through Trainer(strategy="amp") in every precision: finite losses, and the right process group."""
    wanted, wrong = BACKENDS[work.device.type], []
    for strategies, precision in ((OURS, "32-true"), (None, "32-true"), (OURS, "bf16-mixed"), (OURS, "16-mixed")):
        if precision == "16-mixed" and work.device.type == "cpu":
            work.record.note("16-mixed scales the loss, which Lightning does on a GPU only.")
            continue
        seen = Backend()
        cells = data(tiny=work.tiny, cells=32, batch_size=8)
        _, _, strategy = fit(work, cells, strategies=strategies, steps=4, callbacks=[seen], precision=precision)
        assert strategy.plan is not None, "there is a plan after a fit"
        losses = torch.stack(seen.losses).double().cpu()
        good = seen.backend == wanted and bool(losses.isfinite().all())
        wrong += [] if good else [precision]
        work.record.row(
            precision=precision,
            backend=seen.backend,
            ranks=seen.ranks,
            first_loss=float(losses[0]),
            last_loss=float(losses[-1]),
            policy=strategy.plan.policy,
            plan=",".join(strategy.plan.strategies),
        )
    if wrong:
        raise AssertionError(f"losses are not finite, or the process group is not {wanted!r}, with {wrong!r}")


class Grows(pl.LightningModule):
    """A layer that makes four times its rows from the third step on, which no plan foresees: it reads the step."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(width, width)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """More work later."""
        return self.layer(batch.repeat(4 if self.global_step >= 2 else 1, 1)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """As a user writes it."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def budget(work: Work) -> None:
    """What no plan has foreseen ends at the budget, with the plan's words, and the limit ends with the run."""
    if work.device.type != "cuda":
        raise SkipPart("torch's allocator holds a budget on CUDA only; on a CPU batches are counted")
    width, rows = 1024, 2**16
    # a step of plain size takes seven such tensors; of four times the rows it takes twenty and more
    beside = CONTEXT_BYTES + sum(take_workspaces(work.device))
    named = int(8 * 4 * width * rows / TENSORS_SHARE) + beside
    torch.cuda.reset_peak_memory_stats(work.device)
    amp, said = {"device_memory": named, "on_predicted_oom": "refuse"}, ""
    trainer, strategy = trainer_for(work, strategies=("S1",), steps=8, amp=amp)
    try:
        trainer.fit(Grows(width), DataLoader([torch.ones(rows, width)] * 8, batch_size=None))
    except torch.OutOfMemoryError as error:
        said = str(error)
    assert strategy.plan is not None, "there is a plan"
    reserved = torch.cuda.max_memory_reserved(work.device)
    work.record.row(
        budget_bytes=named,
        predicted_bytes=strategy.plan.predicted_peak_bytes,
        reserved_bytes=reserved,
        free_bytes=torch.cuda.mem_get_info(work.device)[0],
        steps=trainer.global_step,
        error=said.partition(". Of the allocated")[0],
    )
    allowed = named - CONTEXT_BYTES
    if "was predicted for" not in said or reserved > allowed or trainer.global_step != 2:
        raise AssertionError(f"the budget of {named} was not held: {reserved} reserved, {said!r}")
    if torch.cuda.get_per_process_memory_fraction(work.device) != 1.0:
        raise AssertionError("the allocator is limited after the run")


def determinism(work: Work) -> None:
    """Two runs with one seed: equal to the last bit where Trainer(deterministic=True); else how far apart."""
    differ = []
    for deterministic in (True, False):
        for strategies in (OURS, EAGER):
            runs = [_state(work, strategies, deterministic=deterministic) for _ in range(2)]
            pairs = [(one, other) for one, other in zip(*runs, strict=True) if one.is_floating_point()]
            far = max(float((one - other).abs().max()) for one, other in pairs)
            equal = all(torch.equal(one, other) for one, other in pairs)
            differ += [",".join(strategies)] if deterministic and not equal else []
            work.record.row(
                strategies=",".join(strategies), deterministic=deterministic, equal=equal, largest_difference=far
            )
    if differ:
        raise AssertionError(f"two runs with deterministic=True differ with {differ!r}")


def _state(work: Work, strategies: tuple[str, ...], *, deterministic: bool) -> list[Tensor]:
    cells = CellsInMemory(cells=16, bins=60 if work.tiny else 600, strata=3, genes=50, batch_size=8)
    module, _, _ = fit(work, cells, strategies=strategies, steps=3, deterministic=deterministic)
    return [tensor.detach().cpu().clone() for tensor in module.state_dict().values()]


class TrainedDecoder(pl.LightningModule):
    """A decoder and the latents of its anchors: all that it needs is what the memory model predicts."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        shape = size.decoder()
        self.batch_size = size.cells
        self.alone = DecoderAlone(shape)
        # dense counts, as the memory model has them
        self._cells = decoder_batch(shape, size.cells, sparse=False, dtype=torch.float32)
        self.v = torch.nn.Parameter(self._cells.pop("v").detach())
        self._cells["u"].requires_grad_(False)

    def train_dataloader(self) -> DataLoader[Any]:
        """The same cells again and again."""
        return DataLoader([self._cells] * 4, batch_size=None)  # type: ignore[arg-type]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The decoder's loss."""
        cells = {name: batch[name] for name in ("batch", "library", "x")}
        loss: Tensor = self.alone.decoder(batch["u"], self.v, **cells)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Adam, which the prediction takes for granted."""
        return torch.optim.Adam(self.parameters())


def monitor(work: Work) -> None:
    """The memory monitor's table of a measured step: predicted and measured, for every stratum."""
    sizes = Size(anchors=5400, strata=32, cells=64)
    size = Size(anchors=300, strata=3, cells=8, dim=16, window=20) if work.tiny else sizes
    for strategies in (OURS, EAGER):
        with tempfile.TemporaryDirectory() as folder:
            watch = StratumMemoryMonitor(every_n_steps=2, dirpath=folder, plot=False)
            trainer, _ = trainer_for(work, strategies=strategies, steps=4, callbacks=[watch])
            trainer.fit(TrainedDecoder(size))
            names = sorted(path.name for path in watch.written)
        rows = watch.table()
        ratios = [row["ratio"] for row in rows if row["stratum"] not in (WHOLE_STEP, RESERVED)]
        (peak,) = [row for row in rows if row["stratum"] == WHOLE_STEP]
        reserved = next((row["ratio"] for row in rows if row["stratum"] == RESERVED), None)
        work.record.row(
            strategies=",".join(strategies),
            files=", ".join(names),
            measured_bytes=peak["measured"],
            predicted_bytes=peak["predicted"],
            ratio=peak["ratio"],
            ratio_of_reserved=reserved,
            least_ratio_of_strata=min(ratios),
            largest_ratio_of_strata=max(ratios),
        )


class Waiting(pl.Callback):
    """How long each step waited for its batch, and how long it then took; the first one's waiting is not known.

    The wait is from the end of a batch to the start of the next one: the loader, and the copy to the device. The device
    is waited for at both ends of a step.
    """

    def __init__(self) -> None:
        self.waited: list[float] = []
        self.worked: list[float] = []
        self._last = 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        """The batch is there."""
        begin = self._lap(pl_module)
        if self.worked:
            self.waited.append(begin)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        """The step is done."""
        self.worked.append(self._lap(pl_module))

    def _lap(self, module: pl.LightningModule) -> float:
        wait(module.device)
        before, self._last = self._last, time.perf_counter()
        return self._last - before


def loading(work: Work) -> None:
    """How long a step of the whole model waits for cells: a row for each number of workers, and pinned memory."""
    batch_size, cells, steps = (4, 40, 6) if work.tiny else (256, 4096, 14)
    own = data(tiny=work.tiny, cells=cells, batch_size=batch_size)
    for workers, pinned in TRIALS[::2] if work.tiny else TRIALS:
        if not work.has_time(f"{workers} workers, pinned {pinned}", 5):
            continue
        own.num_workers, own.pin_memory = workers, pinned and work.device.type == "cuda"
        clock = Waiting()
        fit(work, own, strategies=OURS, steps=steps, callbacks=[clock])
        waited, worked = (median(found[WARM_UP:]) for found in (clock.waited, clock.worked))
        work.record.row(
            workers=workers,
            pinned=own.pin_memory,
            cells=batch_size,
            wait_seconds=waited,
            step_seconds=worked,
            share_of_waiting=waited / (waited + worked),
        )
