"""Files of the library whose functions a fit enters from `AMPStrategy.setup` to its plan, and to the end of `setup`.

    python -m benchmarks.any_module.files_entered [--decoder] [--names]

The module has four blocks and fits as it is, so that nothing is chosen; with --decoder it is the reference model on
synthetic cells. A first fit in the same process imports all, and is not counted. With --names the files are listed, by
folder. Also printed: how often a call goes from one file to another, and the processor time of `setup` without the
count. About ten seconds.
"""

import argparse
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from inspect import CO_OPTIMIZED
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import lightning_amp
from benchmarks.page import origin, paragraph
from lightning_amp import AMPStrategy
from lightning_amp.data.loading.datamodule import SingleCellDataModule
from lightning_amp.data.prepare.synthetic import synthesize
from lightning_amp.lightning.strategy import install_plan
from lightning_amp.models.glue import GLUE

ROOT = Path(lightning_amp.__file__).parent
QUIET: dict[str, Any] = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Plain(pl.LightningModule):
    """Four blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.ReLU()) for _ in range(4)])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the loss."""
        loss: Tensor = self.blocks(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters())


class Entered:
    """Functions of the library that are entered.

    Attributes:
        files: Names of files, in the order of their first call.
        changes: Calls from one file to another.
    """

    def __init__(self) -> None:
        self.files: dict[str, None] = {}
        self.changes, self._last = 0, ""

    def __call__(self, frame: Any, event: str, _: object) -> None:
        """Note a call, as `sys.setprofile` reports it; bodies of modules and classes are no functions."""
        file = frame.f_code.co_filename
        if event == "call" and frame.f_code.co_flags & CO_OPTIMIZED and file.startswith(f"{ROOT}/"):
            self.files[file.removeprefix(f"{ROOT}/")] = None
            self.changes += file != self._last
            self._last = file


class Followed(AMPStrategy):
    """A strategy whose `setup` may be watched.

    Attributes:
        entered: What it notes; None if it is not watched.
        seconds: Processor time of `setup`.
    """

    entered: Entered | None = None
    seconds = 0.0

    def setup(self, trainer: pl.Trainer) -> None:
        """Set up, and count."""
        begun = time.process_time()
        sys.setprofile(self.entered)
        try:
            super().setup(trainer)
        finally:
            sys.setprofile(None)
        self.seconds = time.process_time() - begun


def fit(module: pl.LightningModule, data: Any, entered: Entered | None = None) -> float:
    """Train one step; return the processor time of `setup`."""
    strategy = Followed()
    strategy.entered = entered
    pl.Trainer(strategy=strategy, accelerator="cpu", devices=1, max_steps=1, **QUIET).fit(module, data)
    return strategy.seconds


@contextmanager
def noting_plan(entered: Entered) -> Iterator[list[int]]:
    """Note how many files and changes of file there are when a plan is made."""
    resolve, found = vars(install_plan)["resolve_plan"], list[int]()

    def noted(*args: Any, **kwargs: Any) -> Any:
        plan = resolve(*args, **kwargs)
        found[:] = [len(entered.files), entered.changes]
        return plan

    vars(install_plan)["resolve_plan"] = noted
    try:
        yield found
    finally:
        vars(install_plan)["resolve_plan"] = resolve


def follow(make: Callable[[], tuple[pl.LightningModule, Any]]) -> tuple[Entered, list[int], float]:
    """Return what a second fit enters, how much of it up to its plan, and the processor time of a third one."""
    fit(*make())
    entered = Entered()
    with noting_plan(entered) as planned:
        fit(*make(), entered)
    return entered, planned, fit(*make())


def listed(files: Iterator[str] | list[str]) -> Iterator[str]:
    """Yield a line for each folder."""
    folders = defaultdict[str, list[str]](list)
    for file in sorted(files):
        folder, _, name = file.rpartition("/")
        folders[folder or "."].append(name.removesuffix(".py"))
    yield from (f"{len(names):4} {folder}: {' '.join(names)}" for folder, names in sorted(folders.items()))


def main() -> None:
    """Count, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decoder", action="store_true", help="the reference model on synthetic cells")
    parser.add_argument("--names", action="store_true", help="list the files")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    with TemporaryDirectory() as folder:
        if asked.decoder:
            synthesize(f"{folder}/data", cells=24, bins=30, strata=3, genes=20, seed=1)
            entered, planned, seconds = follow(lambda: (GLUE(), SingleCellDataModule(f"{folder}/data", batch_size=8)))
        else:
            entered, planned, seconds = follow(lambda: (Plain(), DataLoader(torch.randn(16, 32), 4)))  # type: ignore[arg-type]
    command = f"python -m benchmarks.any_module.files_entered{' --decoder' * asked.decoder}"
    print("\n".join(paragraph(origin(command))))
    print(f"to the plan       {planned[0]} files, {planned[1]:,} changes of file")
    print(f"the whole setup   {len(entered.files)} files, {entered.changes:,} changes of file, {1e3 * seconds:.0f} ms")
    if asked.names:
        print("\n".join(listed([*entered.files])))


if __name__ == "__main__":
    main()
