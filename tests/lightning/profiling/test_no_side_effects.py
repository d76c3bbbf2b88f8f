"""Claim: the profile of a step is a guest in the user's process: nothing of the user's notices that it was made."""

import copy
import gc
import inspect
import logging
import os
import random
import signal
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.rank_zero import WarningCache
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.data import DataLoader, Dataset, Sampler
from torchmetrics import MeanSquaredError

from lightning_amp._torch import FakeTensor
from lightning_amp.lightning.strategy.strategy import AMPStrategy

MOVED = {"train_dataloader", "predict_dataloader"}
"""Hooks that are called before a plan is made, where a plain run calls them later: they record nothing else."""


QUIET: Any = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


def trainer_of(strategy: Any = "amp", **options: Any) -> pl.Trainer:
    options = {"logger": False, **QUIET, **options}
    return pl.Trainer(strategy=strategy, accelerator="cpu", devices=1, max_epochs=1, **options)


def forget_what_was_said() -> None:
    """Lightning's warnings that are given once, too."""
    for cache in gc.get_objects():
        if type(cache) is WarningCache:
            cache.clear()


class Tracker:
    """Somebody's object that is none of the module's."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.n_calls = 0


GLOBAL: list[str] = []
ORDERS: list[int] = []
NESTED: dict[str, Any] = {"calls": {"names": []}}
TRACKER = Tracker()
N_CALLS = 0
GENERATOR = np.random.default_rng(0)
TORCH_GENERATOR = torch.Generator()
ONCE = WarningCache()
SETTINGS = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "default device": (torch.get_default_device, torch.set_default_device, "cpu:0"),
    "deterministic": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, 1),
    "anomaly": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly, True),
    "threads": (torch.get_num_threads, torch.set_num_threads, 3),
    "matmul": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"),
    "cudnn": (lambda: torch.backends.cudnn.benchmark, lambda on: setattr(torch.backends.cudnn, "benchmark", on), True),
    "folder": (os.getcwd, os.chdir, "/"),
    "signal": (
        lambda: signal.getsignal(signal.SIGUSR2),
        lambda handler: signal.signal(signal.SIGUSR2, handler),
        signal.SIG_IGN,
    ),
    "filters": (lambda: len(warnings.filters), lambda text: warnings.filterwarnings("ignore", text), "xyz"),
}


def look(name: str, given: Any, folder: Path) -> tuple[Any, ...]:
    """What there is to see in a hook; leaves traces of the visit."""
    global N_CALLS
    seen = os.environ.get("HOOKS_SEEN", "0")
    os.environ["HOOKS_SEEN"] = str(int(seen) + 1)
    draws = random.random(), np.random.rand(), GENERATOR.random(), torch.rand(1, generator=TORCH_GENERATOR)
    N_CALLS += 1
    TRACKER.n_calls += 1
    TRACKER.calls.append(name)
    GLOBAL.append(name)
    NESTED["calls"]["names"].append(name)
    warnings.warn(f"{name} warns", stacklevel=1)
    ONCE.warn(f"{name} warns once")
    logging.getLogger("somebody").warning("%s logs", name)
    print(f"{name} prints")
    sys.stderr.write(f"{name} writes\n")
    with (folder / "log.txt").open("a") as file:
        file.write(f"{name}\n")
    (folder / name).mkdir(exist_ok=len(list(folder.glob(f"{name}*"))) > 0)
    settings = tuple(str(read()) for read, _, _ in SETTINGS.values())
    if name == "on_fit_start":
        for _, write, value in SETTINGS.values():
            write(value)  # type: ignore[operator]
    fakes = any(isinstance(value, FakeTensor) for value in given)
    return name, seen, N_CALLS, TRACKER.n_calls, draws[:3], fakes, settings


def hooks_of(*kinds: type) -> set[str]:
    """Names of everything that a user may override."""
    return {
        name
        for kind in kinds
        for name, value in vars(kind).items()
        if inspect.isfunction(value)
        and (
            name.startswith(("on_", "configure_", "optimizer_", "lr_scheduler_"))
            or name.endswith(("_step", "_dataloader", "state_dict", "_batch_to_device"))
            or name in ("setup", "teardown", "prepare_data", "backward", "forward")
        )
    }


class Items(Dataset[Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        global N_CALLS
        N_CALLS += 1
        warnings.warn("an item warns", stacklevel=1)
        print("an item prints")
        TRACKER.calls.append(f"item {index}")
        return torch.full((3,), float(index), dtype=torch.float32)


class Order(Sampler[int]):
    def __init__(self) -> None:
        self.n_orders = 0

    def __iter__(self) -> Iterator[int]:
        self.n_orders += 1
        ORDERS.append(self.n_orders)
        return iter([3, 1, 2, 0])

    def __len__(self) -> int:
        return 4


def kinds(folder: Path, events: list[Any], *, values: bool) -> tuple[type, type, type]:
    """Classes of which every hook looks around; the step needs values or not."""

    def nosy(name: str, base: type, hooks: set[str], own: dict[str, Any]) -> type:
        def hook(name: str) -> Any:
            inner = own.get(name) or getattr(base, name)

            def visited(self: Any, *args: Any, **kwargs: Any) -> Any:
                if name in MOVED:
                    events.append((base.__name__, name))
                else:
                    type(self).of_class.append(name)
                    self.calls.append(name)
                    events.append((base.__name__, *look(name, (*args, *kwargs.values()), folder)))
                return inner(self, *args, **kwargs)

            return visited

        def init(self: Any) -> None:
            base.__init__(self)  # type: ignore[misc]
            self.calls = []
            if base is pl.LightningModule:
                self.net, self.mean = (nn.Sequential(nn.Linear(3, 3), nn.Dropout()), MeanSquaredError())

        parts = own | {name: hook(name) for name in hooks}
        return type(name, (base,), {**parts, "__init__": init, "of_class": [], "__module__": __name__})

    def step(self: Any, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.net(batch).square().mean()
        self.mean(loss.detach()[None], torch.zeros(1))
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("mean", self.mean, on_epoch=True)
        return loss * 2 if values and loss.item() > 0.5 else loss

    def loader(self: Any) -> DataLoader[Tensor]:
        return DataLoader(Items(), batch_size=2, sampler=Order())

    loaders = {f"{stage}_dataloader": loader for stage in ("train", "val", "test", "predict")}
    module = {
        "training_step": step,
        "validation_step": lambda self, batch, batch_idx: self.net(batch).mean(),
        "forward": lambda self, batch: self.net(batch),
        "configure_optimizers": lambda self: torch.optim.Adam(self.parameters(), lr=0.1),
    }
    hooks = (
        hooks_of(ModelHooks, DataHooks, CheckpointHooks, pl.LightningModule)
        - {*loaders, "configure_sharded_model", "forward"},
        hooks_of(DataHooks, pl.LightningDataModule),
        hooks_of(pl.Callback),
    )
    assert min(map(len, hooks)) > 10, hooks
    return (
        nosy("Nosy", pl.LightningModule, hooks[0], module),
        nosy("Data", pl.LightningDataModule, hooks[1], loaders),
        nosy("Watch", pl.Callback, hooks[2], {}),
    )


def all_that_is_seen(strategy: Any, folder: Path, *, run: str, values: bool = False) -> dict[str, Any]:
    """Of a run by a strategy: a fit, or what Trainer has else."""
    global N_CALLS
    N_CALLS, TRACKER.n_calls = 0, 0
    for calls in (TRACKER.calls, GLOBAL, ORDERS, NESTED["calls"]["names"]):
        calls.clear()
    forget_what_was_said()
    GENERATOR.bit_generator.state = np.random.default_rng(0).bit_generator.state
    TORCH_GENERATOR.manual_seed(0)
    os.environ.pop("HOOKS_SEEN", None)
    folder.mkdir()
    events: list[Any] = []
    pl.seed_everything(1)
    of_module, of_data, of_callback = kinds(folder, events, values=values)
    module, data, callback, logger = of_module(), of_data(), of_callback(), DummyLogger()
    before = {name: read() for name, (read, _, _) in SETTINGS.items()}
    forwards: list[bool] = []
    hook = register_module_forward_hook(lambda module, given, result: forwards.append(isinstance(result, FakeTensor)))
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("somebody").addHandler(handler)
    trainer = trainer_of(strategy, callbacks=[callback], logger=logger)
    threads = {thread.name for thread in threading.enumerate()}
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("default")
            getattr(trainer, run)(module, datamodule=data)
    finally:
        hook.remove()
        logging.getLogger("somebody").removeHandler(handler)
        after = {name: str(read()) for name, (read, _, _) in SETTINGS.items()}
        for name, (_, write, _) in SETTINGS.items():
            if name != "filters":
                write(before[name])  # type: ignore[operator]
        # a device that was set, be it the default, is a mode of torch functions
        torch.set_default_device(None)
    return {
        "events": [event for event in events if event[1] not in MOVED],
        "moved": Counter(event for event in events if event[1] in MOVED),
        "calls": [module.calls, data.calls, callback.calls],
        "of classes": [kind.of_class for kind in (of_module, of_data, of_callback)],
        "globals": [N_CALLS, copy.deepcopy([vars(TRACKER), GLOBAL, ORDERS, NESTED, {*ONCE}])],
        "files": {path.name: path.read_text() if path.is_file() else "" for path in folder.iterdir()},
        "warned": Counter(str(one.message) for one in warned),
        "logged": records,
        "forwards": forwards,
        "settings": after,
        "streams": (random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()),
        "generators": (GENERATOR.bit_generator.state, TORCH_GENERATOR.get_state().tolist()),
        "state": {name: value.tolist() for name, value in module.state_dict().items()},
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "logged metrics": sorted(trainer.logged_metrics),
        "progress": trainer.fit_loop.state_dict(),
        "trainer": data.trainer is trainer and module.trainer is trainer,
        "training": [child.training for child in module.modules()],
        "hooks": sum(len(child._forward_hooks) for child in module.modules()),
        # the observer is Lightning's, of every strategy for several devices
        "threads": {thread.name for thread in threading.enumerate()} - threads - {"child-process-observer"},
    }


@pytest.mark.parametrize(("run", "values"), [("fit", False), ("fit", True), ("predict", False)])
def test_nothing_of_the_users_notices_a_profile(
    run: str, values: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOOKS_SEEN", "0")
    found = {}
    # an evaluation is planned within a budget
    amp = "amp" if run == "fit" else AMPStrategy(device_memory="1GiB")
    for name, strategy in {"amp": amp, "plain": "auto"}.items():
        found[name] = all_that_is_seen(strategy, tmp_path / name, run=run, values=values)
        found[name]["printed"] = capsys.readouterr()
    amp, plain = found["amp"], found["plain"]
    for name, seen in plain.items():
        assert amp[name] == seen, name
