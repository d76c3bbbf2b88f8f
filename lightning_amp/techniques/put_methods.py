"""Override methods on a module instance, without a change of its class, and undo that."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_amp._torch import is_compiled
from lightning_amp.errors import InstallError

STEPS = ("training_step", "validation_step", "test_step", "predict_step")
"""Steps of a LightningModule, which techniques replace."""
Step = Callable[..., Any]
AroundCalls = Callable[[Sequence[Tensor], Step], AbstractContextManager[Step]]
"""(tensors that stay as they are, step) -> context manager for several calls of the step that it returns."""


def put_methods(module: nn.Module, changed: Mapping[str, Any]) -> Callable[[], None]:
    """Set functions by name as methods of a module instance; returns a function that undoes it."""
    for method in changed.values():
        function = getattr(method, "__func__", method)
        if hasattr(function, "__wrapped__"):
            # Lightning looks through one wrapper only to see whether a step takes the batch index
            function.__wrapped__ = inspect.unwrap(function, stop=lambda one: hasattr(one, "__signature__"))
    # not through __setattr__, which the class may override
    own = vars(module)
    before = {name: own[name] for name in changed if name in own}
    own.update(changed)

    def undo() -> None:
        for name in changed:
            own.pop(name, None)
        own.update(before)

    return undo


@contextmanager
def methods_put(changed: Iterable[tuple[nn.Module, Mapping[str, Any]]]) -> Iterator[None]:
    """Context manager: override methods of several modules, each with functions by name."""
    with ExitStack() as undo:
        for module, methods in changed:
            undo.callback(put_methods(module, methods))
        yield


def method_of(module: nn.Module, name: str) -> Callable[..., Any]:
    """Return what a module runs as a method, called as `function(module, ...)`: the override, or the class's method."""
    put = vars(module).get(name)
    if put is not None and getattr(put, "__self__", None) is not module:
        # an override on the instance is called without the module

        def run(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return put(*args, **kwargs)

        # Lightning inspects the signature to see whether a step takes the batch index
        module_first = inspect.Parameter("_", inspect.Parameter.POSITIONAL_ONLY)
        own = inspect.signature(put)
        run.__signature__ = own.replace(parameters=[module_first, *own.parameters.values()])  # type: ignore[attr-defined]
        return run
    found: Callable[..., Any] = getattr(type(module), name) if put is None else put.__func__
    return found


def around_calls_of(method: Any) -> AroundCalls | None:
    """Return what a replaced step runs around the module's own, if it may be called several times inside."""
    found: AroundCalls | None = getattr(method, "around_calls", None)
    return found


def refuse_unseen(technique: str, module: nn.Module) -> None:
    """Raise an InstallError unless it is a LightningModule without compiled modules, whose operators are hidden."""
    if not isinstance(module, LightningModule):
        raise InstallError(f"{technique} requires a LightningModule, found {type(module).__name__!r}")
    for name, child in module.named_modules():
        if is_compiled(child):
            raise InstallError(
                f"{technique}: torch.compile was applied to {name or type(module).__name__!r}, whose operators are not"
                " seen; leave one of them out"
            )


def refuse_scripts(technique: str, module: nn.Module) -> None:
    """Raise an InstallError for a ScriptModule, whose compiled code reads parameters and calls operators itself."""
    for name, child in module.named_modules():
        if isinstance(child, torch.jit.ScriptModule):
            raise InstallError(
                f"{technique}: {name!r} is a ScriptModule, whose compiled code reads its parameters itself; give the"
                " module that was scripted or traced"
            )
