"""Compute the bytes that a rank holds during a stage's forward and backward pass, from the lifetimes of storages."""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from lightning_amp.footprint.chain.passes import Passes
from lightning_amp.footprint.module_profile import bytes_alive

NEVER = -1
"""Time before the first operator."""


class StageWindow:
    """Lifetimes of the storages of some segments, over the operators of their passes.

    Args:
        passes: Passes of a micro-batch, or of the batch.
        start, segments: First segment, and one past the last.
        returned: Storages that stay after the forward pass even if autograd does not keep them.
        rank: All segments of the rank, if it has several stages.

    Attributes:
        leaves: Storages that leave for the host in the forward pass, in this order.
    """

    def __init__(
        self, passes: Passes, start: int, segments: int, *, returned: Sequence[int], rank: Collection[int]
    ) -> None:
        # the first operator of their forward passes, and one past the last
        begin, stop = int(passes.first[start]), int(passes.first[segments])
        self._passes, self._begin, self._stop = passes, begin, stop
        self._start, self._segments = start, segments
        n = len(passes.n_bytes)
        # operators of earlier segments outside blocks, which this rank runs too
        needed = np.concatenate(passes.needs[start:segments])
        self._needed = needed[needed < begin]
        # the time until which autograd keeps a storage for these segments, and from which it reads it
        self._until, self._read = np.full(n, NEVER), np.full(n, len(passes.segment))
        every = passes.uses[self._is_own(passes.uses[:, 1], passes.uses[:, 3])]
        uses = every[every[:, 2] >= stop]
        np.maximum.at(self._until, uses[:, 0], uses[:, 2])
        np.minimum.at(self._read, *uses[uses[:, 4] >= 0][:, [0, 4]].T)
        # what the rank computes before its blocks, for any of its segments
        segments_here = sorted({*range(start, segments), *rank})
        present = np.concatenate([passes.needs[i] for i in segments_here])
        of_own = np.isin(np.searchsorted(passes.first[1:], passes.birth, side="right"), segments_here)
        # Everything else (not of the batch, not needed or computed by a segment of this rank) is a placeholder on this
        # rank, without bytes.
        made_here = ~passes.computed | np.isin(passes.birth, present) | of_own
        self._before = made_here & ~passes.of_blocks & (passes.birth < begin)
        shared = self._before & ((passes.held >= begin) | (self._until > NEVER))
        # a kept variable of the step keeps its autograd graph
        graph = passes.uses[np.isin(passes.uses[:, 3], present), 0]
        self._graph = np.zeros(n, dtype=bool)
        self._graph[graph] = True
        own = (passes.birth >= begin) & (passes.birth < stop)
        self._here = own | shared
        # received from the segment before: a tensor has memory of its own, also if it was a part of a larger one
        received = list(passes.outputs[start - 1]) if start else []
        self._here[received] = True
        self._n_bytes = passes.n_bytes
        if len(received) == 1:
            self._n_bytes = passes.n_bytes.copy()
            self._n_bytes[received] = passes.sent_bytes[start - 1]
        # in the order in which autograd saves them; also of what the rank computes before its blocks
        saved = passes.uses[self._is_own(passes.uses[:, 1], passes.uses[:, 3]) | np.isin(passes.uses[:, 3], present), 0]
        leaves = self._here & passes.may_leave()
        self.leaves = [i for i in dict.fromkeys(saved.tolist()) if leaves[i]]
        self._away = np.isin(np.arange(n), self.leaves)
        end = len(passes.segment)
        self._until[list(returned)], self._away[list(returned)] = end, False
        self._kept = self._here & (self._until > NEVER) & ~self._away

    def _is_own(self, segment: Any, maker: Any) -> Any:
        """Mask of what belongs to these segments, or to an autograd node made by operators that they need."""
        return ((segment >= self._start) & (segment < self._segments)) | np.isin(maker, self._needed)

    def draws_first(self) -> bool:
        """Whether the rank draws random numbers before its blocks; it draws nothing after a placeholder."""
        first = self._passes.draws_first
        return first == 0 or bool(self._before[self._passes.birth == first].any())

    def kept(self) -> int:
        """Bytes that autograd and the schedule keep after the forward pass."""
        return int(self._n_bytes[self._kept].sum())

    def forward(self, *, silent: bool = False) -> int:
        """Peak bytes of the forward pass, including what precedes it.

        With `silent`, nothing is kept for a backward pass.
        """
        passes, before = self._passes, self._before
        here = self._here | before
        until = passes.held
        if not silent:
            gone = passes.held[before & passes.computed].max(initial=NEVER)
            until = np.where(before & self._graph & ~self._away, np.maximum(until, gone), until)
            until = np.where(self._kept, self._stop, until)
        times = np.concatenate([np.unique(passes.birth[before]), np.arange(self._begin, self._stop)])
        # received tensors exist from the first operator on
        birth = np.where(before, passes.birth, np.maximum(passes.birth, self._begin))
        first, last = (np.searchsorted(times, t, side="right") - 1 for t in (birth[here], until[here]))
        return int(bytes_alive(first, last, self._n_bytes[here], len(times)).max(initial=0))

    def backward(self) -> tuple[int, int]:
        """Peak bytes of the backward pass: with gradients that stay, and with gradients freed once they are added."""
        passes = self._passes
        own = self._is_own(passes.segment, passes.maker)
        # only the operators of these segments run on the rank: other times are skipped
        times = np.flatnonzero(own)
        if not len(times):
            return self.kept(), self.kept()

        def place(t: Any) -> Any:
            return np.searchsorted(times, t, side="right") - 1

        length = len(times)
        made = own[passes.birth]
        back = self._away & (self._read <= self._until)
        birth = place(np.where(back, self._read, passes.birth))
        until = np.where(made, passes.held, self._until)
        gradients = self._gradients(own, made, until)
        here = made | self._kept | back
        others = bytes_alive(birth[here], place(until[here]), self._n_bytes[here], length)
        if not len(gradients):
            return int(others.max()), int(others.max())
        born = place(gradients[:, 0])
        come = bytes_alive(born, np.full(len(gradients), length), gradients[:, 1], length)
        # a node returns all its gradients together, before any is added
        brief = bytes_alive(born, place(gradients[:, 3]), gradients[:, 1], length)
        return int((others + come).max()), int((others + brief).max())

    def _gradients(self, own: Any, made: Any, until: Any) -> Any:
        """Return the rows of the gradients that operators of a mask make, and correct which storages these make and how
        long they live: if other segments make a part of a sum, the last own part is the gradient.
        """
        passes, rows, gone = self._passes, list[tuple[int, int, int, int]](), list[int]()
        for row in np.unique(passes.sums[:, 0]).tolist():
            sums = passes.sums[passes.sums[:, 0] == row]
            parts = sums[sums[:, 2] >= 0]
            mine = parts[own[passes.birth[parts[:, 1]]]]
            if len(mine) == len(parts):
                continue
            gone.append(row)
            made[sums[sums[:, 2] < 0, 1]] = False
            if len(mine):
                _, last, end = mine[np.argmax(passes.birth[mine[:, 1]])].tolist()
                until[mine[:, 1]] = passes.birth[last]
                made[last] = False
                rows.append((int(passes.birth[last]), int(passes.n_bytes[last]), self._start, end))
        listed = np.delete(passes.gradients, gone, axis=0)
        return np.concatenate([listed[own[listed[:, 0]]], np.array(rows, dtype=np.int64).reshape(-1, 4)])
