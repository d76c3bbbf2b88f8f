"""Put a plan's rules into a module: resolve every rule first, change the module second, refuse the rest.

A technique is a function `(module, fqn, spec, mesh) -> replacement` found by the type of the rule's spec. It returns
a new module that owns the same parameter objects under the same names; installing swaps it in under the old name,
and undoing puts the old module back.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp.errors import InstallError, PlanError
from lightning_amp.parallel.chunked_attention import chunk_attention
from lightning_amp.parallel.key_first import key_first
from lightning_amp.planning.plan import Plan, Rule
from lightning_amp.planning.specs import (
    BalanceCells,
    ChunkedAttention,
    DataParallel,
    KeyFirstDecode,
    ShareBatchStatistics,
)
from lightning_amp.planning.strategies import STRATEGIES

Technique = Callable[[nn.Module, Any, DeviceMesh | None], nn.Module]

BY_STRATEGY = (DataParallel, ShareBatchStatistics, BalanceCells)
"""Carried out by the Lightning strategy itself: gradients, batch statistics and the sampler, not a module swap."""

_TECHNIQUES: dict[type, Technique] = {}


def register(spec: type, technique: Technique) -> None:
    """Let rules with this type of spec be installed by `technique`.

    Raises:
        PlanError: A technique for that type is registered already.
    """
    if spec in _TECHNIQUES:
        raise PlanError(f"a technique for {spec.__name__!r} is registered already: {_TECHNIQUES[spec]!r}")
    _TECHNIQUES[spec] = technique


register(
    ChunkedAttention, lambda old, spec, mesh: chunk_attention(old, buckets=spec.buckets, retain=spec.retain)
)
register(KeyFirstDecode, lambda old, spec, mesh: key_first(old))


@dataclass(frozen=True, kw_only=True, slots=True)
class Swap:
    """One replacement: `parent.name` is `old` before and `new` after."""

    parent: nn.Module
    name: str
    fqn: str
    old: nn.Module
    new: nn.Module


class Installed:
    """The swaps of one plan; `undo` restores the module, in the reverse order, and may be called twice."""

    def __init__(self, swaps: list[Swap]) -> None:
        self.swaps = tuple(swaps)
        for swap in swaps:
            swap.parent._modules[swap.name] = swap.new

    def undo(self) -> None:
        """Put the modules back that were there before."""
        for swap in reversed(self.swaps):
            swap.parent._modules[swap.name] = swap.old


def install(module: nn.Module, plan: Plan, mesh: DeviceMesh | None = None) -> Installed:
    """Carry out a plan's rules on a module.

    Args:
        module: The LightningModule.
        plan: The plan.
        mesh: Device mesh with the axes "data" and "model"; None on one device.

    Raises:
        PlanError: A rule needs a technique that this version cannot install.
        InstallError: A rule matches nothing, two rules claim one module, or a technique refuses a module. The module
            is unchanged.
    """
    rules = [rule for rule in plan.rules if not isinstance(rule.spec, BY_STRATEGY)]
    for rule in rules:
        if type(rule.spec) not in _TECHNIQUES:
            raise PlanError(_not_built(rule, plan))
    names = dict(module.named_modules())
    swaps: dict[str, Swap] = {}
    for rule in rules:
        matches = [fqn for fqn in names if fqn and fnmatchcase(fqn, rule.fqn)]
        if not matches:
            raise InstallError(
                f"{rule.strategy} is to change {rule.fqn!r}, which matches no module of"
                f" {type(module).__name__}; its children are {[name for name, _ in module.named_children()]!r}"
            )
        for fqn in matches:
            if fqn in swaps:
                raise InstallError(
                    f"{fqn!r} is claimed by two rules, the second is {rule.strategy} ({rule.fqn!r})"
                )
            parent, _, name = fqn.rpartition(".")
            new = _TECHNIQUES[type(rule.spec)](names[fqn], rule.spec, mesh)
            swaps[fqn] = Swap(parent=names[parent], name=name, fqn=fqn, old=names[fqn], new=new)
    return Installed(list(swaps.values()))


def _not_built(rule: Rule, plan: Plan) -> str:
    title = STRATEGIES[rule.strategy].title if rule.strategy in STRATEGIES else type(rule.spec).__name__
    possible = [
        s for s in plan.strategies if any(r.strategy == s and type(r.spec) in _TECHNIQUES for r in plan.rules)
    ]
    return (
        f"{rule.strategy} ({title}) is prescribed for {rule.fqn!r} ({rule.why}), but this version has no"
        f" installer for it; train with strategies={','.join(['S1', *possible])!r} or give the devices more memory"
    )
