"""`profile` and `plan MODULE:CLASS`: a LightningModule by its name and a batch by its shapes, without YAML."""

import argparse
import ast
import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_amp.errors import ModelError, PlanError

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

EXAMPLE = "my.model:Net --batch 4x3x32x32 --batch 4:int64"


def add_named_class(parser: argparse.ArgumentParser) -> None:
    """Add the flags that go with MODULE:CLASS in the place of DIR."""
    parser.add_argument(
        "--batch",
        action="append",
        metavar="[NAME=]SIZES[:DTYPE]",
        help="a tensor of the batch of MODULE:CLASS, which stands in the place of DIR and is a LightningModule of the"
        " current folder or an installed package; float32 unless DTYPE is given. Once for a tensor, several times for a"
        f" tuple, with names for a dict ('ids=4x128:int64'); '4x128,' is a tuple of one. Example: {EXAMPLE}",
    )
    parser.add_argument(
        "--init",
        action="append",
        metavar="NAME=VALUE",
        help="with MODULE:CLASS: an argument of its constructor, as a Python literal or a text: --init width=64",
    )


def named_step(arguments: argparse.Namespace) -> "tuple[LightningModule, Any] | None":
    """The module and the batch that were named, None where none was.

    Raises:
        AmpError: There is no such class, it cannot be made, or the batch is none.
    """
    name = arguments.data_dir
    if arguments.batch is None:
        if name is not None and ":" in name and not Path(name).exists():
            raise PlanError(f"{name!r} was named without --batch, its shapes; write for example {EXAMPLE}")
        if arguments.init is not None:
            raise PlanError("--init goes with MODULE:CLASS and --batch; name them, or leave --init out")
        return None
    if name is None or arguments.config is not None:
        raise PlanError(
            f"--batch goes with MODULE:CLASS alone, found {name!r} and --config {arguments.config!r}; write for example"
            f" {EXAMPLE}"
        )
    from lightning_amp.data.batch import batch_of_shapes

    return _made(name, arguments.init or []), batch_of_shapes(",".join(arguments.batch))


@contextmanager
def of_shapes(arguments: argparse.Namespace) -> Iterator[None]:
    """Say of a step that fails which shapes it was given."""
    try:
        yield
    except ModelError as error:
        if arguments.batch is None:
            raise
        raise ModelError(f"with --batch {' --batch '.join(arguments.batch)}: {error}") from error.__cause__


def _made(name: str, init: list[str]) -> "LightningModule":
    """Make an instance of "MODULE:CLASS"."""
    from lightning.pytorch import LightningModule

    module, _, attribute = name.partition(":")
    if not module or not attribute.isidentifier():
        raise ModelError(f"expected MODULE:CLASS, got {name!r}; write for example my.model:Net")
    # as `python -m` does: a console script finds its own folder only
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = importlib.import_module(module)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise ModelError(
                f"{name!r} cannot be imported: there is no module {error.name!r} in the current folder or"
                " among the installed packages; write the module as `import` does, without .py"
            ) from error
        raise ModelError(
            f"{name!r} cannot be imported: importing {module!r} fails: {type(error).__name__}: {error}"
        ) from error
    kind = getattr(found, attribute, None)
    if not isinstance(kind, type) or not issubclass(kind, LightningModule):
        there = [
            key
            for key, value in vars(found).items()
            if isinstance(value, type) and issubclass(value, LightningModule) and value.__module__ == module
        ]
        what = f"{module!r} has no {attribute!r}" if kind is None else f"{attribute!r} is no LightningModule"
        raise ModelError(f"{name!r} is not supported: {what}; its LightningModules are {there!r}")
    try:
        return kind(**dict(map(_argument, init)))
    except PlanError:
        raise
    except Exception as error:
        raise ModelError(
            f"{name!r} cannot be made: {type(error).__name__}: {error}; give arguments of its constructor as"
            " --init NAME=VALUE"
        ) from error


def _argument(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise PlanError(f"--init {text!r} was given; write --init NAME=VALUE, for example --init width=64")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value
