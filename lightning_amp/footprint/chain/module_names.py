"""List modules, the names of parameters, and the copies of blocks that a step has made."""

from collections.abc import Mapping

from torch import nn


def all_names(module: nn.Module) -> dict[str, list[str]]:
    """Return all names of each parameter, by the first of them."""
    named: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        named.setdefault(id(parameter), []).append(name)
    return {names[0]: names for names in named.values()}


def modules_of(module: nn.Module) -> dict[int, nn.Module]:
    """Return the submodules of a module, and those that are attributes without being submodules, by id."""
    found = {id(part): part for part in module.modules()}
    unregistered = [value for part in found.values() for value in vars(part).values() if isinstance(value, nn.Module)]
    return found | {id(part): part for value in unregistered for part in value.modules()}


def copied_blocks(module: nn.Module, blocks: Mapping[str, nn.Module], before: Mapping[int, nn.Module]) -> set[str]:
    """Return the blocks of which a module has a copy now that it did not have before."""
    new = [part for key, part in modules_of(module).items() if key not in before]
    return {fqn for fqn, block in blocks.items() if any(_is_copy(part, block) for part in new)}


def _is_copy(part: nn.Module, block: nn.Module) -> bool:
    shapes = [{name: p.shape for name, p in own.named_parameters()} for own in (part, block)]
    return type(part) is type(block) and shapes[0] == shapes[1]
