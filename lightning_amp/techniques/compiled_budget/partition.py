"""Partition joint graphs within an activation memory budget; no random number is drawn a second time.

With a budget below 1, torch 2.13's partitioner may compute an operator again that draws random numbers (dropout). The
backward graph then draws others than the forward graph, and gradients are wrong without a word. So results of these
operators are marked as kept, unless a checkpoint of the user marked them already, for which torch restores the random
state. A budget of 0 ignores such marks, and is not used.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

from lightning_amp.holding import replacing
from lightning_amp.techniques.compiled_budget._torch import functorch_parts


@contextmanager
def partitioned_within(share: float) -> Iterator[None]:
    """Partition graphs that are compiled in this block with a budget of 0 < `share` <= 1."""
    config, partitioners = functorch_parts()
    choose = partitioners.choose_saved_values_set

    def chosen(graph: torch.fx.Graph, *args: Any, **named: Any) -> Any:
        for node in graph.nodes:
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)
        return choose(graph, *args, **named)

    with config.patch(activation_memory_budget=share), replacing(partitioners, choose_saved_values_set=chosen):
        yield
