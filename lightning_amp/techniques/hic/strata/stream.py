"""Run forward and backward pass of one stratum after the other inside the loss (stream); only one is ever alive.

    d loss / d v = sum over strata k of d nll_k / d v            the same for u, log_weights and library

Exact: the loss is a sum over strata, so their gradients add up; only the order of the sums may differ. Nothing is
computed twice, and no collective is added. What shrinks: all that K strata keep for the backward pass becomes what one
keeps. The price: the new gradients of the strata's parameters exist while those of the last step may still be there.

A chained decoder runs its spine v_0 -> v_1 -> ... forward first, without what hangs off it, and keeps every s-th v_k,
s about the root of K. Then its strata from the last to the first: each gets v_{k-1}, computed again from the kept one
before it, and the gradient of v_k, and hands down that of v_{k-1}.

Cells are taken in micro-batches and keys run in fewer operators (streamed_stratum.py). On a CPU with several threads
some strata run side by side, as many as the spec says (thread_pool.py), and so many are alive; their gradients are
added up in the order of one after the other. Chained, the branches do so, and the spine's gradient is carried down
between them. Two threads on two cores: a step is 1.43 to 1.58 times as fast, chained 1.29 to 1.30 times.

Legend: cell (B), anchor (N), dim (D), K strata; own: the strata of this rank under strata parallelism.
Known limits: no second derivative, and one backward pass per loss; strata see their parameters as copies without hooks,
whose own hooks run once, in the outer backward pass, where a term made of what a stratum has read or computed is
refused (techniques/precomputed_gradients.py). Chained strata run, and draw random numbers, from the last on; hooks
inside a spine run more often; on a GPU random numbers on the spine are not noticed. Gradients are those of the sum over
cells and features: where float16 overflows in them, loss scaling cannot help, and a warning says so.
"""

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from lightning_amp.errors import InstallError
from lightning_amp.footprint.target_device import launches_operators
from lightning_amp.shapes import Scalar
from lightning_amp.techniques.checks.decoder import walk_of
from lightning_amp.techniques.contract.change import Change
from lightning_amp.techniques.contract.protocol import DecomposedDecoder, LoopTechnique, StratumInputs
from lightning_amp.techniques.hic.rows import StreamStrata
from lightning_amp.techniques.hic.strata.streamed_stratum import in_microbatches, streamed_key
from lightning_amp.techniques.hic.strata.thread_pool import run_in_order, workers_for
from lightning_amp.techniques.precomputed_gradients import (
    Gradients,
    GradientSum,
    add,
    add_up,
    call_with,
    gradients,
    leaf,
    places,
    wants_gradients,
    with_gradients,
)


def stream_strata(decoder: DecomposedDecoder, spec: StreamStrata, mesh: object) -> Change:
    """Run forward and backward pass of a decoder's strata one after the other."""
    if isinstance(spec.workers, bool) or not isinstance(spec.workers, int) or spec.workers < 1:
        raise InstallError(f"stream got workers={spec.workers!r}; that many strata run side by side, at least 1")
    forwards = {}
    swaps: dict[str, nn.Module] = {"walk": StreamedStrata(walk_of(decoder, "stream", once=True), workers=spec.workers)}
    for k, stratum in enumerate(decoder.strata):
        leaf_of_cells = getattr(stratum, "sum_over_cells", None)
        swaps[f"strata.{k}.sum_over_cells"] = in_microbatches(leaf_of_cells, size=spec.cells)
        run = streamed_key(getattr(stratum, "key", None))
        if run is not None:
            forwards[f"strata.{k}.key"] = run
    return Change(swaps, forwards=forwards)


class StreamedStrata(LoopTechnique):
    """The strata loop that runs each stratum's forward and backward in place; made by `stream_strata`."""

    def __init__(self, inner: nn.Module, *, workers: int) -> None:
        super().__init__(inner)
        self.workers = workers

    def extra_repr(self) -> str:
        """Shown by `print(module)`."""
        return f"workers={self.workers}"

    def forward(self, strata: nn.ModuleList, *latents: Tensor, own: range | None = None, **cells: Tensor) -> Scalar:
        """Negative log-likelihood summed over cells and features, with its gradients ready."""
        own = range(len(strata)) if own is None else own
        u, v, log_weights = latents
        inputs = StratumInputs(u, v, log_weights, cells["library"])
        # a chained decoder's spine runs through the strata before the own ones
        first = 0 if _chained(strata) else own.start
        parameters = list(strata[first : own.stop].parameters()) if len(own) else []
        if not wants_gradients([*inputs, *parameters]):
            return cast(Tensor, self.inner(strata, *latents, own=own, **cells))
        if not len(u):
            # zero, and no number that the mean over no cells would divide by zero
            return sum((t.flatten()[:0].sum() for t in (*inputs, *parameters)), u.new_zeros(()))

        def compute(needed: Sequence[bool]) -> tuple[Tensor, Gradients]:
            leaves = StratumInputs(*(leaf(t, need) for t, need in zip(inputs, needed, strict=False)))
            stream = _Stream(strata, leaves, cells, own)
            total = stream.run(own, workers=self.workers)
            ready = [g.value for g in (*stream.shared, *(stream.ready[id(p)] for p in parameters))]
            _warn_of_overflow(total, ready)
            return total, ready

        return with_gradients(compute, [*inputs, *parameters], home=parameters)


class _Stream:
    """One pass; `shared` are the gradients of the inputs so far, `ready` those of parameters."""

    def __init__(
        self, strata: nn.ModuleList, leaves: StratumInputs[Tensor], cells: dict[str, Tensor], own: range
    ) -> None:
        self.strata = strata
        self.chained = _chained(strata[: own.stop])
        self.inputs = leaves
        self.cells = cells | {"library": leaves.library}
        # made before the first stratum: what outlives a stratum would split the memory that the next one needs whole
        self.shared = StratumInputs(*map(GradientSum, leaves))
        # on a device whose operators are launched these are small, and small tensors split nothing there
        later = launches_operators(leaves.v)
        own_strata = strata[own.start : own.stop]
        self.ready = {id(p): GradientSum(p, later=later) for p in own_strata.parameters()}
        if later:
            # of these a stratum has some columns
            tables = (p for one in own_strata for name, p in one.named_parameters() if name in _runs(one))
            self.ready |= {id(p): GradientSum(p) for p in tables}
        # of the strata before, only the spine's parameters get gradients: few, so no memory is set aside for all
        before = strata[: own.start].parameters()
        self.ready |= {id(p): GradientSum(p, later=True) for p in before if id(p) not in self.ready}
        # taken from the first stratum, and added to with the gradients
        self._total = GradientSum(leaves.u, later=True)
        self._one: Tensor | None = None

    def run(self, own: range, *, workers: int) -> Tensor:
        """All own strata; returns their negative log-likelihood."""
        v = self.inputs.v
        workers = workers_for(self.strata[own.start : own.stop], v, asked=workers)
        if not self.chained:
            run_in_order(lambda k: self._pass(k, v, None), own, self._add, workers=workers)
        elif len(own):
            self.shared.v.add(self._chain(own) if workers == 1 else self._chain_side_by_side(own, workers))
        total = self._total.value
        return self.inputs.u.new_zeros(()) if total is None else total

    def _chain(self, own: range) -> Tensor | None:
        """From the last stratum down to the first: each one's backward pass needs the gradient of the v that it made.

        The strata before the own ones only carry the gradient down the spine. Returns that of the first v.
        """
        grad_v: Tensor | None = None
        for k, v in self._spine_backwards(own.stop):
            # here grad_v is that of the v this stratum hands on; what is returned is that of the v it was given
            grad_v = self._add(self._pass(k, v, grad_v)) if k >= own.start else self._spine_back(k, v, grad_v)
        return grad_v

    def _chain_side_by_side(self, own: range, workers: int) -> Tensor | None:
        """The same; the branches do not wait for each other, and the spine's backward pass comes between them."""
        grad_v: Tensor | None = None

        def take(passed: _Passed) -> None:
            nonlocal grad_v
            # a stratum's v has two uses: its own branch, which has run, and the spine to the strata after it
            below = self._spine_back(passed.k, passed.v, grad_v)
            grad_v = add(self._add(passed), below)

        steps = self._spine_backwards(own.stop)
        run_in_order(lambda step: self._pass(*step, None), islice(steps, len(own)), take, workers=workers)
        for k, v in steps:
            grad_v = self._spine_back(k, v, grad_v)
        return grad_v

    def _spine_backwards(self, stop: int) -> Iterator[tuple[int, Tensor]]:
        """v of every stratum before `stop`, from the last on; every s-th is kept, the others computed again."""
        # s about the root of K: K / s kept ones and s in between are then fewest together
        # the first v of every run of `step` strata is kept: it is the input of stratum `first`, not its result
        step = math.isqrt(stop - 1) + 1
        kept = [self.inputs.v]
        with torch.no_grad():
            for first in range(step, stop, step):
                kept.append(self._along(kept[-1], range(first - step, first))[-1])
        while kept:
            first = (len(kept) - 1) * step
            with torch.no_grad():
                part = self._along(kept.pop(), range(first, min(first + step, stop) - 1))
            # popped before it is handed out: a v that was used is not alive during the strata below
            while part:
                k = first + len(part) - 1
                yield k, part.pop()

    def _along(self, v: Tensor, strata: range) -> list[Tensor]:
        """v, and what each of the strata makes of it on the spine."""
        found = [v]
        drawn = _random_state()
        for k in strata:
            # a leaf for each: the backward passes of two strata share no graph
            found.append(leaf(cast(Any, self.strata[k]).spine(found[-1]), True))
        if _random_state() != drawn:
            raise InstallError(
                "strata cannot be streamed: what they pass to the next stratum draws random numbers "
                "(dropout) and is computed more than once, with other numbers each time; draw them "
                "elsewhere in the stratum, or leave 'stream' out"
            )
        return found

    def _pass(self, k: int, v: Tensor, grad_v_next: Tensor | None) -> "_Passed":
        """Forward and backward pass of a stratum, given the gradient of the v that it hands on; adds up nothing."""
        module = cast(Any, self.strata[k])
        arguments = module.arguments(k, self.inputs.log_weights, **self.cells)
        # new leaves for every pass: their graph ends here, so that a stratum's activations die with its backward pass
        copies = _copies(module)
        nll, v_next = call_with(copies, module, lambda: module(v, self.inputs.u, **arguments))
        if self._one is None:
            # made once, not by every stratum's backward pass; strata side by side may make two
            self._one = torch.ones_like(nll)
        outputs, grad_outputs = [nll], [self._one]
        # one backward pass for both outputs: what they share of the stratum is gone through once
        if grad_v_next is not None and v_next.requires_grad:
            outputs, grad_outputs = [nll, v_next], [grad_outputs[0], grad_v_next]
        if v_next is not v and not self.chained:
            raise InstallError(
                f"strata cannot be streamed: stratum {k} returns another v than it got, and no stratum has"
                " chained=True, so the next one would not get it; set `chained` on strata that change v"
            )
        # not needed any more: `outputs` has it where it has a gradient
        del v_next
        return self._passed(k, v, nll.detach(), outputs, grad_outputs, copies)

    def _spine_back(self, k: int, v: Tensor, grad_v_next: Tensor | None) -> Tensor | None:
        """The gradient of v, from that of the v that a stratum hands on, without the stratum's own loss."""
        module = cast(Any, self.strata[k])
        copies = _copies(module)
        v_next = call_with(copies, module, lambda: module.spine(v))
        if grad_v_next is None or v_next is v:
            return grad_v_next
        return self._add(self._passed(k, v, None, [v_next], [grad_v_next], copies))

    def _passed(
        self,
        k: int,
        v: Tensor,
        nll: Tensor | None,
        outputs: list[Tensor],
        grad_outputs: list[Tensor],
        copies: dict[str, Tensor],
    ) -> "_Passed":
        inputs = self.inputs._replace(v=v)
        # a parameter in two places has one copy: its gradient is there once
        parameters = {id(copy): copy for copy in copies.values()}.values()
        found = gradients(outputs, [*inputs, *parameters], grad_outputs)
        return _Passed(k, v, nll, StratumInputs(*found[: len(inputs)]), found[len(inputs) :])

    def _add(self, passed: "_Passed") -> Tensor | None:
        """Add up a stratum's loss and gradients; returns that of v, which in a chain is the next one's."""
        runs = _runs(self.strata[passed.k])
        found = [
            (total, grad)
            for total, grad in zip(self.shared, passed.of_inputs, strict=True)
            # chained, the gradient of v goes to the stratum before, and is not added up here
            if total is not self.shared.v or not self.chained
        ]
        found.append((self._total, passed.nll))
        named = self.strata[passed.k].named_parameters()
        for (name, p), grad in zip(named, passed.of_parameters, strict=True):
            if name in runs:
                self.ready[id(p)].add(grad, runs[name])
            else:
                found.append((self.ready[id(p)], grad))
        add_up(found)
        return passed.of_inputs.v


class _Passed(NamedTuple):
    """What a stratum has left: its loss, None if only the spine was run, and gradients."""

    k: int
    v: Tensor
    nll: Tensor | None
    of_inputs: StratumInputs[Tensor | None]
    of_parameters: Gradients


def _random_state() -> bytes:
    # the host's own: no device is asked
    return torch.get_rng_state().numpy().tobytes()


def _chained(strata: Iterable[nn.Module]) -> bool:
    return any(getattr(stratum, "chained", False) for stratum in strata)


def _warn_of_overflow(total: Tensor, ready: Gradients) -> None:
    """The scaling of the loss comes after these gradients: a step that it skips would be skipped again for ever."""
    device = total.device.type
    products = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    half = products and torch.get_autocast_dtype(device) == torch.float16
    found = [gradient for gradient in ready if gradient is not None]
    if not half:
        found = [gradient for gradient in found if gradient.dtype == torch.float16]
    if not found:
        return
    # seen by the host at once: it waits for the device, only where there is float16
    finite = torch.stack([gradient.isfinite().all() for gradient in found]).all()
    if bool(total.isfinite() & ~finite):
        warnings.warn(
            "gradients of streamed strata are not finite, and their loss is: float16 has overflowed in them. They are"
            " those of the sum over cells and features, before it is divided by their number or scaled, so that smaller"
            " scales do not help, and steps may be skipped, or taken with them, without end: use bfloat16"
            " (precision='bf16-mixed', 'bf16-true') or '32-true', fewer cells a step, or 'recompute' in place of"
            " 'stream'",
            stacklevel=2,
        )


def _copies(stratum: nn.Module) -> dict[str, Tensor]:
    """The parameters as leaves: hooks on the originals, such as those of the gradients' reduction, would
    run here and in the outer backward pass. Of a table that strata share, a stratum gets its own columns; a parameter
    in two places has one copy, in both.
    """
    runs = _runs(stratum)
    copies = {
        id(p): leaf(p[:, runs[name]] if name in runs else p, p.requires_grad) for name, p in stratum.named_parameters()
    }
    return {name: copies[id(own)] for name, own in places(stratum).items() if id(own) in copies}


def _runs(stratum: nn.Module) -> Mapping[str, slice]:
    return cast(Mapping[str, slice], getattr(stratum, "runs", {}))
