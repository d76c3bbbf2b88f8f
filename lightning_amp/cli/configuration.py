"""Plan any module for `plan --config`, `plan MODULE:CLASS` and `simulate --config`; imports torch."""

import argparse
import ast
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from lightning_amp.cli.request import OF_DATA, rates_of_request, refuse, request_of
from lightning_amp.errors import ModelError, PlanError
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.progress import shown_if_long
from lightning_amp.techniques.table import options_of_techniques, parse_strategies

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

    from lightning_amp.footprint.run.run_settings import RunSettings

    Step = tuple[LightningModule, Any, RunSettings, dict[str, Any]]

R = TypeVar("R")
ALONE = OF_DATA | {"DIR": "data_dir", "--shape": "shape"}
"""Options that do not apply to a configuration."""


class PlannedStep(NamedTuple):
    """A plan, its answers as plain values, and the code of its chunked blocks as Python text, "" if not requested."""

    plan: Plan
    answers: dict[str, Any]
    code: str


def add_configuration(parser: argparse.ArgumentParser) -> None:
    """Add the flag `--config`."""
    parser.add_argument(
        "--config",
        metavar="FILE.yaml",
        help="of `lightning-amp fit`: plan its model, which may be any, by a profile of its step",
    )
    parser.add_argument(
        "--tensor-grid",
        metavar="X,Y,Z",
        help="with --config and --strategies tensor3d: its grid of ranks, or auto for the fastest that fits (default:"
        " the configuration's, else auto)",
    )


def plan_of_configuration(arguments: argparse.Namespace, named: "Callable[..., Step] | None" = None) -> "PlannedStep":
    """Return the plan of a configuration.

    If a device memory is given, the plan reports the largest batch and the fewest devices too. `named` is the result of
    `named_step`, which replaces the configuration. Raises AmpError if the module has a Hi-C decoder, its step cannot be
    profiled, or the request cannot be planned.
    """
    if named is None:
        model = f"--config {arguments.config!r}"
        refuse(arguments, model, ALONE, "which are of other models")
    else:
        model = repr(arguments.data_dir)
        refuse(arguments, model, OF_DATA | {"--shape": "shape"}, "which are of other models")
    return use_step(arguments, named, partial(_plan_of_step, arguments, model))


def use_step(arguments: argparse.Namespace, named: "Callable[..., Step] | None", use: Callable[..., R]) -> R:
    """Return `use(module, batch, run_settings, options)` for the step of `named`; None takes the configuration's.

    A named class, or the layers from `configure_model` of a configuration, are made on the meta device first, so that
    they may exceed this machine's memory. If making them or the step requires values, all is made again with values.
    """
    from lightning_amp.footprint.profile_module import lacks_values
    from lightning_amp.verification.read_configuration import read_step

    prepare, module = named or partial(read_step, arguments.config), None
    try:
        module, *others = prepare(values=False)
        return use(module, *others)
    except ModelError:
        if module is not None and not lacks_values(module):
            raise
    return use(*prepare(values=True))


@shown_if_long("planning")
def _plan_of_step(
    arguments: argparse.Namespace,
    model: str,
    module: "LightningModule",
    batch: Any,
    run_settings: "RunSettings",
    options: dict[str, Any],
) -> PlannedStep:
    # imported late: torch takes seconds to import
    from lightning_amp.footprint.copies.other_lengths import length_of_dim
    from lightning_amp.lightning.profiling.plan_of_module import plan_of_module

    requested = _requested(arguments, options)
    request = request_of(requested)
    if requested.plan is not None:
        raise PlanError(
            f"{model} has a strategy that carries out plan={requested.plan!r}: there is nothing to plan; name"
            " --policy or --strategies to plan it otherwise"
        )
    grid = getattr(arguments, "tensor_grid", None)
    if grid is not None:
        options["tensor_grid"] = _grid(grid, request["strategies"])
    host = getattr(arguments, "host_memory", None)
    if host is not None:
        options["host_memory"] = _checked("host_memory", host, request["strategies"])
    largest = None if (given := getattr(arguments, "largest", None)) is None else _dimension(given)
    if largest is not None:
        # refused before the plan, which may take minutes
        length_of_dim(batch, *largest)
    del request["batch_size"]
    speeds = getattr(arguments, "device_speeds", None) or options.get("device_speeds")
    # what a fit would measure is not known here
    request["device_speeds"] = None if speeds == "measure" else speeds
    rates = rates_of_request(requested, run_settings.precision)
    made = plan_of_module(
        module,
        batch,
        run_settings=run_settings,
        rates=rates,
        request=request,
        options=options,
        batch_size=arguments.batch_size,
    )
    code = made.code() if getattr(arguments, "show_code", False) else ""
    plan, found = made.plan, made.answers()
    answers, said = ({}, ()) if found is None else (found.to_dict(), found.said)
    if largest is not None:
        name, dim = largest
        length = made.largest(name, dim)
        said = (*said, f"the largest length of dimension {dim} of {name!r} that fits: {length or 'none'}")
        answers["largest_length"] = {"tensor": name, "dim": dim, "length": length}
    return PlannedStep(replace(plan, notes=(*plan.notes, *said)), answers, code)


def _dimension(text: str) -> tuple[str, int]:
    """Parse a tensor of the batch and a dimension, as in "ids" or "image:2"."""
    name, colon, dim = text.rpartition(":")
    if not colon:
        return text, 1
    if not (name and dim.isdecimal()):
        raise PlanError(f"--largest {text!r} was given; write NAME or NAME:DIM, for example ids or image:2")
    return name, int(dim)


def _grid(text: str, strategies: Any) -> tuple[int, ...] | None:
    """Parse the sizes of a grid such as "2,1,2"; None for "auto"."""
    if text == "auto" and {*parse_strategies(strategies or "S1")} & {*options_of_techniques()["tensor_grid"]}:
        return None
    sizes = tuple(int(part) if part.strip().isdecimal() else part for part in text.split(","))
    return _checked("tensor_grid", sizes, strategies)  # type: ignore[no-any-return]


def _checked(name: str, value: Any, strategies: Any) -> Any:
    """Return an option of a technique after the same checks as in AMPStrategy."""
    from lightning_amp.lightning.strategy.request import Request

    return getattr(Request(strategies=strategies, **{name: value}), name)


def _requested(arguments: argparse.Namespace, options: dict[str, Any]) -> argparse.Namespace:
    """Return the options of the command line, completed with those of the configuration's AMPStrategy."""
    given = argparse.Namespace(**vars(arguments))
    # either option replaces both of the file: with the file's strategies, a new policy would have no effect
    chosen = arguments.policy is not None or arguments.strategies is not None
    others = {"policy", "strategies"} if chosen else set()
    others |= {"rates"} if arguments.device is not None else set()
    # the grid sets the model axis: a new grid replaces the model_parallel_size of the configuration
    others |= {"model_parallel_size"} if getattr(arguments, "tensor_grid", None) is not None else set()
    given.plan = None if chosen else options.get("plan")
    for name in {"device_memory", "policy", "strategies", "model_parallel_size", "rates"} - others:
        if getattr(given, name) is None:
            setattr(given, name, options.get(name))
    if given.model_parallel_size is not None:
        given.model_parallel_size = str(given.model_parallel_size)
    return given


EXAMPLE = "my.model:Net --batch 4x3x32x32 --batch 4:int64"


def add_named_class(parser: argparse.ArgumentParser) -> None:
    """Add the flags for MODULE:CLASS, which replaces DIR."""
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


def named_step(arguments: argparse.Namespace) -> "Callable[..., Step] | None":
    """Return a function that makes the training step of the class on the command line; None if there is no class.

    The function takes `values`: False makes the module on the meta device. It returns module, batch, settings of the
    run and AMPStrategy options (none). Raises AmpError if the class cannot be imported, or an argument is invalid.
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
    import torch
    from lightning.pytorch.utilities.model_helpers import is_overridden

    from lightning_amp.data.batch import batch_of_shapes
    from lightning_amp.footprint.run.run_settings import UNDER_AMP

    # import the class and parse its arguments first: only the constructor and the hooks run on the meta device
    kind, values = _class_of(name), dict[str, Any]()
    for text in arguments.init or ():
        argument, equals, value = text.partition("=")
        if not equals or not argument.isidentifier():
            raise PlanError(f"--init {text!r} was given; write --init NAME=VALUE, for example --init width=64")
        values[argument] = value
        # a value that is not a Python literal is a string
        with suppress(ValueError, SyntaxError):
            values[argument] = ast.literal_eval(value)
    batch = batch_of_shapes(",".join(arguments.batch))

    def make() -> "LightningModule":
        try:
            return kind(**values)
        except Exception as error:
            raise ModelError(
                f"{name!r} cannot be made: {type(error).__name__}: {error}; give arguments of its constructor as"
                " --init NAME=VALUE"
            ) from error

    def prepare(*, values: bool) -> "Step":
        # torch warns for each value that is loaded into a meta parameter and discarded
        quiet = nullcontext() if values else warnings.catch_warnings(action="ignore")
        with nullcontext() if values else torch.device("meta"), quiet:
            module = make()
            if not is_overridden("configure_model", module):
                return module, batch, UNDER_AMP, {}
            try:
                module.setup("fit")
                module.configure_model()
            except Exception as error:
                if not values:
                    raise ModelError("the hooks that create layers require values") from error
                # the hooks may require a Trainer, which profiling provides
                return make(), batch, UNDER_AMP, {}
            return module, batch, replace(UNDER_AMP, prepared=True), {}

    return prepare


@contextmanager
def of_shapes(arguments: argparse.Namespace) -> Iterator[None]:
    """Add the shapes of the batch to the error of a failed step."""
    try:
        yield
    except ModelError as error:
        if arguments.batch is None:
            raise
        raise ModelError(f"with --batch {' --batch '.join(arguments.batch)}: {error}") from error.__cause__


def _class_of(name: str) -> "type[LightningModule]":
    """Import the class of "MODULE:CLASS"."""
    from lightning.pytorch import LightningModule

    module, _, attribute = name.partition(":")
    if not module or not attribute.isidentifier():
        raise ModelError(f"expected MODULE:CLASS, got {name!r}; write for example my.model:Net")
    # as `python -m` does: a console script does not search the current folder
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
    return kind
