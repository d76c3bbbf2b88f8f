"""Defer a computation, and return later the result that it would have had at the call.

That is so only if no tensor was changed in place since, if gradients are made only where they were enabled all the
time, and if the same tensors need them.

Known limit: a change through `tensor.data` is not counted by torch, and not seen.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_amp.errors import InstallError

SHOWN = 3


class Deferred:
    """A computation that runs when its result is first requested; one result with gradients, and one without.

    Args:
        compute: The computation; receives what was requested.
        tensors: What it will read, by name; what is no tensor is left out.
        after: A deferred computation that it reads the result of, or the tensors of.
    """

    def __init__(
        self,
        compute: Callable[[str], Any],
        tensors: Iterable[tuple[str, object]],
        after: "Deferred | None" = None,
    ) -> None:
        self._compute = compute
        seen = [(name, t, version(t), t.requires_grad) for name, t in tensors if isinstance(t, Tensor)]
        self._seen: list[tuple[str, Tensor, int, bool]] = [*(after._seen if after else ()), *seen]
        self._enabled: bool = torch.is_grad_enabled() and (after is None or after._enabled)
        self._results: dict[bool, Any] = {}

    def result(self, what: str) -> Any:
        """The result, with gradients if they were enabled at the call and are now.

        Raises:
            InstallError: A tensor was changed in place, or needs a gradient now and did not then, or the reverse.
        """
        # a result with gradients serves without them too: what is computed from it has none then
        graded = True in self._results or (self._enabled and torch.is_grad_enabled())
        if graded not in self._results:
            self._check(what, graded=graded)
            with torch.set_grad_enabled(graded):
                self._results[graded] = self._compute(what)
        return self._results[graded]

    def _check(self, what: str, *, graded: bool) -> None:
        changes = [f"{name} was changed in place" for name, t, old, _ in self._seen if version(t) != old]
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


def version(tensor: Tensor) -> int:
    """Torch's count of changes in place."""
    return 0 if tensor.is_inference() else tensor._version
