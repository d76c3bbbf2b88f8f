"""Keep the changes that a plan has made in a module, so that they can be undone."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import nn

from lightning_amp.footprint.forward_overrides import Override, Position, add_override, remove_override
from lightning_amp.techniques.contract.change import Change, check_forwards, check_hooks, check_parameters
from lightning_amp.techniques.contract.protocol import part
from lightning_amp.techniques.contract.sharded_parameter import ShardedParameter
from lightning_amp.techniques.put_methods import put_methods


@dataclass(frozen=True, kw_only=True, slots=True)
class Swap:
    """One replacement: `parent.name` is `old` before and `new` after."""

    parent: nn.Module
    name: str
    fqn: str
    old: nn.Module | None
    new: nn.Module

    def put(self) -> None:
        """Carry it out."""
        self.parent._modules[self.name] = self.new

    def take(self) -> None:
        """Undo it."""
        self.parent._modules[self.name] = self.old


@dataclass(frozen=True, kw_only=True, slots=True)
class Overridden:
    """A module that stays, with one more override of its forward."""

    module: nn.Module
    fqn: str
    override: Override

    def put(self) -> None:
        """Carry it out; an InstallError where the module has another one in its place."""
        add_override(self.fqn, self.module, self.override)

    def take(self) -> None:
        """Undo it."""
        remove_override(self.module, self.override)


@dataclass(kw_only=True, slots=True)
class Methods:
    """A module that stays, with other functions in the places of some of its methods, by name."""

    module: nn.Module
    fqn: str
    functions: Mapping[str, Callable[..., Any]]
    take: Callable[[], None] = lambda: None
    """Undo it."""

    def put(self) -> None:
        """Carry it out."""
        methods = {name: MethodType(function, self.module) for name, function in self.functions.items()}
        self.take = put_methods(self.module, methods)


class Installed:
    """What was installed.

    Attributes:
        changes: In order.
        partial: Parameters of which every rank of the model axis has a part of the gradient: they need one sum; each of
            them is there once.
        sharded: Parameters that were replaced by this rank's shard.
    """

    def __init__(self, chunk_plans: Any = None) -> None:
        self.changes: list[Swap | Overridden | Methods] = []
        self._chunk_plans = {} if chunk_plans is None else chunk_plans
        self.partial: list[nn.Parameter] = []
        self.sharded: list[ShardedParameter] = []

    @property
    def swaps(self) -> list[Swap]:
        """The replacements."""
        return [change for change in self.changes if isinstance(change, Swap)]

    @property
    def overridden(self) -> list[Overridden]:
        """The modules that stay and run something else than their class's `forward`."""
        return [change for change in self.changes if isinstance(change, Overridden)]

    def undo(self) -> None:
        """Put the modules back that were there before; may be called twice."""
        while self.changes:
            self.changes.pop().take()

    def take_out(self, names: Sequence[str]) -> "Installed":
        """Undo what lies in some modules; returns it, for `put_back`."""
        taken = Installed()
        taken.changes = [change for change in self.changes if lies_in(change.fqn, names)]
        self.changes = [change for change in self.changes if not lies_in(change.fqn, names)]
        for change in reversed(taken.changes):
            change.take()
        return taken

    def put_back(self, taken: "Installed") -> None:
        """Put in again what was taken out."""
        for change in taken.changes:
            change.put()
        self.add(taken)

    def add(self, other: "Installed") -> None:
        """Count what another one has installed in the same module as of this one; its parameters are known here."""
        self.changes += other.changes

    @contextmanager
    def aside(self) -> Iterator[None]:
        """The modules that were there before, for as long as the block lasts."""
        for change in reversed(self.changes):
            change.take()
        try:
            yield
        finally:
            for change in self.changes:
                change.put()

    def apply(self, fqn: str, change: Change, module: nn.Module, *, strategy: str) -> None:
        """Carry out one technique's change of the module `fqn`."""
        for relative, new in change.swaps.items():
            path = ".".join(part for part in (fqn, relative) if part)
            parent_name, _, name = path.rpartition(".")
            parent = part(module, parent_name)
            check_parameters(path, parent._modules.get(name), new, change.sharded)
            check_hooks(path, parent._modules[name])
            check_forwards(path, parent._modules[name], new, strategy)
            self._carry_out(Swap(parent=parent, name=name, fqn=path, old=parent._modules[name], new=new))
        for relative, run in change.forwards.items():
            path = ".".join(part for part in (fqn, relative) if part)
            if (installed_at := getattr(run, "installed_at", None)) is not None:
                installed_at(path, self._chunk_plans)
            override = Override(strategy, run, getattr(run, "position", Position.INSTEAD))
            self._carry_out(Overridden(module=part(module, path), fqn=path, override=override))
        if change.methods:
            self._carry_out(Methods(module=part(module, fqn), fqn=fqn, functions=change.methods))
        # strata may share a parameter
        self.partial = list({id(p): p for p in (*self.partial, *change.partial)}.values())
        self.sharded += change.sharded

    def _carry_out(self, change: Swap | Overridden | Methods) -> None:
        change.put()
        self.changes.append(change)


def lies_in(fqn: str, names: Iterable[str]) -> bool:
    """Whether a name or pattern is for one of some modules, or for what lies in them."""
    return any(f"{fqn}.".startswith(f"{name}.") for name in names)
