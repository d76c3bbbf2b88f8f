"""Override a module's methods on the instance, so that its class stays as it is."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn

from lightning_amp._torch import is_compiled
from lightning_amp.errors import InstallError

STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def put_methods(module: nn.Module, changed: Mapping[str, Any]) -> Callable[[], None]:
    """Put functions, by name, in the place of a module's methods; returns what undoes it."""
    # past __setattr__, which a class may have its own of
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
    """While the block lasts, functions by name are in the place of methods of several modules."""
    with ExitStack() as undo:
        for module, methods in changed:
            undo.callback(put_methods(module, methods))
        yield


def method_of(module: nn.Module, name: str) -> Callable[..., Any]:
    """The function that a module runs as a method, called as `function(module, ...)`: put there, or of its class."""
    put = vars(module).get(name)
    if put is not None and getattr(put, "__self__", None) is not module:
        # Python calls what was put there without the module

        def run(_: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return put(*args, **kwargs)

        # Lightning looks whether a step takes the number of its batch
        module_first = inspect.Parameter("_", inspect.Parameter.POSITIONAL_ONLY)
        own = inspect.signature(put)
        run.__signature__ = own.replace(parameters=[module_first, *own.parameters.values()])  # type: ignore[attr-defined]
        return run
    found: Callable[..., Any] = getattr(type(module), name) if put is None else put.__func__
    return found


def refuse_unseen(technique: str, module: nn.Module) -> None:
    """Refuse, with an InstallError, a module whose operators a technique would not see while its step runs."""
    if not isinstance(module, LightningModule):
        raise InstallError(f"{technique} requires a LightningModule, found {type(module).__name__!r}")
    for name, child in module.named_modules():
        if is_compiled(child):
            raise InstallError(
                f"{technique}: torch.compile was applied to {name or type(module).__name__!r}, whose operators are not"
                " seen; leave one of them out"
            )
