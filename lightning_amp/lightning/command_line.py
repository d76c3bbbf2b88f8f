"""Lightning's command line whose mistakes are told in one message, with the name that may have been meant."""

import argparse
import difflib
import importlib
import inspect
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import StrategyRegistry

from lightning_amp.errors import PlanError

RAISE = {"exit_on_error": False}
"""Of a parser that would print its usage, a screenful, and end the process."""


class CommandLine(LightningCLI):
    """Reads modules and data modules of any class, with strategy "amp" by default; mistakes are PlanErrors.

    Args:
        prog: The program's name, for its messages; None takes the script's.
        help_of: verb -> usage, description and examples of its `--help`.
        options: Lightning's.
    """

    def __init__(
        self,
        *,
        prog: str | None = None,
        help_of: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
        **options: Any,
    ) -> None:
        verbs = {verb: RAISE | dict(help_of.get(verb, {})) for verb in self.subcommands()}
        super().__init__(
            LightningModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            trainer_defaults={"strategy": "amp"},
            auto_configure_optimizers=False,
            parser_kwargs={"prog": prog, **RAISE, **verbs},
            **options,
        )

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        """Called by Lightning.

        Raises:
            PlanError: A key, a class or an argument that is not there, or a value that does not fit.
        """
        try:
            super().parse_arguments(parser, args)
        except argparse.ArgumentError as error:
            raise PlanError(self._told(str(error))) from None
        _check_strategy(self.config[self.config.subcommand].trainer.strategy)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """Called by Lightning.

        Raises:
            PlanError: A setting of the Trainer means nothing.
        """
        try:
            return super().instantiate_trainer(**kwargs)
        except ValueError as error:
            raise PlanError(str(error)) from error

    def _told(self, message: str) -> str:
        if found := re.search(r"'(\w+)' does not accept option '([\w.]+)'", message):
            verb, key = found.groups()
            keys = [action.dest for action in self._subcommand_parsers[verb]._actions]
            return f"{key!r} was set; {verb} has nothing of that name{meant(key, keys)}"
        if found := re.search(r"given class_path '([\w.]+)':\s+Option '(\w+)' is not accepted", message):
            path, name = found.groups()
            return f"{name!r} was given to {path}; it takes {_takes(path)!r}{meant(name, _takes(path))}"
        if found := re.search(r"given class_path '([\w.]+)':\s+module '([\w.]+)' has no", message):
            path, module = found.groups()
            name = path.rpartition(".")[2]
            return f"the class {path!r} was asked for; {module!r} has none{meant(name, _names_in(module))}"
        return message


def _check_strategy(strategy: object) -> None:
    known = ["auto", *StrategyRegistry.available_strategies()]
    if isinstance(strategy, str) and strategy.lower() not in known:
        ours = sorted(name for name in known if name.startswith("amp"))
        raise PlanError(
            f"strategy {strategy!r} was asked for; allowed are {ours!r} and Lightning's own, such as 'auto' and"
            f" 'ddp'{meant(strategy, known)}"
        )


def meant(name: str, known: Iterable[str]) -> str:
    """The nearest of the known names as the end of a message, nothing where none is near."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f". Did you mean {near[0]!r}?" if near else ""


def _takes(path: str) -> list[str]:
    module, _, name = path.rpartition(".")
    parameters = inspect.signature(getattr(importlib.import_module(module), name)).parameters
    return list(parameters)


def _names_in(module: str) -> list[str]:
    return dir(importlib.import_module(module))
