"""Define the command line on top of LightningCLI: short messages for mistakes, suggestions, and `--ckpt_path last`.

Lightning searches `--ckpt_path last` in the folder of the new run, which is empty if a logger numbers its runs. It
warns, and continues with untrained weights. Here, `last` is the newest checkpoint that any `fit` run of the same
configuration has written.
"""

import argparse
import importlib
import inspect
import pickle
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import StrategyRegistry

from lightning_amp.errors import PlanError, meant
from lightning_amp.lightning.callbacks.prediction_writer import PredictionWriter
from lightning_amp.lightning.strategy.registration import START_METHODS
from lightning_amp.models.glue import GLUE

CONFIG_USED = "config_used.yaml"
"""File name of a run's configuration, saved with its logs."""
OPTION = "--trainer.strategy."
RAISE = {"exit_on_error": False}
"""Parser option: raise errors instead of printing a screenful of usage and exiting."""


class CommandLine(LightningCLI):
    """Read modules and data modules of any class, with strategy "amp" by default; raise a PlanError for mistakes.

    Classes are imported from installed packages and from the current folder.

    Args:
        prog: Program name for messages; None uses the script's name.
        help_of: verb -> usage, description and examples of its `--help`.
        options: Other arguments of LightningCLI.
    """

    def __init__(
        self,
        *,
        prog: str | None = None,
        help_of: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
        **options: Any,
    ) -> None:
        self._new_data: Path | None = None  # of predict: a directory with other cells than the configuration's
        self._out: Path | None = None
        # as `python -m` does: a console script has only its own folder on the path
        if str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        verbs = {verb: RAISE | dict(help_of.get(verb, {})) for verb in self.subcommands()}
        super().__init__(
            LightningModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            trainer_defaults={"strategy": "amp"},
            auto_configure_optimizers=False,
            parser_kwargs={"prog": prog, **RAISE, **verbs},
            save_config_kwargs={"overwrite": True, "config_filename": CONFIG_USED},
            **options,
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Parse the arguments; called by Lightning.

        Raises:
            PlanError: A key, class or argument does not exist, or a value is not valid.
        """
        words = sys.argv[1:] if args is None else list(args)
        if words[:1] == ["predict"]:
            words, self._new_data, self._out = _with_new_cells(words)
        try:
            self.config = parser.parse_args(_with_class_of_strategy(parser, words))
        except argparse.ArgumentError as error:
            if "arguments are required" in str(error) and not any(word.startswith("--config") for word in words):
                raise PlanError(
                    f"--config is missing: {parser.prog} {words[0]} --config FILE.yaml names a file with the sections"
                    " model, data and trainer; `lightning-amp demo` writes one, demo/config.yaml"
                ) from None
            raise PlanError(self._in_terms_of_options(str(error))) from None
        strategy = self.config[self.config.subcommand].trainer.strategy
        known = ["auto", *StrategyRegistry.available_strategies()]
        if isinstance(strategy, str) and strategy.lower() not in known:
            ours = sorted(name for name in known if name.startswith("amp"))
            raise PlanError(
                f"strategy {strategy!r} is not supported; allowed are {ours!r} and Lightning's own, such as 'auto' and"
                f" 'ddp'{meant(strategy, known)}"
            )

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Create the Trainer; called by Lightning.

        Raises:
            PlanError: A setting of the Trainer is not valid.
        """
        try:
            return super().instantiate_trainer(**kwargs)
        except ValueError as error:
            raise PlanError(str(error)) from error

    def _parse_ckpt_path(self) -> None:
        """Read the model's arguments from the checkpoint, as Lightning does, if a command line wrote it.

        A checkpoint of a Trainer in Python names no class, for which Lightning ends; the configuration's model stays.
        """
        configured = self.config
        try:
            super()._parse_ckpt_path()
        except argparse.ArgumentError:
            self.config = configured

    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        arguments = super()._prepare_subcommand_kwargs(subcommand)
        if isinstance(self.model, GLUE):
            # its losses are logged for every epoch, however few batches one has
            warnings.filterwarnings("ignore", message=".*is smaller than the logging interval")
        self._place_predictions()
        if isinstance(requested := arguments.get("ckpt_path"), str | Path):
            path = find_checkpoint(str(requested), self.trainer, self._same_configuration)
            arguments["ckpt_path"] = path
            if subcommand != "fit" and isinstance(self.model, GLUE) and Path(path).is_file():
                # built for the checkpoint's features, so that those of the data are compared with them by name. What
                # cannot be read here, Lightning reads and compares with a model that is built for the data
                with suppress(pickle.UnpicklingError):
                    self.model.on_load_checkpoint(torch.load(path, map_location="cpu", mmap=True, weights_only=True))
        return arguments

    def _place_predictions(self) -> None:
        """Write predictions to the folder of `--out`; those of new cells by default beside the configuration's."""
        if self._new_data is None and self._out is None:
            return
        callbacks: list[Any] = self.trainer.callbacks  # type: ignore[attr-defined]
        writers = [callback for callback in callbacks if isinstance(callback, PredictionWriter)]
        writer = next(iter(writers), None) or PredictionWriter("predictions")
        if not writers:
            callbacks.append(writer)
        if self._out is None and self._new_data is not None:
            name = f"{writer.out_dir.name}_{self._new_data.resolve().name}"
            self._out = writer.out_dir.with_name(name)
        assert self._out is not None, "one of the two is given"
        writer.out_dir = self._out

    def _same_configuration(self, logs: Path) -> bool:
        """Whether the run with these logs used the same model as this one, and the same data unless cells are new."""
        path = logs / CONFIG_USED
        if not path.is_file():
            return False
        verb = str(self.subcommand)
        text = self._subcommand_parsers[verb].dump(self.config[verb], skip_none=False)
        then, now = yaml.safe_load(path.read_text()), yaml.safe_load(text)
        return all(then.get(part) == now.get(part) for part in ("model", "data")[: 1 if self._new_data else 2])

    def _in_terms_of_options(self, message: str) -> str:
        if found := re.search(r"'(\w+)' does not accept option '([\w.]+)'", message):
            verb, key = found.groups()
            keys = [action.dest for action in self._subcommand_parsers[verb]._actions]
            return f"{key!r} was set; {verb} has nothing of that name{meant(key, keys)}"
        if found := re.search(r"given class_path '([\w.]+)':\s+Option '(\w+)' is not accepted", message):
            path, name = found.groups()
            home, _, kind = path.rpartition(".")
            taken = list(inspect.signature(getattr(importlib.import_module(home), kind)).parameters)
            return f"{name!r} was given to {path}; it takes {taken!r}{meant(name, taken)}"
        if found := re.search(r"given class_path '([\w.]+)':\s+module '([\w.]+)' has no", message):
            path, module = found.groups()
            name = path.rpartition(".")[2]
            near = meant(name, dir(importlib.import_module(module)))
            return f"the class {path!r} does not exist; {module!r} has none{near}"
        return message


def _with_class_of_strategy(parser: LightningArgumentParser, words: list[str]) -> list[str]:
    """Replace a strategy name such as "amp" by its class if there are options of the strategy.

    jsonargparse does not support options of a name. The options move after a configuration file, which may set it.

    Raises:
        PlanError: The name belongs to another strategy.
    """
    options, others, rest = [], [], iter(words)
    for word in rest:
        if word.startswith(OPTION) and not word.startswith(f"{OPTION}help"):
            options += [word] if "=" in word else [word, *islice(rest, 1)]
        else:
            others.append(word)
    if not options:
        return words
    # --print_config would make the parser exit
    config = parser.parse_args([word for word in others if not word.startswith("--print_config")])
    name = config[config.subcommand].trainer.strategy
    if not isinstance(name, str):
        return [*others, *options]
    if name.lower() not in START_METHODS:
        raise PlanError(
            f"{options[0]!r} was set, and strategy {name!r} has no options; allowed are options of"
            f" {sorted(START_METHODS)!r} and of a strategy that is given by its class_path"
        )
    made = [OPTION[:-1], "lightning_amp.AMPStrategy", f"{OPTION}start_method", START_METHODS[name.lower()]]
    return [*others, *made, *options]


def _with_new_cells(words: list[str]) -> tuple[list[str], Path | None, Path | None]:
    """Take `--data DIR` and `--out DIR` out of the words of `predict`; return the others and both folders.

    A data directory of `--data` replaces that of the configuration; the name of a class is left to Lightning.
    """
    found: dict[str, Path] = {}
    others, rest = [], iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if name not in ("--data", "--out"):
            others.append(word)
            continue
        value = value if equals else next(rest, "")
        if name == "--data" and re.fullmatch(r"[\w.]+", value) and not Path(value).exists() and "." in value:
            others += [name, value]
        elif not value or (name == "--data" and not Path(value).is_dir()):
            raise PlanError(f"{name} {value!r} was given; {name} DIR names a folder, for --data one that exists")
        else:
            found[name] = Path(value)
    if "--data" in found:
        others += ["--data.init_args.data_dir", str(found["--data"])]
    return others, found.get("--data"), found.get("--out")


SHOWN = 5
"""Largest number of checkpoints listed in an error message."""


def find_checkpoint(given: str, trainer: Trainer, same_configuration: Callable[[Path], bool]) -> str:
    """Return the path of the requested checkpoint; words that Lightning can resolve, and paths, are returned unchanged.

    Args:
        same_configuration: Whether the run with logs in a folder used the same model and data configuration.

    Raises:
        PlanError: There is no such checkpoint.
    """
    known = {
        "last": False,
        # only after training in this process
        "best": bool(getattr(trainer.checkpoint_callback, "best_model_path", None)),
        "hpc": trainer._checkpoint_connector._hpc_resume_path is not None,
    }
    # paths that may be remote or in a registry are resolved by Lightning
    if known.get(given, ":" in given or Path(given).exists()):
        return given
    found, others = set(_own(trainer)), set[str]()
    # checkpoints in the numbered runs of the first logger
    for logger in trainer.loggers[:1]:
        runs = Path(logger.save_dir or trainer.default_root_dir, str(logger.name))
        for path in runs.glob("*/checkpoints/*.ckpt"):
            (found if same_configuration(path.parent.parent) else others).add(str(path))
    if given == "last" and found:
        return max(found, key=_written)
    why = {
        "last": "fit has written no checkpoint of this model and this data",
        "best": "which one is best is known to the run of fit alone",
        "hpc": "there is no checkpoint of a run that a cluster interrupted",
    }.get(given, "there is no such file")
    listed = "No checkpoint was found: run `lightning-amp fit` with this configuration and without --ckpt_path first"
    if found | others:
        newest = sorted(found or others, key=_written, reverse=True)
        whose = "this configuration" if found else "other configurations"
        more = f" and {len(newest) - SHOWN} more" if len(newest) > SHOWN else ""
        listed = f"Found of {whose}: {', '.join(map(repr, newest[:SHOWN]))}{more}. Name one by its path"
    raise PlanError(f"--ckpt_path {given!r}: {why}. {listed}")


def _own(trainer: Trainer) -> Iterator[str]:
    """Yield checkpoints in folders from the configuration, and those that Lightning considers the last."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            yield from callback._find_last_checkpoints(trainer)
            folder = Path(callback.dirpath or Path(trainer.default_root_dir, "checkpoints"))
            if callback.dirpath is not None or not trainer.loggers:
                yield from map(str, folder.glob("*.ckpt"))
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, OnExceptionCheckpoint) and Path(callback.ckpt_path).exists():
            yield callback.ckpt_path


def _written(path: str) -> float:
    return float(get_filesystem(path).modified(path).timestamp())
