"""Install a plan's rules in a module, in the order of the plan; if one raises, all are undone.

A technique is a function `(module, spec, mesh) -> Change`, selected by the type of the rule's spec. It returns new
modules that replace the module or its children, and have the same parameter objects under the same names, which is
checked. A module returned by itself replaces the old module. Techniques stack, because each one gets the
modules that earlier rules have installed: S5 replaces the attention inside S3's chunks and the decode left by S4.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate
from types import MethodType
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp.costs.rule import Rule, Spec
from lightning_amp.errors import InstallError, PlanError
from lightning_amp.footprint.forward_overrides import Override, Position, add_override, remove_override
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.sharding.splits import DryAxis, DryMesh
from lightning_amp.techniques.contract.change import Change, check_forwards, check_hooks, check_parameters
from lightning_amp.techniques.contract.protocol import find_decoders, is_decomposed, named_parts, part
from lightning_amp.techniques.contract.sharded_parameter import ShardedParameter
from lightning_amp.techniques.put_methods import put_methods
from lightning_amp.techniques.table import STRATEGIES, installer_of, own_steps
from lightning_amp.techniques.technique import Installer

Mesh = DeviceMesh | DryMesh | DryAxis | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Swap:
    """The replacement of one child module: `parent.name` is `old` before and `new` after."""

    parent: nn.Module
    name: str
    fqn: str
    old: nn.Module | None
    new: nn.Module

    def put(self) -> None:
        """Set the new module."""
        self.parent._modules[self.name] = self.new

    def take(self) -> None:
        """Restore the old module."""
        self.parent._modules[self.name] = self.old


@dataclass(frozen=True, kw_only=True, slots=True)
class Overridden:
    """One more override of a module's forward; the module itself stays."""

    module: nn.Module
    fqn: str
    override: Override

    def put(self) -> None:
        """Add the override; raise an InstallError if another one has its position."""
        add_override(self.fqn, self.module, self.override)

    def take(self) -> None:
        """Remove the override."""
        remove_override(self.module, self.override)


@dataclass(kw_only=True, slots=True)
class Methods:
    """Replacements of some methods of a module, by name; the module itself stays."""

    module: nn.Module
    fqn: str
    functions: Mapping[str, Callable[..., Any]]
    removed: Callable[[], None]
    _restore: Callable[[], None] = lambda: None

    def put(self) -> None:
        """Replace the methods."""
        methods = {name: MethodType(function, self.module) for name, function in self.functions.items()}
        self._restore = put_methods(self.module, methods)

    def take(self) -> None:
        """Restore the methods."""
        self._restore()
        self.removed()


class Installed:
    """The installed changes of a module.

    Attributes:
        changes: In order of installation.
        partial: Parameters with a partial gradient on every model rank, which must be summed; without duplicates.
        sharded: Parameters that were replaced by this rank's shard.
    """

    def __init__(self, chunk_plans: Any = None) -> None:
        self.changes: list[Swap | Overridden | Methods] = []
        self._chunk_plans = {} if chunk_plans is None else chunk_plans
        self.partial: list[nn.Parameter] = []
        self.sharded: list[ShardedParameter] = []

    @property
    def swaps(self) -> list[Swap]:
        """Changes that replace a module."""
        return [change for change in self.changes if isinstance(change, Swap)]

    @property
    def overridden(self) -> list[Overridden]:
        """Changes that override a module's forward."""
        return [change for change in self.changes if isinstance(change, Overridden)]

    def partial_names(self, module: nn.Module) -> list[str]:
        """Return the names of `partial` in the module."""
        ids = set(map(id, self.partial))
        return [name for name, parameter in module.named_parameters() if id(parameter) in ids]

    def undo(self) -> None:
        """Restore the original modules; repeated calls are allowed."""
        while self.changes:
            self.changes.pop().take()

    def take_out(self, names: Sequence[str]) -> None:
        """Undo the changes inside the named modules."""
        taken = [change for change in self.changes if lies_in(change.fqn, names)]
        self.changes = [change for change in self.changes if not lies_in(change.fqn, names)]
        for change in reversed(taken):
            change.take()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Restore the original modules inside the `with` block."""
        for change in reversed(self.changes):
            change.take()
        try:
            yield
        finally:
            for change in self.changes:
                change.put()

    def apply(self, fqn: str, change: Change, module: nn.Module, *, strategy: str) -> None:
        """Install one technique's change of the module `fqn`."""
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
            of = part(module, fqn)
            self._carry_out(Methods(module=of, fqn=fqn, functions=change.methods, removed=change.removed))
        # without duplicates, because strata may share a parameter
        self.partial = list({id(p): p for p in (*self.partial, *change.partial)}.values())
        self.sharded += change.sharded

    def _carry_out(self, change: Swap | Overridden | Methods) -> None:
        change.put()
        self.changes.append(change)


def lies_in(fqn: str, names: Iterable[str]) -> bool:
    """Whether a name or pattern refers to one of the named modules, or to modules inside them."""
    return any(f"{fqn}.".startswith(f"{name}.") for name in names)


BY_STRATEGY = (
    *STRATEGIES["S1"].specs,
    *(spec for row in STRATEGIES.values() if row.data_axis or row.steps for spec in row.specs),
)
"""Specs that the Lightning strategy applies itself, without replacing modules: gradient averaging, batch statistics,
sampler, parameters sharded over the data axis, and steps that replace the module's."""


def change_of(module: nn.Module, spec: Any, mesh: Mesh, *, strategy: str, fqn: str = "") -> Change:
    """Return one technique's change of one module, after checking general requirements; nothing is installed yet.

    Args:
        module: The module of the rule.
        spec: A spec whose type has a technique.
        strategy: Name of the rule's technique, for messages.
        fqn: Name of the module, for messages.

    Raises:
        InstallError: The technique requires a mesh or a decoder, or does not support the module.
    """
    row, installer = STRATEGIES[strategy], installer_of(type(spec))
    assert installer is not None, f"{type(spec).__name__} has no installer, which install has checked"
    # a registered technique may work without ranks
    if row.model_axis and mesh is None and not row.registered:
        raise InstallError(
            f"{strategy} requires several devices, found no mesh; it splits {row.shrinks} over the ranks of"
            f" a model axis: set model_parallel_size to 2 or more, or leave {strategy} out"
        )
    if installer.on_decoder and not is_decomposed(module):
        raise InstallError(
            f"{strategy} does not support {type(module).__name__!r}, which is no decomposed decoder"
            f" (`strata`, `chained`, `n_anchors`, `dim`); name the decoder in the rule, or leave {strategy}"
            " out"
        )
    made = installer.load()(module, spec, mesh)
    if isinstance(made, nn.Module):
        return Change({"": made})
    if not isinstance(made, Change):
        raise InstallError(
            f"the technique of {strategy} returned {made!r} for {fqn!r}; allowed are a module and a Change"
        )
    return made


def install(module: nn.Module, plan: Plan, mesh: Mesh = None, *, within: Sequence[str] | None = None) -> Installed:
    """Install a plan's rules in a module.

    Args:
        mesh: Mesh with the axes "data" and "model"; None on one device.
        within: Names of modules: install only rules for these and for modules inside them; None installs all rules.

    Raises:
        PlanError: A rule requires a technique that is not registered in this process.
        InstallError: A rule matches no module, two rules of one strategy match the same module, or a technique does
            not support a module. The module is unchanged.
    """
    rules = [
        rule
        for rule in plan.rules
        if not isinstance(rule.spec, BY_STRATEGY) and (within is None or lies_in(rule.fqn, within))
    ]
    for rule in rules:
        if rule.strategy not in STRATEGIES:
            raise PlanError(
                f"the plan has {rule.strategy} ({type(rule.spec).__name__}) for {rule.fqn!r} "
                f"({rule.why}), and this process has not registered it; call register_technique in a "
                "module that every rank imports"
            )
    return install_rules(module, rules, mesh)


def install_rules(module: nn.Module, rules: Iterable[Rule], mesh: Mesh = None, chunks: Any = None) -> Installed:
    """Install rules that have techniques, as `install` does; if one raises, the module is unchanged.

    `mesh`: as in `install`, or the model axis of a dry run alone.
    `chunks`: dictionary that caches plans of chunks, for rules installed in the module later.
    """
    targets = [(rule, fqn) for rule in rules for fqn in matched_names(rule, module)]
    # a stable sort: rules with equal `last` keep the order of the plan
    targets.sort(key=lambda target: _installer(target[0]).last)
    claimed: set[tuple[str, type]] = set()
    decoders = list(find_decoders(module))
    for rule, fqn in targets:
        if (fqn, type(rule.spec)) in claimed:
            raise InstallError(
                f"two rules of the plan change {fqn!r}, the second is {rule.strategy} ({rule.fqn!r}); "
                "remove one of them"
            )
        claimed.add((fqn, type(rule.spec)))
        overlaps = any(overlap(fqn, decoder) for decoder in decoders)
        if overlaps and _installer(rule).on_blocks:
            raise InstallError(
                f"{rule.strategy} does not support the block {fqn!r}, which is a part of the decoder"
                f" {', '.join(map(repr, decoders))} or holds it: its strata have separate techniques; name"
                " blocks outside of it"
            )
    installed = Installed(chunks)
    try:
        for rule, fqn in targets:
            # looked up for every rule, because an earlier rule may have replaced the module
            change = change_of(part(module, fqn), rule.spec, mesh, strategy=rule.strategy, fqn=fqn)
            installed.apply(fqn, change, module, strategy=rule.strategy)
        _refuse_shared(module, installed)
    except BaseException:
        installed.undo()
        raise
    return installed


def overlap(fqn: str, other: str) -> bool:
    """Whether two modules are the same, or one is inside the other."""
    return lies_in(fqn, [other]) or lies_in(other, [fqn])


def _refuse_shared(module: nn.Module, installed: Installed) -> None:
    """Raise for a sharded parameter with another use: it would become two parameters that train separately."""
    if not installed.sharded:
        return
    shards = {id(parameter.shard) for parameter in installed.sharded}
    names = {id(p): fqn for fqn, p in module.named_parameters() if id(p) not in shards}
    uses = {key: f"the module uses it as {fqn!r} too" for key, fqn in names.items()}
    # both attributes are checked, because the decoder's rule may come first or last
    uses |= dict.fromkeys(map(id, installed.partial), "its layer lies in a decoder that is split already")
    for parameter in installed.sharded:
        use = uses.get(id(parameter.whole)) or uses.get(id(parameter.shard))
        if use:
            raise InstallError(
                f"the layer's {parameter.name!r} cannot be split over ranks: {use}, which would be "
                "trained separately; remove the layer's rule from the plan"
            )
        uses[id(parameter.whole)] = "another layer that the plan splits has it too"


def _installer(rule: Rule) -> Installer:
    found = installer_of(type(rule.spec))
    assert found is not None, f"{type(rule.spec).__name__} has no installer, which install has checked"
    return found


def matched_names(rule: Rule, module: nn.Module) -> list[str]:
    """Return the names of modules that a rule changes; raise an InstallError if there are none."""
    if not rule.fqn:
        return [""]
    matches = [fqn for fqn, _ in named_parts(module) if fqn and fnmatchcase(fqn, rule.fqn)]
    if not matches:
        raise InstallError(
            f"{rule.strategy} cannot change {rule.fqn!r}, which matches no module of"
            f" {type(module).__name__}; its children are {[name for name, _ in module.named_children()]!r}"
        )
    if _installer(rule).on_blocks:
        # a pattern such as "blocks.*" also matches modules inside blocks; outer modules come first
        outer: set[str] = set()
        for fqn in matches:
            if outer.isdisjoint(accumulate(fqn.split("."), "{}.{}".format)):
                outer.add(fqn)
        matches = [fqn for fqn in matches if fqn in outer]
    return matches


def install_steps(module: LightningModule, name: str, spec: Spec, mesh: Any) -> Callable[[], None]:
    """Replace a module's steps by those of a technique; return an undo."""
    changed: dict[str, Any] = own_steps(name).load().install(module, spec, mesh)
    return put_methods(module, changed)
