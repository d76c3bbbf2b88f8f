"""Run the forward and backward pass of one stratum after the other inside the loss (stream).

    d loss / d v = sum over strata k of d nll_k / d v            the same for u, log_weights and library

Exact: the loss is a sum over strata, so their gradients are summed; only the order of sums may differ. Nothing is
recomputed, and there are no additional collectives. Saved: only one stratum at a time keeps tensors for the backward
pass, instead of all K. Cost: the new gradients of the strata's parameters may exist together with those of the last
step.

A chained decoder first runs its spine v_0 -> v_1 -> ... forward without the branches, and keeps every s-th v_k, with s
about sqrt(K). Then its strata run from the last to the first: each gets v_{k-1}, recomputed from the previous kept one,
and the gradient of v_k, and returns the gradient of v_{k-1}.

Cells are split into micro-batches, and keys use fewer operators (streamed_stratum.py). On a CPU with several threads
`workers` strata run concurrently (thread_pool.py), and as many are alive; their gradients are summed in the sequential
order. In a chained decoder only branches run concurrently, and the spine's backward pass runs between them. With two
threads on two cores a step is 1.43 to 1.58 times as fast, chained 1.29 to 1.30 times.

Legend: cell (B), anchor (N), dim (D), K strata; own: the strata of this rank under strata parallelism.
Known limits: no second derivative, and one backward pass per loss. Strata get copies of their parameters without hooks.
The parameters' own hooks run once, in the outer backward pass, where an additional loss term made of tensors that a
stratum read or computed raises an error (techniques/precomputed_gradients.py). Chained strata run, and draw random
numbers, from the last to the first; hooks inside a spine run more often; random numbers that a spine draws on a GPU are
not detected. Gradients are those of the sum over cells and features: if float16 overflows in them, loss scaling cannot
help, and a warning says so.
"""

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from lightning_amp._torch import unseen
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
    """Strata loop that runs forward and backward of each stratum inside the loss; made by `stream_strata`."""

    def __init__(self, inner: nn.Module, *, workers: int) -> None:
        super().__init__(inner)
        self.workers = workers

    def extra_repr(self) -> str:
        """Shown by `print(module)`."""
        return f"workers={self.workers}"

    def forward(self, strata: nn.ModuleList, *latents: Tensor, own: range | None = None, **cells: Tensor) -> Scalar:
        """Return the negative log-likelihood, summed over cells and features; its gradients are computed already."""
        own = range(len(strata)) if own is None else own
        u, v, log_weights = latents
        inputs = StratumInputs(u, v, log_weights, cells["library"])
        # the spine of a chained decoder also runs through the strata before the own ones
        first = 0 if _chained(strata) else own.start
        parameters = list(strata[first : own.stop].parameters()) if len(own) else []
        if not wants_gradients([*inputs, *parameters]):
            return cast(Tensor, self.inner(strata, *latents, own=own, **cells))
        if not len(u):
            # zero, but not a float: the mean over no cells would divide a float by zero
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
    """State of one step: `shared` sums the gradients of the inputs, `ready` those of parameters."""

    def __init__(
        self, strata: nn.ModuleList, leaves: StratumInputs[Tensor], cells: dict[str, Tensor], own: range
    ) -> None:
        self.strata = strata
        self.chained = _chained(strata[: own.stop])
        self.inputs = leaves
        self.cells = cells | {"library": leaves.library}
        # allocated before the first stratum: a tensor that outlives a stratum would fragment the memory for the next
        # one
        self.shared = StratumInputs(*map(GradientSum, leaves))
        # on an accelerator these are small and come from separate segments, so they fragment nothing
        later = launches_operators(leaves.v)
        own_strata = strata[own.start : own.stop]
        self.ready = {id(p): GradientSum(p, later=later) for p in own_strata.parameters()}
        if later:
            # tables of which a stratum reads some columns
            tables = (p for one in own_strata for name, p in one.named_parameters() if name in _runs(one))
            self.ready |= {id(p): GradientSum(p) for p in tables}
        # strata before the own ones get gradients only for their spine's parameters, so nothing is allocated in advance
        before = strata[: own.start].parameters()
        self.ready |= {id(p): GradientSum(p, later=True) for p in before if id(p) not in self.ready}
        # the loss starts with the first stratum, and is summed together with the gradients
        self._total = GradientSum(leaves.u, later=True)
        self._one: Tensor | None = None

    def run(self, own: range, *, workers: int) -> Tensor:
        """Run all own strata, and return their negative log-likelihood."""
        v = self.inputs.v
        workers = workers_for(self.strata[own.start : own.stop], v, most=workers)
        if not self.chained:
            run_in_order(lambda k: self._pass(k, v, None), own, self._add, workers=workers)
        elif len(own):
            self.shared.v.add(self._chain(own) if workers == 1 else self._chain_side_by_side(own, workers))
        total = self._total.value
        return self.inputs.u.new_zeros(()) if total is None else total

    def _chain(self, own: range) -> Tensor | None:
        """Run chained strata from the last to the first, because each needs the gradient of its output v.

        Strata before the own ones only pass the gradient down the spine. Returns the gradient of the first v.
        """
        grad_v: Tensor | None = None
        for k, v in self._spine_backwards(own.stop):
            # on the right, grad_v is the gradient of this stratum's output v; the result is that of its input v
            grad_v = self._add(self._pass(k, v, grad_v)) if k >= own.start else self._spine_back(k, v, grad_v)
        return grad_v

    def _chain_side_by_side(self, own: range, workers: int) -> Tensor | None:
        """Run chained strata with concurrent branches; the spine's backward pass runs between them."""
        grad_v: Tensor | None = None

        def take(passed: _Passed) -> None:
            nonlocal grad_v
            # a stratum's v has two uses: its branch, whose backward pass has run, and the spine to later strata
            below = self._spine_back(passed.k, passed.v, grad_v)
            grad_v = add(self._add(passed), below)

        steps = self._spine_backwards(own.stop)
        run_in_order(lambda step: self._pass(*step, None), islice(steps, len(own)), take, workers=workers)
        for k, v in steps:
            grad_v = self._spine_back(k, v, grad_v)
        return grad_v

    def _spine_backwards(self, stop: int) -> Iterator[tuple[int, Tensor]]:
        """Yield (k, v) of every stratum before `stop`, last first; every s-th v is kept, others are recomputed."""
        # s about sqrt(K) minimises K / s kept ones plus s in between; the first v of every segment of `step` strata is
        # kept, as the input of stratum `first`
        step = math.isqrt(stop - 1) + 1
        kept = [self.inputs.v]
        with torch.no_grad():
            for first in range(step, stop, step):
                kept.append(self._along(kept[-1], range(first - step, first))[-1])
        while kept:
            first = (len(kept) - 1) * step
            with torch.no_grad():
                part = self._along(kept.pop(), range(first, min(first + step, stop) - 1))
            # popped before it is yielded, so that a used v is freed during the strata below
            while part:
                k = first + len(part) - 1
                yield k, part.pop()

    def _along(self, v: Tensor, strata: range) -> list[Tensor]:
        """Return v, and the output of the spine of each stratum."""
        found = [v]
        drawn = _random_state()
        for k in strata:
            # each is a leaf, so that backward passes of two strata share no graph
            found.append(leaf(cast(Any, self.strata[k]).spine(found[-1]), True))
        if _random_state() != drawn:
            raise InstallError(
                "strata cannot be streamed: what they pass to the next stratum draws random numbers "
                "(dropout) and is computed more than once, with other numbers each time; draw them "
                "elsewhere in the stratum, or leave 'stream' out"
            )
        return found

    def _pass(self, k: int, v: Tensor, grad_v_next: Tensor | None) -> "_Passed":
        """Run forward and backward of a stratum, given the gradient of its output v; gradients are not summed here."""
        module = cast(Any, self.strata[k])
        arguments = module.arguments(k, self.inputs.log_weights, **self.cells)
        # new leaves for every pass: their graph ends here, so that the backward pass frees a stratum's activations
        copies = _copies(module)
        nll, v_next = call_with(copies, module, lambda: module(v, self.inputs.u, **arguments))
        if self._one is None:
            # cached; concurrent strata may create it twice
            self._one = torch.ones_like(nll)
        outputs, grad_outputs = [nll], [self._one]
        # one backward pass for both outputs, so that the graph they share is traversed once
        if grad_v_next is not None and v_next.requires_grad:
            outputs, grad_outputs = [nll, v_next], [grad_outputs[0], grad_v_next]
        if v_next is not v and not self.chained:
            raise InstallError(
                f"strata cannot be streamed: stratum {k} returns another v than it got, and no stratum has"
                " chained=True, so the next one would not get it; set `chained` on strata that change v"
            )
        # `outputs` keeps it if it needs a gradient
        del v_next
        return self._passed(k, v, nll.detach(), outputs, grad_outputs, copies)

    def _spine_back(self, k: int, v: Tensor, grad_v_next: Tensor | None) -> Tensor | None:
        """Return the gradient of v from that of the stratum's output v, without the stratum's own loss."""
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
        # a parameter that is used in two places has one copy, so its gradient comes once
        parameters = {id(copy): copy for copy in copies.values()}.values()
        found = gradients(outputs, [*inputs, *parameters], grad_outputs)
        return _Passed(k, v, nll, StratumInputs(*found[: len(inputs)]), found[len(inputs) :])

    def _add(self, passed: "_Passed") -> Tensor | None:
        """Add a stratum's loss and gradients to the sums; return the gradient of v for the next stratum of a chain."""
        runs = _runs(self.strata[passed.k])
        found = [
            (total, grad)
            for total, grad in zip(self.shared, passed.of_inputs, strict=True)
            # chained, the gradient of v goes to the stratum before, and is not summed here
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
    """Result of a stratum: gradients, and the loss, which is None if only the spine was run."""

    k: int
    v: Tensor
    nll: Tensor | None
    of_inputs: StratumInputs[Tensor | None]
    of_parameters: Gradients


def _random_state() -> bytes:
    # the CPU generator only: no synchronisation with a device; in a counted step its numbers are no fake ones
    with unseen():
        return torch.get_rng_state().numpy().tobytes()


def _chained(strata: Iterable[nn.Module]) -> bool:
    return any(getattr(stratum, "chained", False) for stratum in strata)


def _warn_of_overflow(total: Tensor, ready: Gradients) -> None:
    """Warn if float16 gradients overflow: the loss is scaled after them, so every step could be skipped."""
    device = total.device.type
    products = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    half = products and torch.get_autocast_dtype(device) == torch.float16
    found = [gradient for gradient in ready if gradient is not None]
    if not half:
        found = [gradient for gradient in found if gradient.dtype == torch.float16]
    if not found:
        return
    # this waits for the device, but only if float16 is used
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
    """Return a leaf for every parameter, because hooks on the originals would run here and in the outer backward pass.
    Of a table that strata share, a stratum gets its own columns. A parameter in two places has one copy.
    """
    runs = _runs(stratum)
    copies = {
        id(p): leaf(p[:, runs[name]] if name in runs else p, p.requires_grad) for name, p in stratum.named_parameters()
    }
    return {name: copies[id(own)] for name, own in places(stratum).items() if id(own) in copies}


def _runs(stratum: nn.Module) -> Mapping[str, slice]:
    return cast(Mapping[str, slice], getattr(stratum, "runs", {}))
