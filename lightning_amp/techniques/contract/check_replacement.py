"""Check what every replacement of a module must keep: the parameters, hooks, and an overridden `forward`."""

from collections.abc import Sequence

from torch import nn

from lightning_amp.errors import InstallError
from lightning_amp.footprint.forward_overrides import overrides_of
from lightning_amp.techniques.contract.hooks import hooks_within
from lightning_amp.techniques.contract.sharded_parameter import ShardedParameter


def check_parameters(
    fqn: str, old: nn.Module | None, new: nn.Module, sharded: Sequence[ShardedParameter]
) -> None:
    """Optimisers and checkpoints find parameters by object and by name: a replacement keeps both."""
    if old is None:
        raise InstallError(
            f"a technique cannot replace {fqn!r}, which is no module; allowed are the rule's module and its"
            " children"
        )
    shards = {id(parameter.whole): parameter.shard for parameter in sharded}
    named = old.named_parameters(remove_duplicate=False)
    before = {name: id(shards.get(id(parameter), parameter)) for name, parameter in named}
    after = {name: id(parameter) for name, parameter in new.named_parameters(remove_duplicate=False)}
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    if changed:
        raise InstallError(
            f"{type(new).__name__!r} cannot replace {fqn!r}, because it does not own the same "
            f"parameters: {changed!r} differ; a replacement keeps the parameter objects and their "
            "names, or lists a shard in Change.sharded"
        )


def check_hooks(fqn: str, old: nn.Module | None) -> None:
    """A replacement may not call the module at all, or with a part of what it would see."""
    found = hooks_within(old) if old is not None else []
    if found:
        raise InstallError(
            f"{fqn!r} cannot be replaced: it has {', '.join(found)}, which would see a part of its "
            "values or nothing; register hooks on the decoder or its strata instead, or remove the "
            "rule from the plan"
        )


def check_forwards(fqn: str, old: nn.Module | None, new: nn.Module, strategy: str) -> None:
    """A `forward` set on an instance calls that instance: in a replacement it would run what was replaced."""
    kept = set(new.modules())
    for name, part in old.named_modules() if old is not None else ():
        if "forward" in vars(part) and part not in kept:
            where = f"{fqn}.{name}" if name else fqn
            who = ", ".join(one.strategy for one in overrides_of(part) or ())
            raise InstallError(
                f"{strategy} cannot replace {fqn!r}: the `forward` of {where!r} is set on the instance by"
                f" {who or repr(vars(part)['forward'])}, which the replacement would not run; leave it as"
                f" its class has it, or leave {strategy} out"
            )
