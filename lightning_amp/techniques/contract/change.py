"""Define `Change`, which a technique returns, and check what every replacement of a module must keep."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from lightning_amp.errors import InstallError
from lightning_amp.footprint.forward_overrides import hooked, overrides_of
from lightning_amp.techniques.contract.sharded_parameter import ShardedParameter


@dataclass(frozen=True, slots=True)
class Change:
    """Result of an install function: replacements, and parameters with partial gradients or shards.

    Attributes:
        swaps: New modules by their name relative to the rule's module; "" is that module itself.
        partial: Parameters of which every rank of the model axis computes a partial gradient. The loss reaches them
            through `collectives.leave`, or another node that declares on which side it is (ranks/sharded_region.py).
        sharded: Parameters of which the new modules hold only a shard.
        forwards: Replacements of `forward` of modules that are not swapped, by module name as in `swaps`; called as
            `forward(module, *args, **kwargs)`. A replacement with a `position` wraps the overrides of other techniques
            (footprint/forward_overrides.py). One with a method `installed_at(fqn, plans)` receives the block's name and
            a dictionary that all blocks of the model share. They must support copies and pickle.
        methods: Replacements of other methods of the rule's module, by method name; called as
            `method(module, *args, **kwargs)`.
        removed: Called after the methods are restored.
    """

    swaps: Mapping[str, nn.Module]
    partial: Sequence[nn.Parameter] = ()
    sharded: Sequence[ShardedParameter] = ()
    forwards: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    methods: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    removed: Callable[[], None] = lambda: None


OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def hooks_within(module: nn.Module) -> list[str]:
    """Kinds of module hooks on a module or on modules inside it."""
    return hooked(module.modules())


def hooks_of(parameter: Tensor, name: str = "") -> list[str]:
    """Kinds of hooks on a parameter, each prefixed with the parameter's name."""
    return [f"{name}.{kind.strip('_')}" for kind in OF_PARAMETERS if getattr(parameter, kind)]


def check_parameters(fqn: str, old: nn.Module | None, new: nn.Module, sharded: Sequence[ShardedParameter]) -> None:
    """Check that a replacement keeps parameter objects and names, by which optimisers and checkpoints find them."""
    if old is None:
        raise InstallError(
            f"a technique cannot replace {fqn!r}, which is no module; allowed are the rule's module and its children"
        )
    # a shard counts as the full parameter that it replaces
    shards = {id(parameter.whole): parameter.shard for parameter in sharded}
    # with duplicates: a checkpoint has all names of a tied parameter
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
    """Check for hooks: a replacement might not call the module, or only with a part of its inputs."""
    found = hooks_within(old) if old is not None else []
    if found:
        raise InstallError(
            f"{fqn!r} cannot be replaced: it has {', '.join(found)}, which would see a part of its "
            "values or nothing; register hooks on the decoder or its strata instead, or remove the "
            "rule from the plan"
        )


def check_forwards(fqn: str, old: nn.Module | None, new: nn.Module, strategy: str) -> None:
    """Check for `forward` set on an instance: it would call the replaced module instead of the replacement."""
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
