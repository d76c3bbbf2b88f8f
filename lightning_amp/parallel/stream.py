"""stream: forward and backward pass of one stratum after the other, inside the loss; only one stratum is ever alive.

    d loss / d v = sum over strata k of d nll_k / d v            the same for u, log_weights and library

Exact: the loss is a sum over strata, so their gradients add up; only the order of the sums may differ. Nothing is
computed twice, and no collective is added. What shrinks: all that K strata keep for the backward pass becomes what one
keeps. The price: the new gradients of the strata's parameters exist while those of the last step may still be there.

A chained decoder runs its spine v_0 -> v_1 -> ... forward first, without what hangs off it, and keeps every s-th v_k,
s about the root of K. Then its strata from the last to the first: each gets v_{k-1}, computed again from the kept one
before it, and the gradient of v_k, and hands down that of v_{k-1}.

The cells of a stratum are taken in blocks (cell_blocks.py), so that [B, F_k] exists for one block only.

Legend: cell (B), anchor (N), dim (D), K strata; own: the strata of this rank under strata parallelism.
Known limits: no second derivative, and one backward pass per loss; strata see their parameters as copies without hooks,
whose own hooks run once, in the outer backward pass; chained strata run, and draw random numbers, from the last on.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.func import functional_call

from lightning_amp.parallel.cell_blocks import block_cells
from lightning_amp.parallel.change import Change
from lightning_amp.parallel.ready_gradients import (
    Gradients,
    GradientSum,
    gradients,
    leaf,
    wants_gradients,
    with_gradients,
)
from lightning_amp.parallel.walks import walk_of
from lightning_amp.planning.specs import StreamStrata


def stream_strata(decoder: nn.Module, spec: StreamStrata, mesh: DeviceMesh | None) -> Change:
    """Run forward and backward pass of a decoder's strata one after the other.

    Args:
        decoder: A decomposed decoder whose loss is computed inside it.
        spec: Cells of a block.
        mesh: Is not used.

    Raises:
        InstallError: The decoder's way through the strata, or what a stratum does with its cells, is its own.
    """
    swaps: dict[str, nn.Module] = {"walk": StreamedStrata(walk_of(decoder, "stream"))}
    for k, stratum in enumerate(cast(Any, decoder).strata):
        swaps[f"strata.{k}.cells"] = block_cells(getattr(stratum, "cells", None), size=spec.cells)
    return Change(swaps)


class StreamedStrata(nn.Module):
    """The way through the strata that leaves gradients behind; made by `stream_strata`.

    Args:
        inner: The way that is taken where no gradients are wanted.
    """

    is_technique = True

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(
        self,
        strata: nn.ModuleList,
        u: Float[Tensor, "cell dim"],
        v: Float[Tensor, "anchor dim"],
        log_weights: Float[Tensor, "#cell stratum"],
        *,
        own: range | None = None,
        **cells: Tensor,
    ) -> Float[Tensor, ""]:
        """Negative log-likelihood summed over cells and features, with its gradients ready.

        Raises:
            InstallError: A stratum reads a tensor whose gradient would be lost.
        """
        own = range(len(strata)) if own is None else own
        inputs = [u, v, log_weights, cells["library"]]
        # a chained decoder's spine runs through the strata before the own ones
        first = 0 if any(getattr(stratum, "chained", False) for stratum in strata) else own.start
        parameters = list(strata[first : own.stop].parameters()) if len(own) else []
        if not wants_gradients([*inputs, *parameters]):
            return cast(Tensor, self.inner(strata, u, v, log_weights, own=own, **cells))

        def compute(needed: Sequence[bool]) -> tuple[Tensor, Gradients]:
            leaves = [leaf(tensor, need) for tensor, need in zip(inputs, needed, strict=False)]
            stream = _Stream(strata, leaves, cells, own)
            total = stream.run(own)
            ready = [*stream.shared, *(stream.ready[id(p)] for p in parameters)]
            return total, [gradient.value for gradient in ready]

        return with_gradients(compute, [*inputs, *parameters])


class _Stream:
    """One pass; `shared` are the gradients of u, v, log_weights and library so far, `ready` those of parameters."""

    def __init__(
        self,
        strata: nn.ModuleList,
        leaves: Sequence[Tensor],
        cells: dict[str, Tensor],
        own: range,
    ) -> None:
        self.strata = strata
        self.u, self.v, self.log_weights, self.library = leaves
        self.cells = cells | {"library": self.library}
        # made before the first stratum: what outlives a stratum would split the memory that the next one needs whole
        self.shared = [GradientSum(tensor) for tensor in leaves]
        self.ready = {id(p): GradientSum(p) for p in strata[own.start : own.stop].parameters()}
        # of the strata before, the spine's parameters get gradients, few of them
        before = strata[: own.start].parameters()
        self.ready |= {id(p): GradientSum(p, later=True) for p in before if id(p) not in self.ready}
        self.total = self.u.new_zeros(())

    def run(self, own: range) -> Tensor:
        """All own strata; returns their negative log-likelihood."""
        if not len(own):
            return self.total
        if any(getattr(stratum, "chained", False) for stratum in self.strata[: own.stop]):
            self._chain(own)
        else:
            for k in own:
                self._add_v(self._stratum(k, self.v, None))
        return self.total

    def _add_v(self, grad: Tensor | None) -> None:
        self.shared[1].add(grad)

    def _chain(self, own: range) -> None:
        """From the last stratum down to the first; those before the own ones hand the gradient down only."""
        handed: Tensor | None = None
        for k, before in self._spine_backwards(own.stop):
            v = self.v if k == 0 else leaf(before, True)
            run = self._stratum if k >= own.start else self._spine_back
            handed = run(k, v, handed)
        self._add_v(handed)

    def _spine_backwards(self, stop: int) -> Iterator[tuple[int, Tensor]]:
        """v of every stratum before `stop`, from the last on; every s-th is kept, the others computed again."""
        step = math.isqrt(stop - 1) + 1
        kept = [self.v.detach()]
        with torch.no_grad():
            for first in range(step, stop, step):
                kept.append(self._along(kept[-1], range(first - step, first))[-1])
        while kept:
            first = (len(kept) - 1) * step
            with torch.no_grad():
                part = self._along(kept.pop(), range(first, min(first + step, stop) - 1))
            while part:
                yield first + len(part) - 1, part.pop()

    def _along(self, v: Tensor, strata: range) -> list[Tensor]:
        found = [v]
        for k in strata:
            found.append(cast(Any, self.strata[k]).spine(found[-1]))
        return found

    def _stratum(self, k: int, v: Tensor, handed: Tensor | None) -> Tensor | None:
        """Forward and backward pass of a stratum, given the gradient of the v that it hands on."""
        module = cast(Any, self.strata[k])
        arguments = module.arguments(k, self.log_weights, **self.cells)
        copies = _copies(module)
        nll, v_next = functional_call(module, copies, (v, self.u), arguments)
        outputs, seeds = [nll], [torch.ones_like(nll)]
        if handed is not None and v_next.requires_grad:
            outputs, seeds = [nll, v_next], [seeds[0], handed]
        del v_next
        self.total = self.total + nll.detach()
        return self._collect(k, outputs, seeds, v, copies)

    def _spine_back(self, k: int, v: Tensor, handed: Tensor | None) -> Tensor | None:
        copies = _copies(self.strata[k])
        named = {f"stratum.{name}": copy for name, copy in copies.items()}
        v_next = functional_call(_Spine(self.strata[k]), named, (v,))
        if handed is None or v_next is v:
            return handed
        return self._collect(k, [v_next], [handed], v, copies)

    def _collect(
        self, k: int, outputs: list[Tensor], seeds: list[Tensor], v: Tensor, copies: dict[str, Tensor]
    ) -> Tensor | None:
        """Add up the gradients of all but v; returns that of v."""
        inputs = [self.u, v, self.log_weights, self.library, *copies.values()]
        found = gradients(outputs, inputs, seeds)
        parameters = dict(self.strata[k].named_parameters())
        for name, grad in zip(copies, found[4:], strict=True):
            self.ready[id(parameters[name])].add(grad)
        for i in (0, 2, 3):
            self.shared[i].add(found[i])
        return found[1]


class _Spine(nn.Module):
    """The spine of a stratum, as what calling a module does."""

    def __init__(self, stratum: nn.Module) -> None:
        super().__init__()
        self.stratum = stratum

    def forward(self, v: Tensor) -> Tensor:
        return cast(Tensor, cast(Any, self.stratum).spine(v))


def _copies(stratum: nn.Module) -> dict[str, Tensor]:
    """The parameters as leaves of their own: hooks on the originals, such as those of the gradients' reduction, would
    run here and in the outer backward pass.
    """
    return {name: leaf(p, p.requires_grad) for name, p in stratum.named_parameters()}
