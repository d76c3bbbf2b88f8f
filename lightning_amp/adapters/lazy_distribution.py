"""Return a distribution for a foreign decoder whose log-probability is computed when it is summed.

    decoder(u, v, b, l).log_prob(x)                      [cell, feature], nothing computed yet
        .mean(), .sum(), torch.mean, torch.sum, minus    a scalar: the loss of our decoder, in one call
    everything else                                      the distribution, or its log-probability, in full

In full, the distribution has the class of the foreign module, whose own forward computes it with gradients. If ranks
share the strata, all of them compute it together, without gradients: gradients of parameters are partial there, so a
loss of single entries would train something else. With gradients enabled this raises an error.

Eager code would compute at the call. So the result has gradients only if they were enabled at the call, at the minus
and at the sum; an input that was changed in place or frozen since the call raises an error.

Known limits: autocast is applied as at the sum, not as at the call. If ranks share the strata, a full result that only
one rank of a model group requests waits for the others. A plan's prediction does not count full results. Transforms of
`torch.func` raise. An in-place change of a slice does not reach the sum; one through `tensor.data` is not detected.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from lightning_amp._torch import version_of
from lightning_amp.adapters.forms.adapted_decoder import AdaptedDecoder, distribution
from lightning_amp.data.sparse_counts import SparseCounts
from lightning_amp.errors import InstallError
from lightning_amp.shapes import Counts, Experiment, Library, PerAnchor, PerCell, Scalar

SHOWN = 3


class Deferred:
    """Computation that runs when its result is first requested; caches one result with and one without gradients."""

    def __init__(
        self,
        compute: Callable[[str], Any],  # the computation; receives what was requested
        tensors: Iterable[tuple[str, object]],  # its inputs by name; values that are not tensors are skipped
        after: "Deferred | None" = None,  # a deferred computation whose result or inputs it reads
    ) -> None:
        self._compute = compute
        seen = [(name, t, version_of(t), t.requires_grad) for name, t in tensors if isinstance(t, Tensor)]
        self._seen: list[tuple[str, Tensor, int, bool]] = [*(after._seen if after else ()), *seen]
        self._enabled: bool = torch.is_grad_enabled() and (after is None or after._enabled)
        self._results: dict[bool, Any] = {}

    def result(self, what: str) -> Any:
        """Return the result, with gradients if they were enabled at the call and are enabled now."""
        # a result with gradients is reused under no_grad, because tensors computed from it have none there; a result
        # without gradients is computed again if gradients are requested later
        graded = True in self._results or (self._enabled and torch.is_grad_enabled())
        if graded not in self._results:
            self._check(what, graded=graded)
            with torch.set_grad_enabled(graded):
                self._results[graded] = self._compute(what)
        return self._results[graded]

    def _check(self, what: str, *, graded: bool) -> None:
        changes = [f"{name} was changed in place" for name, t, old, _ in self._seen if version_of(t) != old]
        if graded:
            changes += [
                f"requires_grad of {name} was {needed!r} and is {t.requires_grad!r}"
                for name, t, _, needed in self._seen
                if t.requires_grad != needed
            ]
        if changes:
            raise InstallError(
                f"{what} cannot be computed: since its call"
                f" {', '.join(changes[:SHOWN])}{f' and {len(changes) - SHOWN} more' if len(changes) > SHOWN else ''};"
                " a decoder under a plan computes when log_prob(x) is summed, and its result would now"
                " differ from that of the call: take log_prob(x).mean() or .sum() before anything changes,"
                " or train with strategies='S1'"
            )


OnRequest = Callable[[str], Tensor]
EAGER = (
    "{what} requires gradients and is computed by the module's own forward: exact, but nothing of what the"
    " plan has installed in its decoder is used; log_prob(x).mean() and .sum() use it"
)


class LazyDistribution:
    """Distribution of a foreign decoder for some cells; `inputs` are u, v, b and l."""

    def __init__(
        self,
        decoder: AdaptedDecoder,
        eager: Callable[..., Any],  # the foreign module's own forward
        inputs: tuple[PerCell, PerAnchor, Experiment, Library],
        parameters: Iterable[tuple[str, Tensor]],
        # called with the counts (None: any) before our decoder computes; raises if the decoders differ
        look: Callable[[Any], None],
    ) -> None:
        self._decoder = decoder
        self._look = look
        self._eager = eager
        self._inputs = inputs
        self._whole = Deferred(self._compute, [*zip("uvbl", inputs, strict=True), *parameters])

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # for isinstance in user code; type() still returns LazyDistribution
        return self._decoder.kind

    def __repr__(self) -> str:
        return f"{self._decoder.kind.__name__}(computed on access)"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._whole.result(f"{self._decoder.kind.__name__}.{name}"), name)

    def log_prob(self, value: Counts) -> Any:
        """Return the log-probability of every count, which is computed when it is summed."""
        shape = (len(self._inputs[0]), self._decoder.n_features)
        if tuple(getattr(value, "shape", ())) != shape:
            what = f"log_prob of something that is not of the shape {shape!r}"
            return self._whole.result(what).log_prob(value)
        counts = value.tensors() if isinstance(value, SparseCounts) else (value,)
        x = [("x", part) for part in counts]
        total = Deferred(lambda _: self._total(value), x, after=self._whole)
        each = Deferred(lambda what: self._whole.result(what).log_prob(value), x, after=self._whole)
        return _waiting(total.result, each.result, shape, self._inputs[0])

    def _total(self, x: Counts) -> Scalar:
        u, v, b, l = self._inputs  # noqa: E741
        self._look(x)
        return -self._decoder.nll(u, v, batch=b, library=l, x=x)

    def _compute(self, what: str) -> Any:
        """Compute the full distribution."""
        if not self._decoder.shared:
            if torch.is_grad_enabled():
                warnings.warn(EAGER.format(what=what), stacklevel=3)
            return self._eager(*self._inputs)
        if torch.is_grad_enabled():
            raise InstallError(
                f"{what} requires gradients, and the decoder's strata are shared by several ranks, which sum"
                " a loss over all cells and features; allowed are log_prob(x).mean() and .sum(), of which"
                " multiples may be taken, and everything under torch.no_grad(): write the loss with these,"
                " or leave out what shares the strata (S2, S5, nodes, strata)"
            )
        u, v, b, l = self._inputs  # noqa: E741
        self._look(None)
        location = self._decoder.location(u, v, batch=b, library=l)
        stratum: Any = self._decoder.strata[0]
        if stratum.binarized:
            return distribution(self._decoder.kind, location, None, None)
        return distribution(self._decoder.kind, location, stratum.log_theta[b], stratum.zi_logits[b])


class LazyLogProb(Tensor):
    """Log-probabilities [cell, feature] that are computed as a sum or mean if only these are used."""

    total: OnRequest  # computes their sum with our decoder; receives the name of the request
    each: OnRequest  # computes all of them with the foreign decoder

    __hash__ = object.__hash__
    # y += z binds y to a new tensor
    __iadd__, __isub__, __imul__, __itruediv__ = (Tensor.__add__, Tensor.__sub__, Tensor.__mul__, Tensor.__truediv__)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"log-probability of {tuple(self.shape)!r}, waiting to be summed"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, named = getattr(func, "__name__", repr(func)), kwargs or {}
        if func in METADATA:
            return super().__torch_function__(func, types, args, named)  # type: ignore[no-untyped-call]
        if name in WAITING and len(args) == 1 and not named:
            return WAITING[name](args[0])
        computed: list[tuple[Tensor, int]] = []

        def whole(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return type(value)(map(whole, value))
            if not isinstance(value, cls):
                return value
            found = value.each(f"log_prob(x), of which {name!r} was taken,")
            # a write to it would be lost: the caller does not hold this tensor
            computed.append((found, version_of(found)))
            return found

        result = func(*map(whole, args), **{key: whole(value) for key, value in named.items()})
        if name in REFUSED or any(version_of(one) != old for one, old in computed):
            raise InstallError(
                f"{name!r} is not supported on log_prob(x), which a decoder under a plan has not computed: what is set"
                " or changed in place there would be lost; allowed are functions that return a new tensor: use one of"
                " these, or train with strategies='S1', which runs the decoder's own forward"
            )
        return result

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> NoReturn:
        # only where torch leaves out `__torch_function__`
        raise InstallError(
            f"{func} is not supported on log_prob(x), which a decoder under a plan computes when it is summed; call its"
            " .mean() or .sum() outside of torch.func, or train with strategies='S1', which runs the decoder's own"
            " forward"
        )


def _waiting(total: OnRequest, each: OnRequest, shape: Sequence[int], like: Tensor) -> LazyLogProb:
    # no memory: `as_subclass` of a fake tensor, which a counted step has, is an error
    made = Tensor._make_wrapper_subclass(LazyLogProb, torch.Size(shape), dtype=like.dtype, device=like.device)
    made.total, made.each = total, each
    return made


def _sum(values: LazyLogProb) -> Tensor:
    # a clone, because the total is cached, and the caller may add to the sum in place
    return values.total("the sum of log_prob(x)").clone()


def _minus(values: LazyLogProb) -> LazyLogProb:
    enabled = torch.is_grad_enabled()

    def minus(compute: OnRequest, what: str) -> Tensor:
        with torch.set_grad_enabled(enabled and torch.is_grad_enabled()):
            return -compute(what)

    return _waiting(partial(minus, values.total), partial(minus, values.each), values.shape, values)


WAITING: dict[str, Callable[[LazyLogProb], Tensor]] = {
    "sum": _sum,
    "mean": lambda values: _sum(values) / values.numel(),
    "neg": _minus,
    "negative": _minus,
}
"""Functions of torch that a LazyLogProb implements."""

METADATA = {getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim")}
METADATA |= {Tensor.size, Tensor.dim, Tensor.numel, torch.numel}
REFUSED = ("__set__", "register_hook", "retain_grad")
