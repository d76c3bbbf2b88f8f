"""Issue the collectives of parameters in a step: in one order on all ranks, begun early, waited for late.

    first step    ranks compare, before each collective, what it is for; its order is kept
    later steps   the order is followed. Parameters are gathered ahead of their layers, and ranks compare once, when the
                  step has ended

A rank that leaves the order, as for a branch, takes part in the rest of it first, with zeros: no rank waits for it, and
nothing is mistaken for something else. Then the ranks compare where they have left it. If they have left it at the same
place they go on as in a first step; otherwise all of them stop.

A rank holds at a time, besides what a layer reads: parameters that are gathered ahead, of at most the bytes of the
largest one; gradients on their way, of at most `IN_FLIGHT` times these bytes, and on gloo as much again for what
arrives; the factors of at most `LATEST` gradients of weights that are yet to be computed; and the cache.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_amp.dist._torch import in_backward
from lightning_amp.dist.collectives import LATER, do_later
from lightning_amp.errors import ModelError
from lightning_amp.techniques.tensor3d.row import OVERLAP

IN_FLIGHT = 2
"""Gradients of the largest parameter's bytes that are summed at a time."""
LATEST = 3
"""Gradients of weights that are left for later at a time, such as those of queries, keys and values."""
CHANGES = 2
"""Steps that may leave the order; afterwards each collective is compared."""
GATHERS, ADDS_UP = "gathers", "adds up the gradient of"
STRAY = (
    "a backward pass was begun by loss.backward() or torch.autograd.grad, and under tensor3d the Trainer has to begin"
    " it, to weigh the loss; return the loss from training_step, or train with strategies='S1'"
)


OnGrid = Any
"""A parameter of which a rank has a part: GridParameter (parameters.py), which imports this module."""


class InStepCollective(NamedTuple):
    """One of a parameter, which the order of a step consists of."""

    kind: str
    of: OnGrid
    backward: bool


class InStep:
    """What the parameters of a module have in common in a step.

    Attributes:
        begun: Whether a backward pass is that of the strategy, which weighs the loss.
        largest_bytes: Of one gathered parameter, on the rank that has most of it.

    Args:
        agree: Called with what this rank is about to do; a collective that fails where ranks differ.
        overlap: What is under way while the rank computes (row.py).
        cache_bytes: Of gathered parameters that are kept until the backward pass has ended.
        begun: As the attribute.
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
        # a step may have several backward passes, each of which ends a part of it
        self._part = "", 0
        self._orders, self._changes = (dict[tuple[str, int], list[InStepCollective]](), Counter[tuple[str, int]]())
        self._order: list[InStepCollective] | None = None
        self._done: list[InStepCollective] = []
        self._at = self._begun_to = 0
        self._ahead = deque[tuple[OnGrid, Callable[[], Tensor]]]()
        self._kept: dict[OnGrid, Tensor] = {}
        self._on_their_way = deque[tuple[OnGrid, Callable[[], Tensor]]]()

    def begin(self, name: str, part: int = 0) -> None:
        """A step begins, or another part of it."""
        self.forget()
        self._part = name, part
        self._order = self._orders.get(self._part) if self._changes[self._part] < CHANGES else None

    def end(self, what: str) -> list[nn.Parameter]:
        """A part of the step has ended; a collective that waits for gradients. Returns parameters that have some."""
        do_later()
        self._kept.clear()
        self._leave()
        # After the rest of the order, so that all ranks get here whatever each of them has left out; and before
        # anything uses the gradients, to which a rank that left the order has added zeros.
        self._agree(f"{what} after {len(self._done)} collectives")
        self._orders[self._part] = self._done
        self._arrive()
        found = list(self._reached.values())
        self.begin(self._part[0], self._part[1] + 1)
        return found

    def forget(self) -> None:
        """The step has failed."""
        for kept in (self._reached, self._kept, self._ahead, self._on_their_way, LATER):
            kept.clear()
        self._done, self._order, self._at, self._begun_to = [], None, 0, 0

    def gather(self, of: OnGrid) -> Tensor:
        """A gathered parameter, which is kept if there is room."""
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
        """Begin to sum a gradient of a gathered parameter over the ranks; the parameter gets its part.

        Args:
            of, grad: The parameter, and its gradient.
            fresh: Whether nobody else has the gradient.

        Raises:
            ModelError: The backward pass is not that of the strategy.
        """
        if not self.begun:
            raise ModelError(STRAY)
        self._next(ADDS_UP, of)
        self._arrive(IN_FLIGHT * self.largest_bytes - of.most_bytes)
        self._on_their_way.append((of, of.start_sum(grad, fresh=fresh)))
        if "reduce_scatter" not in self._overlap:
            self._arrive()

    def add_up_later(self, of: OnGrid, compute: Callable[[], Tensor]) -> bool:
        """Compute and sum a gradient while the next all-reduce is under way; False where that is not allowed."""
        if not self.begun or "all_reduce" not in self._overlap:
            return False
        while len(LATER) >= LATEST:
            LATER.pop(0)()
        LATER.append(partial(self._compute, of, compute))
        return True

    def _compute(self, of: OnGrid, compute: Callable[[], Tensor]) -> None:
        # a block that runs again may be what issues the all-reduce, with autograd and autocast
        with torch.no_grad(), torch.autocast(of.parameter.device.type, enabled=False):
            self.add_up(of, compute(), fresh=True)

    def _next(self, kind: str, of: OnGrid) -> None:
        """A collective comes next: by the order, or the ranks compare it."""
        if self._order is not None:
            if self._at < len(self._order) and self._order[self._at][:2] == (kind, of):
                self._done.append(self._order[self._at])
                self._at += 1
                return
            self._leave()
        self._agree(f"{kind} {of.name!r} after {len(self._done)} collectives")
        self._done.append(InStepCollective(kind, of, in_backward()))

    def _leave(self) -> None:
        """Take part in the rest of the order, and follow it no more."""
        # others follow the order to its end, and would wait for this rank for ever
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
        """Begin the next gathers, up to a bound. All ranks must decide the same, so it is not that of the own parts."""
        # `_at` lies behind the collective that is read now, whose pass is the one that goes on.
        backward, held = order[self._at - 1].backward, self._bytes(of for of, _ in self._ahead)
        at = max(self._begun_to, self._at)
        # between the passes activations are at their most
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
        """Wait for gradients until those on their way have so many bytes."""
        while self._on_their_way and self._bytes(of for of, _ in self._on_their_way) > left_bytes:
            of, arrive = self._on_their_way.popleft()
            found, leaf = arrive(), of.parameter
            leaf.grad = found if leaf.grad is None else leaf.grad.add_(found)
            self._reached[id(leaf)] = leaf

    @staticmethod
    def _bytes(parameters: Iterable[OnGrid]) -> int:
        return sum(of.most_bytes for of in parameters)
