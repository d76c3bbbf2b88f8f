"""Define `register_technique`, which adds a user's technique to the table (AMP's fifth principle, Section 3.1).

A registered technique consists of data and functions that planning does not inspect: nothing here imports torch.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from lightning_amp.costs.model_shape import ModelShape
from lightning_amp.costs.rule import Spec
from lightning_amp.diagnosis import known_signals
from lightning_amp.errors import PlanError
from lightning_amp.techniques.table import STRATEGIES, specs_by_name
from lightning_amp.techniques.technique import Installer, Technique

OwnSpec = TypeVar("OwnSpec", bound=Spec)
_ID = re.compile(r"S[1-9][0-9]*")


def register_technique(
    strategy: str,
    *,
    title: str,
    shrinks: str,
    spec: type[OwnSpec],
    targets: Callable[[ModelShape], Iterable[tuple[str, OwnSpec]]],
    install: Callable[[Any, OwnSpec, Any], Any],
    signal: str | None = None,
    model_axis: bool = False,
    shape_after: Callable[[ModelShape, int], ModelShape] | None = None,
) -> None:
    """Register a technique.

    After that `strategies="S1,S6"` selects it, and the policies choose it whenever its signal is raised, whatever the
    memory. Plans with it are checked, written as JSON and installed like all others, after S1 to S5.

    Args:
        strategy: An id that is not registered yet, "S6" and so on; strategies are installed in order of registration.
        title: What it does, in a few words.
        shrinks: The tensor that it makes smaller, such as "[B, F] to its non-zeros".
        spec: Class of its settings: a frozen dataclass whose fields are numbers, strings, booleans or None.
        targets: Function of the model's shape that returns names or patterns of the modules to change, each with a
            spec; an empty list if it changes nothing in such a model.
        install: Function (module, spec, mesh) that returns the module's replacement, which owns the same parameters
            under the same names, or a `lightning_amp.Change`. It raises InstallError for a module that it cannot
            replace exactly. The mesh has the axes "data" and "model"; it is None without ranks.
        signal: Signal for which policies choose it, AMP's or registered; None if only users choose it.
        model_axis: Whether it splits a module over the model axis, so that all ranks there read the same cells.
        shape_after: Function (shape of the model, ranks of the model axis) that returns the shape for the memory model
            after installation. With None, the prediction leaves its savings out, and the plan says so.

    Raises:
        PlanError: The id, spec or signal is invalid; nothing is registered.
    """
    if not isinstance(strategy, str) or not _ID.fullmatch(strategy):
        raise PlanError(f"a technique was registered as {strategy!r}; allowed is S and a number, such as 'S6'")
    if strategy in STRATEGIES:
        raise PlanError(
            f"a technique was registered as {strategy!r}, which is {STRATEGIES[strategy].title!r} already; choose a"
            f" number other than those of {', '.join(STRATEGIES)}, and register once in a process"
        )
    _check_spec(strategy, spec)
    if signal is not None and signal not in known_signals():
        raise PlanError(
            f"{strategy} was registered with signal={signal!r}; known are {', '.join(known_signals())} and None:"
            " register a signal of your own first, with register_signal"
        )
    STRATEGIES[strategy] = Technique(
        title=title,
        shrinks=shrinks,
        specs=(spec,),
        targets=targets,
        signal=signal,
        model_axis=model_axis,
        installers={spec: Installer(install)},
        registered=True,
        shape_after=shape_after,
    )


def _check_spec(strategy: str, spec: Any) -> None:
    if not (isinstance(spec, type) and is_dataclass(spec) and spec.__dataclass_params__.frozen):  # type: ignore[attr-defined]
        raise PlanError(
            f"{strategy} was registered with spec={spec!r}; allowed is a class made with @dataclass(frozen=True),"
            " because a plan is compared and does not change"
        )
    names = [field.name for field in fields(spec) if field.name == "type" or not field.init]
    if names:
        raise PlanError(
            f"{strategy} was registered with spec={spec.__name__}, whose fields {names!r} cannot be read back from a"
            " plan's JSON; allowed is any other name than 'type', without init=False"
        )
    if spec.__name__ in specs_by_name():
        raise PlanError(
            f"{strategy} was registered with spec={spec.__name__}, the name of another spec in a plan's JSON; choose"
            f" a name other than {', '.join(specs_by_name())}"
        )
