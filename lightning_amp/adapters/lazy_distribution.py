"""What a foreign decoder returns while ours computes: a distribution whose log-probability waits to be summed.

    decoder(u, v, b, l).log_prob(x)        [cell, feature], nothing computed yet
        .mean(), .sum(), torch.mean, torch.sum                 a scalar: the loss of our decoder, in one call
        -, times or divided by a number                        still waiting
    everything else                        the distribution, or its log-probability, in full

In full it is of the module's own class, and made by its own forward, with gradients. Where ranks share the strata it
is computed by all of them together, and without gradients: parameters have parts of gradients there, so that a loss
made of single entries would train on something else. With gradients enabled it is therefore refused.

Eager code would have computed at the call: gradients are made only where they were enabled since then, at products too,
and a tensor that was changed in place since then, or frozen, is refused (unchanged_tensors.py). Numbers wait in the
order in which they came, and meet the sum as each entry would have met them: a tensor without axes does not change the
type.

Known limits: autocast is that of the sum and not of the call; where ranks share the strata, asking for something in
full on one rank of a model group alone waits for the others; what is computed in full is not counted in a plan's
prediction.
Legend: cell (B), anchor (N), dim (D), feature (F).
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lightning_amp.adapters.forms.adapted_decoder import AdaptedDecoder
from lightning_amp.adapters.forms.adapted_stratum import distribution
from lightning_amp.adapters.unchanged_tensors import Moment
from lightning_amp.data.sparse_counts import SparseCounts
from lightning_amp.errors import InstallError

Number = int | float | Tensor
Step = tuple[Callable[..., Tensor], Number]
EAGER = (
    "{what} was asked for with gradients, and is computed by the module's own forward: exact, but nothing of what the"
    " plan has installed in its decoder is used; log_prob(x).mean() and .sum() use it"
)


class LazyDistribution:
    """The distribution of a foreign decoder for some cells.

    Args:
        decoder: Ours.
        eager: The foreign module's own forward.
        inputs: u, v, b and l as the module was called with.
        parameters: Those of the foreign module, by name.
        look: Called with the counts (None: any) before ours computes in the module's place; refuses by raising.
    """

    def __init__(
        self,
        decoder: AdaptedDecoder,
        eager: Callable[..., Any],
        inputs: tuple[
            Float[Tensor, "cell dim"],
            Float[Tensor, "anchor dim"],
            Int[Tensor, " cell"],
            Float[Tensor, "cell 1"],
        ],
        parameters: Iterable[tuple[str, Tensor]],
        look: Callable[[Any], None],
    ) -> None:
        self._decoder = decoder
        self._look = look
        self._eager = eager
        self._kind = decoder.kind
        self._inputs = inputs
        self._moment = Moment([*zip("uvbl", inputs, strict=True), *parameters])
        self._whole: dict[bool, Any] = {}

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # isinstance is asked by people's code; type() still tells the truth
        return self._kind

    def __repr__(self) -> str:
        return f"{self._kind.__name__}(computed when it is asked for)"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.in_full(f"{self._kind.__name__}.{name}"), name)

    def log_prob(self, value: Float[Tensor, "cell feature"]) -> Any:
        """Log-probability of every count, waiting to be summed.

        Raises:
            InstallError: The counts have another shape, and ranks share the strata.
        """
        shape = (len(self._inputs[0]), self._decoder.n_features)
        if tuple(getattr(value, "shape", ())) != shape:
            return self.in_full(f"log_prob of something that is not of the shape {shape!r}").log_prob(value)
        counts = value.tensors() if isinstance(value, SparseCounts) else (value,)
        moment = Moment(("x", part) for part in counts)
        totals: dict[bool, Tensor] = {}

        def graded() -> bool:
            return self._moment.graded() and moment.graded()

        def total() -> Tensor:
            if True in totals:
                return totals[True] if graded() else totals[True].detach()
            if graded() not in totals:
                for one in (self._moment, moment):
                    one.check("the sum of log_prob(x)", graded=graded())
                totals[graded()] = self._total(value, graded=graded())
            return totals[graded()]

        def whole(what: str) -> Tensor:
            with torch.set_grad_enabled(graded()):
                moment.check(what, graded=graded())
                found: Tensor = self.in_full(what).log_prob(value)
                return found

        return LazyLogProb(total, whole, shape)

    def _total(self, x: Float[Tensor, "cell feature"], *, graded: bool) -> Float[Tensor, ""]:
        u, v, b, l = self._inputs  # noqa: E741
        self._look(x)
        with torch.set_grad_enabled(graded):
            return -self._decoder.nll(u, v, batch=b, library=l, x=x)

    def sample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Counts drawn from it, without gradients."""
        with torch.no_grad():
            drawn: Tensor = self.in_full("sample").sample(torch.Size(sample_shape))
            return drawn

    def in_full(self, what: str) -> Any:
        """The distribution itself.

        Args:
            what: What was asked for, for the message.

        Raises:
            InstallError: It would need gradients that ranks have parts of, or something has changed since the call.
        """
        wanted = self._moment.graded()
        if wanted and self._decoder.shared:
            raise InstallError(
                f"{what} was asked for with gradients, and the decoder's strata are shared by several ranks, which sum"
                " a loss over all cells and features; allowed are log_prob(x).mean() and .sum() and multiples of them,"
                " and everything under torch.no_grad(): write the loss with these, or leave out what shares the strata"
                " (S2, S5, nodes, strata)"
            )
        if True in self._whole:
            return self._whole[True]
        if wanted not in self._whole:
            self._moment.check(what, graded=wanted)
            if wanted:
                warnings.warn(EAGER.format(what=what), stacklevel=3)
            with torch.set_grad_enabled(wanted):
                self._whole[wanted] = self._shared() if self._decoder.shared else self._eager(*self._inputs)
        return self._whole[wanted]

    def _shared(self) -> Any:
        u, v, b, l = self._inputs  # noqa: E741
        self._look(None)
        location = self._decoder.location(u, v, batch=b, library=l)
        stratum: Any = self._decoder.strata[0]
        if stratum.binarized:
            return distribution(self._kind, location, None, None)
        return distribution(self._kind, location, stratum.log_theta[b], stratum.zi_logits[b])


class LazyLogProb:
    """Log-probabilities [cell, feature] of which only the sum or the mean is likely to be wanted.

    Args:
        total: Their sum, of our decoder.
        whole: All of them, of the foreign one; is told what was asked for.
        shape: Cells and features.
        steps: What they are multiplied with and divided by, in this order.
        graded: Whether gradients were enabled all the time.
    """

    def __init__(
        self,
        total: Callable[[], Float[Tensor, ""]],
        whole: Callable[[str], Float[Tensor, "cell feature"]],
        shape: Sequence[int],
        *,
        steps: tuple[Step, ...] = (),
        graded: bool = True,
    ) -> None:
        self._total = total
        self._whole = whole
        self._steps = steps
        self._graded = graded
        self.shape = torch.Size(shape)

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"log-probability of {tuple(self.shape)!r}, waiting to be summed"

    def numel(self) -> int:
        """Cells times features."""
        return self.shape.numel()

    def size(self, dim: int | None = None) -> Any:
        """As of a tensor."""
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        """As of a tensor."""
        return len(self.shape)

    def sum(self, *args: Any, **options: Any) -> Tensor:
        """Sum of all; with arguments that of the tensor in full."""
        if args or options:
            return self.in_full("sum over some axes").sum(*args, **options)
        with self._mode():
            # the total is kept, and the caller may add to the sum in place
            return self._scaled(self._total().clone())

    def mean(self, *args: Any, **options: Any) -> Tensor:
        """Mean of all; with arguments that of the tensor in full."""
        if args or options:
            return self.in_full("mean over some axes").mean(*args, **options)
        with self._mode():
            return self._scaled(self._total()) / self.numel()

    def in_full(self, what: str) -> Float[Tensor, "cell feature"]:
        """All log-probabilities.

        Raises:
            InstallError: They would need gradients that ranks have parts of.
        """
        with self._mode():
            return self._scaled(self._whole(f"log_prob(x), of which {what} was taken,"))

    def _mode(self) -> torch.set_grad_enabled:
        return torch.set_grad_enabled(self._graded and torch.is_grad_enabled())

    def _scaled(self, values: Tensor) -> Tensor:
        for step, number in self._steps:
            values = step(values, number.to(values.dtype) if isinstance(number, Tensor) else number)
        return values

    def _then(self, step: Callable[..., Tensor], number: Number) -> "LazyLogProb":
        # a tensor may be changed in place before the sum
        kept = number.clone() if isinstance(number, Tensor) else number
        graded = self._graded and torch.is_grad_enabled()
        steps = (*self._steps, (step, kept))
        return LazyLogProb(self._total, self._whole, self.shape, steps=steps, graded=graded)

    def __neg__(self) -> "LazyLogProb":
        return self._then(torch.mul, -1)

    neg = negative = __neg__

    def __mul__(self, other: Any) -> Any:
        return self._then(torch.mul, other) if _is_number(other) else self.in_full("a product") * other

    mul = multiply = __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return self._then(torch.div, other) if _is_number(other) else self.in_full("a quotient") / other

    def div(self, other: Any, *, rounding_mode: str | None = None) -> Any:
        """As of a tensor; what is rounded is computed in full."""
        if rounding_mode is None:
            return self / other
        return self.in_full("a rounded quotient").div(other, rounding_mode=rounding_mode)

    divide = div

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.in_full(repr(name)), name)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", repr(func))
        if name in PRODUCTS and len(args) == 2 and not isinstance(args[0], cls):
            args = (args[1], args[0])
        if args and isinstance(args[0], cls) and name in WAITING and "out" not in (kwargs or {}):
            return getattr(args[0], name)(*args[1:], **(kwargs or {}))

        def whole(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return [whole(one) for one in value]
            return value.in_full(f"torch.{name}") if isinstance(value, cls) else value

        return func(*map(whole, args), **{key: whole(value) for key, value in (kwargs or {}).items()})


PRODUCTS = ("mul", "multiply", "__rmul__")
WAITING = ("mean", "sum", "neg", "negative", "div", "divide", "numel", *PRODUCTS)
"""Functions of torch that a log-probability answers itself."""

IN_FULL = (
    "add",
    "radd",
    "sub",
    "rsub",
    "rtruediv",
    "pow",
    "abs",
    "getitem",
    "len",
    "iter",
    "float",
    "lt",
    "le",
    "gt",
    "ge",
    "eq",
    "ne",
    "bool",
)


def _is_number(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0 and not value.is_complex()
    return isinstance(value, int | float)


def _of_whole(name: str) -> Callable[..., Any]:
    def method(self: LazyLogProb, *args: Any) -> Any:
        return getattr(self.in_full(f"`{name}`"), name)(*args)

    return method


for _name in IN_FULL:
    setattr(LazyLogProb, f"__{_name}__", _of_whole(f"__{_name}__"))
