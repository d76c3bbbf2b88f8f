"""What a technique has found out by trying a module, kept for modules of the same class with the same settings."""

from collections.abc import Callable, Hashable

from torch import nn

Probe = Callable[[nn.Module], str]

_FOUND: dict[tuple[Hashable, ...], str] = {}
_COMMON = frozenset(vars(nn.Module()))


def problem_of(module: nn.Module, probe: Probe) -> str:
    """What `probe` says of a module; 32 strata have 32 modules that are alike, which are probed once.

    Args:
        module: Without parameters, buffers and children, so that its class and its settings say what it computes.
        probe: Module -> what is wrong with it, "" if nothing.
    """
    settings = {name: value for name, value in vars(module).items() if name not in _COMMON}
    plain = all(
        isinstance(value, bool | int | float | str | slice | type | None) for value in settings.values()
    )
    if not plain or list(module.children()) or module.state_dict():
        return probe(module)
    key = (
        probe,
        type(module),
        module.training,
        *sorted(
            (name, value if isinstance(value, type) else repr(value)) for name, value in settings.items()
        ),
    )
    if key not in _FOUND:
        _FOUND[key] = probe(module)
    return _FOUND[key]
