"""Find the blocks of a module: those that the user names, else the children of its containers."""

import pkgutil
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from lightning_amp._torch import is_compiled
from lightning_amp.errors import PlanError

MARK = "_lightning_amp_block"
"""Attribute of a named block: so copies of a module, and modules inside of it, have the same blocks."""


def find_blocks(module: nn.Module) -> dict[str, nn.Module]:
    """Blocks by name: the named ones where there are any, else the children of the outermost containers.

    Containers are ModuleList, Sequential, and of a ModuleDict the children whose class occurs twice: it often holds a
    model's different parts (embedding, list of layers, head), which are no blocks. A module is no block of itself, and
    what lies in a compiled module is none: compiled code would not follow what is installed there.
    """
    found = {fqn: child for fqn, child in module.named_modules() if fqn and MARK in vars(child)}
    if found:
        return found

    def walk(fqn: str, parent: nn.Module, listed: bool) -> None:
        if is_compiled(parent):
            return
        kinds: Counter[type[nn.Module]] = Counter()
        if isinstance(parent, nn.ModuleDict):
            # a dictionary is never called, so that one in a list is no block, and its children are
            kinds.update(type(child) for child in parent.children() if any(True for _ in child.children()))
        else:
            listed = isinstance(parent, nn.ModuleList | nn.Sequential)
        for name, child in parent.named_children():
            inner = f"{fqn}.{name}" if fqn else name
            container = isinstance(child, nn.ModuleList | nn.ModuleDict)
            if (listed or kinds[type(child)] > 1) and not container:
                found.setdefault(inner, child)
            else:
                walk(inner, child, listed)

    walk("", module, False)
    return found


def owners(module: nn.Module) -> dict[str, nn.Module]:
    """The modules inside of a module that have blocks and are none, by name, the outer ones first."""
    blocks = find_blocks(module)
    return {
        fqn: child
        for fqn, child in module.named_modules()
        if fqn
        and not isinstance(child, nn.ModuleList | nn.ModuleDict)
        and any(name.startswith(f"{fqn}.") for name in blocks)
    }


@contextmanager
def named_blocks(module: nn.Module, entries: Sequence[type | str] | None) -> Iterator[None]:
    """Let the blocks of a module be those that match some entries, for as long as this lasts; None changes nothing.

    An entry is a class, its path as text, or a name or pattern in the sense of fnmatch. Of modules that contain each
    other the outer one is the block.

    Raises:
        PlanError: An entry matches nothing, or only what lies in blocks of other entries.
    """
    blocks: dict[str, nn.Module] = {}
    if entries is not None:
        check_entries(entries)
        modules = {fqn: child for fqn, child in module.named_modules() if fqn}
        matches = {entry: _matches(modules, entry) for entry in entries}
        every = {fqn for fqns in matches.values() for fqn in fqns}
        blocks = {fqn: modules[fqn] for fqn in modules if fqn in every and not _outside(fqn, every)}
        for entry, fqns in matches.items():
            if not fqns:
                raise PlanError(
                    f"blocks={entries!r} was given, and {entry!r} matches no submodule of {type(module).__name__!r};"
                    f" it has {', '.join(sorted({type(child).__name__ for child in modules.values()}))} as"
                    f" {', '.join(name for name, _ in module.named_children())}: give a class, its path, or a name or"
                    " pattern of submodules"
                )
            if blocks.keys().isdisjoint(fqns):
                around = sorted({_outside(fqn, every) for fqn in fqns})
                raise PlanError(
                    f"blocks={entries!r} was given, and {entry!r} matches only what lies in other blocks"
                    f" ({', '.join(around)}); a block is computed again as a whole: leave one of the two out"
                )
    for block in blocks.values():
        vars(block)[MARK] = True
    try:
        yield
    finally:
        for block in blocks.values():
            vars(block).pop(MARK, None)


def check_entries(entries: Any) -> None:
    """Refuse, with a PlanError, what is no list of classes and names."""
    listed = isinstance(entries, list | tuple) and len(entries) > 0
    if not listed or not all(isinstance(entry, type) or (isinstance(entry, str) and entry) for entry in entries):
        raise PlanError(
            f"blocks={entries!r} was given; allowed is a list of classes of modules and of names or patterns of"
            " submodules, such as ['decoder.*', 'my.module.Res'], or None"
        )


def refuse_uncalled(module: nn.Module, called: set[str]) -> None:
    """Refuse, with a PlanError, named blocks that a step does not call."""
    for fqn, block in find_blocks(module).items():
        if MARK in vars(block) and fqn not in called:
            raise PlanError(
                f"blocks= names {fqn!r} ({type(block).__name__}), and {fqn!r} is never called with gradients by the"
                f" step; of the named ones it calls {', '.join(sorted(called)) or 'none'}: name modules whose forward"
                " the step runs, rather than a list of them or one that is only read"
            )


def _matches(modules: dict[str, nn.Module], entry: type | str) -> list[str]:
    kind = entry
    if isinstance(entry, str):
        if found := [fqn for fqn in modules if fnmatchcase(fqn, entry)]:
            return found
        try:
            kind = pkgutil.resolve_name(entry) if "." in entry else entry
        except (ImportError, AttributeError, ValueError):
            return []
    return [fqn for fqn, child in modules.items() if isinstance(kind, type) and isinstance(child, kind)]


def _outside(fqn: str, names: set[str]) -> str:
    """The outermost of some names that a name lies in; "" where there is none."""
    parts = fqn.split(".")
    return next((outer for n in range(1, len(parts)) if (outer := ".".join(parts[:n])) in names), "")


def blocks_with_own_parameters(module: nn.Module) -> dict[str, nn.Module]:
    """The blocks of a module whose parameters nothing else uses, by name, in the order of the module."""

    def uses(within: nn.Module) -> Counter[int]:
        return Counter(id(p) for child in within.modules() for p in child._parameters.values() if p is not None)

    every = uses(module)
    return {
        fqn: block
        for fqn, block in find_blocks(module).items()
        # a number cannot be split
        # as many uses within the block as in the whole module: nothing else has the parameter
        if any(p.dim() for p in block.parameters()) and uses(block).items() <= every.items()
    }


def longest_list(module: nn.Module) -> tuple[str, int] | None:
    """Name and length of the longest ModuleList or Sequential of two modules and more; None where there is none.

    Lists that are there several times under names that differ in numbers only are parts of blocks, and are no blocks.
    Those of a compiled module do not count.
    """
    compiled = {id(part) for child in module.modules() if is_compiled(child) for part in child.modules()}
    lists = {
        name: len(child)
        for name, child in module.named_modules()
        if name and isinstance(child, nn.ModuleList | nn.Sequential) and len(child) > 1 and id(child) not in compiled
    }
    alike = Counter(re.sub(r"\d+", "*", name) for name in lists)
    once = {name: n for name, n in lists.items() if alike[re.sub(r"\d+", "*", name)] == 1}
    return max(once.items(), key=lambda item: item[1], default=None)
