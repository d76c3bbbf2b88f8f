"""What a module runs in place of its class's forward, so that it takes no more than some bytes; and the technique.

The technique `chunk` leaves the module as it is, hooks around it included, and sets what its forward runs.
"""

from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn

from lightning_amp.errors import InstallError, ModelError, PlanError
from lightning_amp.graph.capture import capture, find_blocks
from lightning_amp.graph.guards import signature
from lightning_amp.parallel.chunk.by_blocks import plan_blocks
from lightning_amp.parallel.chunk.planned import Planned, plain, plan_graph
from lightning_amp.parallel.contract.change import Change
from lightning_amp.planning.plan.specs import ChunkBlock

MANY = 8
"""Blocks of several parts above which a module is planned block by block where that keeps it within the budget: blocks
that are alike are planned once, while the time to plan one graph grows with the square of its operators."""
_SHARED: WeakValueDictionary[Any, Planned] = WeakValueDictionary()
"""Plans in use: blocks of one class and signature under one budget are planned once."""


def chunk_block(module: nn.Module, spec: ChunkBlock, mesh: object) -> Change:
    """Let a block of any module run in chunks.

    Args:
        module: Any block; its own parameters and buffers are used as they are when it is called.
        spec: How many bytes it may take.
        mesh: Not looked at: chunks split nothing over ranks.

    Raises:
        InstallError: The budget is no positive number.
    """
    if spec.budget_bytes < 1:
        raise InstallError(
            f"chunk was asked for on {type(module).__name__!r} with budget_bytes={spec.budget_bytes!r}; allowed is a"
            " number of bytes larger than zero"
        )
    return Change({}, forwards={"": InChunks(spec.budget_bytes, train=True)})


class InChunks:
    """Called as `forward(module, *args, **kwargs)`; a copy or pickle of it plans again.

    Args:
        budget_bytes: For one forward pass without gradients.
        train: With gradients, the budget is for forward and backward pass together, what is kept between them included.
    """

    def __init__(self, budget_bytes: int, *, train: bool = False) -> None:
        self._budget_bytes, self._train = budget_bytes, train
        self._known: dict[Any, Planned] = {}

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """What the module returns; a call of a new signature is planned first."""
        return self.planned(module, args, kwargs).run(module, args, kwargs)

    def planned(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Planned:
        """The plan of a call; made for the first of its signature.

        Raises:
            PlanError: The budget cannot be met.
            ModelError: The module cannot be captured.
        """
        own = plain(module)
        key = signature(own, args, kwargs)
        if key not in self._known:
            shared = (self._budget_bytes, self._train, key)
            found = _SHARED.get(shared) or self._plan(own, args, kwargs, key)
            self._known[key] = _SHARED[shared] = found
        return self._known[key]

    def _plan(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], key: Any) -> Planned:
        with_gradients = torch.is_grad_enabled()
        # tensors of inference mode count no changes, by which a capture sees what a forward changes in place
        with torch.inference_mode(False), torch.set_grad_enabled(with_gradients):
            train = self._train and with_gradients
            n_blocks = sum(any(True for _ in block.children()) for block in find_blocks(module).values())
            if n_blocks > MANY and not train:
                reason = f"it has {n_blocks!r} blocks, which are planned one by one"
                with suppress(PlanError, ModelError):
                    return plan_blocks(module, args, kwargs, self._budget_bytes, reason)
            found = capture(module, args, kwargs, key=key)
            if found.graph is not None:
                return plan_graph(found, self._budget_bytes, train=train)
            if train:
                raise ModelError(
                    f"chunk was asked for on {type(module).__name__!r} in training, which cannot be captured:"
                    f" {found.reason}; name its blocks in the rule, or leave chunk out"
                )
            return plan_blocks(module, args, kwargs, self._budget_bytes, found.reason)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_known": {}}
