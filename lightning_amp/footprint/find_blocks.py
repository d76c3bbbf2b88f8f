"""Find the blocks of a module: the submodules that the user names, or else the children of its containers."""

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
"""Attribute that marks a named block, so that copies of a module and its submodules have the same blocks."""


def find_blocks(module: nn.Module) -> dict[str, nn.Module]:
    """Return blocks by name: the named ones if there are any, else the children of the outermost containers.

    Containers are ModuleList, Sequential and ModuleDict. A ModuleDict often holds different parts of a model
    (embedding, list of layers, head): only its children with submodules, whose class occurs twice, are blocks. The
    module itself is no block, nor are submodules of a compiled module, because compiled code ignores overrides.
    """
    found = {fqn: child for fqn, child in module.named_modules() if fqn and MARK in vars(child)}
    if found:
        return found

    def walk(fqn: str, parent: nn.Module, listed: bool) -> None:
        if is_compiled(parent):
            return
        kinds: Counter[type[nn.Module]] = Counter()
        if isinstance(parent, nn.ModuleDict):
            # a ModuleDict is never called, so one in a list is not a block, but its children may be
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


@contextmanager
def named_blocks(module: nn.Module, entries: Sequence[type | str] | None) -> Iterator[None]:
    """Set the blocks of a module to those that match `entries` while the context is entered; None changes nothing.

    An entry is a class, its path as a string, or a name or fnmatch pattern. If matches are nested, the outer one is the
    block.

    Raises:
        PlanError: An entry matches nothing, or only submodules of other blocks.
    """
    blocks: dict[str, nn.Module] = {}
    if entries is not None:
        check_entries(entries)
        modules = {fqn: child for fqn, child in module.named_modules() if fqn}
        matches = {entry: _matches(modules, entry) for entry in entries}
        every = {fqn for fqns in matches.values() for fqn in fqns}
        # of nested matches, only the outermost is a block
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
    """Raise a PlanError unless `entries` is a list of classes and names."""
    listed = isinstance(entries, list | tuple) and len(entries) > 0
    if not listed or not all(isinstance(entry, type) or (isinstance(entry, str) and entry) for entry in entries):
        raise PlanError(
            f"blocks={entries!r} was given; allowed is a list of classes of modules and of names or patterns of"
            " submodules, such as ['decoder.*', 'my.module.Res'], or None"
        )


def refuse_uncalled(module: nn.Module, called: set[str]) -> None:
    """Raise a PlanError for named blocks that a step does not call."""
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
    """Return the outermost of `names` that contains `fqn`; "" if there is none."""
    parts = fqn.split(".")
    return next((outer for n in range(1, len(parts)) if (outer := ".".join(parts[:n])) in names), "")


def blocks_with_own_parameters(module: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks whose parameters are used nowhere else, by name, in module order."""

    def uses(within: nn.Module) -> Counter[int]:
        return Counter(id(p) for child in within.modules() for p in child._parameters.values() if p is not None)

    every = uses(module)
    return {
        fqn: block
        for fqn, block in find_blocks(module).items()
        # 0-dim parameters cannot be sharded; equal numbers of uses in block and module: nothing else uses the parameter
        if any(p.dim() for p in block.parameters()) and uses(block).items() <= every.items()
    }


def longest_list(module: nn.Module) -> tuple[str, int] | None:
    """Return name and length of the longest ModuleList or Sequential with at least two modules; None if there is none.

    Lists whose names differ only in numbers are parts of blocks, and are ignored, as are lists in a compiled module.
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
