"""The blocks of a module: children of its lists and sequences; and the modules that have them."""

from torch import nn


def find_blocks(module: nn.Module) -> dict[str, nn.Module]:
    """The children of the outermost lists and sequences of a module, by name; a module by itself is no block."""
    found: dict[str, nn.Module] = {}

    def walk(fqn: str, parent: nn.Module) -> None:
        for name, child in parent.named_children():
            inner = f"{fqn}.{name}" if fqn else name
            if isinstance(parent, nn.ModuleList | nn.Sequential) and not isinstance(child, nn.ModuleList):
                found.setdefault(inner, child)
            else:
                walk(inner, child)

    walk("", module)
    return found


def owners(module: nn.Module) -> dict[str, nn.Module]:
    """The modules inside of a module that have blocks and are none, by name, the outer ones first."""
    blocks = find_blocks(module)
    return {
        fqn: child
        for fqn, child in module.named_modules()
        if fqn and not isinstance(child, nn.ModuleList) and any(name.startswith(f"{fqn}.") for name in blocks)
    }
