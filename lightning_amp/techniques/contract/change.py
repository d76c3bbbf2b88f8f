"""Define `Change`, which a technique returns, and which `install` carries out and can undo."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lightning_amp.techniques.contract.sharded_parameter import ShardedParameter


@dataclass(frozen=True, slots=True)
class Change:
    """Replacements, and what the gradients' reduction and the checkpoint must know of them.

    Attributes:
        swaps: New modules by their name relative to the rule's module; "" is that module itself.
        partial: Parameters of which every rank of the model axis computes a part of the gradient; the loss reaches them
            through `collectives.leave`, or another node that says on which side it is (ranks/check_region.py).
        sharded: Parameters that the new modules hold a shard of, in place of the whole.
        forwards: What modules that stay run instead of their class's `forward`, by their name as in `swaps`; called as
            `forward(module, *args, **kwargs)`. One with a `position` runs around what others compute
            (footprint/forward_overrides.py). One with a method `installed_at(fqn, plans)` is given the block's name and
            a dictionary that all blocks of the model share. It can be copied with the module, and pickled.
        methods: What the rule's module runs instead of other methods of its class, by their name; called as
            `method(module, *args, **kwargs)`.
    """

    swaps: Mapping[str, nn.Module]
    partial: Sequence[nn.Parameter] = ()
    sharded: Sequence[ShardedParameter] = ()
    forwards: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    methods: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
