"""Issue all-gathers and reduce-scatters of parameters in one order on all ranks, overlapped with compute.

    first step    ranks compare each collective before it starts, and record the order
    later steps   ranks follow the recorded order, prefetch parameters, and compare once at the end of the step

A rank that leaves the order, such as in a branch, first completes the recorded collectives with zeros, so that no rank
waits for it. Then the ranks compare where they left the order. If they left it at the same place, they continue as in
a first step; otherwise all of them raise an error.

In addition to the parameters of the current layer, a rank holds: prefetched parameters of at most the bytes of the
largest one; pending gradients of at most `IN_FLIGHT` times these bytes, twice as much on gloo; the factors of at most
`LATEST` deferred weight gradients; and a cache of `cache_bytes`.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_amp.errors import ModelError
from lightning_amp.sharding._torch import in_backward
from lightning_amp.sharding.collectives import LATER, do_later
from lightning_amp.techniques.tensor3d.row import OVERLAP

IN_FLIGHT = 2
"""Bytes of gradients that are reduced at a time, in units of the largest parameter."""
LATEST = 3
"""Most weight gradients that are deferred at a time, such as those of queries, keys and values."""
CHANGES = 2
"""Number of steps that may leave the order; after that many, every step compares each collective."""
GATHERS, ADDS_UP = "gathers", "adds up the gradient of"
STRAY = (
    "loss.backward() or torch.autograd.grad started a backward pass; tensor3d requires that the Trainer starts it,"
    " because the loss is weighted; return the loss from training_step, or train with strategies='S1'"
)


OnGrid = Any
"""A GridParameter (parameters.py); Any, because parameters.py imports this module."""


class InStepCollective(NamedTuple):
    """One collective of one parameter in the order of a step."""

    kind: str
    of: OnGrid
    backward: bool


class InStep:
    """Order, prefetched parameters and pending gradients of a module in one training step.

    Attributes:
        begun: Whether the strategy has started the backward pass, with the weighted loss.
        largest_bytes: Bytes of the largest gathered parameter, the maximum over the ranks.

    Args:
        agree: Collective that is called with a description of the next action; raises if ranks differ.
        overlap: Collectives that overlap with compute, separated by commas (row.py).
        cache_bytes: Bytes of gathered parameters that are kept until the end of the backward pass.
        begun: Initial value of the attribute.
    """

    def __init__(
        self,
        *,
        agree: Callable[[str], None] = lambda what: None,
        overlap: str = OVERLAP,
        cache_bytes: int = 0,
        begun: bool = False,
    ) -> None:
        self._agree, self._overlap, self._cache_bytes = agree, overlap.split(","), cache_bytes
        self.begun, self.largest_bytes = begun, 0
        self._reached: dict[int, nn.Parameter] = {}
        # a step may have several backward passes; each one ends a part of the step
        self._part = "", 0
        self._orders, self._changes = (dict[tuple[str, int], list[InStepCollective]](), Counter[tuple[str, int]]())
        self._order: list[InStepCollective] | None = None
        self._done: list[InStepCollective] = []
        self._at = self._begun_to = 0
        self._ahead = deque[tuple[OnGrid, Callable[[], Tensor]]]()
        self._kept: dict[OnGrid, Tensor] = {}
        self._on_their_way = deque[tuple[OnGrid, Callable[[], Tensor]]]()

    def begin(self, name: str, part: int = 0) -> None:
        """Begin a step, or its next part."""
        self.forget()
        self._part = name, part
        self._order = self._orders.get(self._part) if self._changes[self._part] < CHANGES else None

    def end(self, what: str) -> list[nn.Parameter]:
        """End a part of the step, wait for its gradients, and return the parameters that have one; a collective."""
        do_later()
        self._kept.clear()
        self._leave()
        # after the rest of the order, so that all ranks reach this call; before the gradients are used, because a rank
        # that left the order has added zeros to them
        self._agree(f"{what} after {len(self._done)} collectives")
        self._orders[self._part] = self._done
        self._arrive()
        found = list(self._reached.values())
        self.begin(self._part[0], self._part[1] + 1)
        return found

    def forget(self) -> None:
        """Discard the state of a failed step."""
        for kept in (self._reached, self._kept, self._ahead, self._on_their_way, LATER):
            kept.clear()
        self._done, self._order, self._at, self._begun_to = [], None, 0, 0

    def gather(self, of: OnGrid) -> Tensor:
        """Return the gathered parameter, and cache it if there is room."""
        found = self._kept.get(of)
        if found is not None:
            return found
        self._next(GATHERS, of)
        found = self._gathered(of)
        # without a backward pass nothing reads it again
        if self._part[0] == "training_step" and of.most_bytes <= self._cache_bytes - self._bytes(self._kept):
            self._kept[of] = found
        return found

    def add_up(self, of: OnGrid, grad: Tensor, *, fresh: bool = False) -> None:
        """Start the reduce-scatter of a gathered parameter's gradient; `.grad` of the parameter gets this rank's shard.

        Args:
            of, grad: The parameter, and its gradient.
            fresh: Whether `grad` may be overwritten, because no other code holds it.

        Raises:
            ModelError: The backward pass was not started by the strategy.
        """
        if not self.begun:
            raise ModelError(STRAY)
        self._next(ADDS_UP, of)
        self._arrive(IN_FLIGHT * self.largest_bytes - of.most_bytes)
        self._on_their_way.append((of, of.start_sum(grad, fresh=fresh)))
        if "reduce_scatter" not in self._overlap:
            self._arrive()

    def add_up_later(self, of: OnGrid, compute: Callable[[], Tensor]) -> bool:
        """Defer computing and reducing a gradient until the next all-reduce runs; return False if not possible."""
        if not self.begun or "all_reduce" not in self._overlap:
            return False
        while len(LATER) >= LATEST:
            LATER.pop(0)()
        LATER.append(partial(self._compute, of, compute))
        return True

    def _compute(self, of: OnGrid, compute: Callable[[], Tensor]) -> None:
        # the all-reduce may come from a recomputed block, which runs with autograd and autocast
        with torch.no_grad(), torch.autocast(of.parameter.device.type, enabled=False):
            self.add_up(of, compute(), fresh=True)

    def _next(self, kind: str, of: OnGrid) -> None:
        """Check the next collective against the order, or compare it between the ranks."""
        if self._order is not None:
            if self._at < len(self._order) and self._order[self._at][:2] == (kind, of):
                self._done.append(self._order[self._at])
                self._at += 1
                return
            self._leave()
        self._agree(f"{kind} {of.name!r} after {len(self._done)} collectives")
        self._done.append(InStepCollective(kind, of, in_backward()))

    def _leave(self) -> None:
        """Complete the rest of the order, then stop following it."""
        # other ranks follow the order to its end, and would wait for this rank forever
        order, left = self._order or [], self._at
        while self._at < len(order):
            kind, of, _ = order[self._at]
            self._at += 1
            if kind == GATHERS:
                self._gathered(of)
            else:
                of.start_sum(of.zeros())()
        self._changes[self._part] += left < len(order)
        self._order = None

    def _gathered(self, of: OnGrid) -> Tensor:
        begun, arrive = self._ahead.popleft() if self._ahead else (of, of.start_gather())
        assert begun is of, "gathers are read in their order"
        found = arrive()
        if self._order is not None and "all_gather" in self._overlap:
            self._gather_ahead(self._order)
        return found

    def _gather_ahead(self, order: list[InStepCollective]) -> None:
        """Start the next gathers, up to a bound that is the same on all ranks."""
        # `_at - 1` is the current collective; it says whether this is the forward or the backward pass
        backward, held = order[self._at - 1].backward, self._bytes(of for of, _ in self._ahead)
        at = max(self._begun_to, self._at)
        # no prefetch across the passes: activations are largest there
        while at < len(order) and order[at].backward == backward:
            kind, of, _ = order[at]
            if kind == GATHERS:
                if self._ahead and held + of.most_bytes > self.largest_bytes:
                    break
                self._ahead.append((of, of.start_gather()))
                held += of.most_bytes
            at += 1
        self._begun_to = at

    def _arrive(self, left_bytes: int = -1) -> None:
        """Wait for gradients until the pending ones have at most `left_bytes`."""
        while self._on_their_way and self._bytes(of for of, _ in self._on_their_way) > left_bytes:
            of, arrive = self._on_their_way.popleft()
            found, leaf = arrive(), of.parameter
            leaf.grad = found if leaf.grad is None else leaf.grad.add_(found)
            self._reached[id(leaf)] = leaf

    @staticmethod
    def _bytes(parameters: Iterable[OnGrid]) -> int:
        return sum(of.most_bytes for of in parameters)
