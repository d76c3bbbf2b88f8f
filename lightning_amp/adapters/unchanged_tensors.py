"""How tensors and autograd were when a computation was asked for that runs later.

Eager code computes at the call. What computes later gives the same only if no tensor was changed in place since, if
gradients are made only where they were enabled all the time, and if the same tensors need them.

Known limit: a change through `tensor.data` is not counted by torch, and not seen.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_amp.errors import InstallError

SHOWN = 3


class Moment:
    """The moment at which it is made.

    Args:
        tensors: What the computation will read, by name; what is no tensor is left out.
    """

    def __init__(self, tensors: Iterable[tuple[str, object]]) -> None:
        self._enabled = torch.is_grad_enabled()
        self._seen = [
            (name, value, version(value), value.requires_grad)
            for name, value in tensors
            if isinstance(value, Tensor)
        ]

    def graded(self) -> bool:
        """Whether gradients were enabled then and are now."""
        return self._enabled and torch.is_grad_enabled()

    def check(self, what: str, *, graded: bool) -> None:
        """Refuse to compute something else than at that moment.

        Args:
            what: What is computed now, for the message.
            graded: Whether it is computed with gradients; else it does not matter which tensors need one.

        Raises:
            InstallError: A tensor was changed in place, or needs a gradient now and did not then, or the reverse.
        """
        changes = [
            f"{name} was changed in place" for name, value, old, _ in self._seen if version(value) != old
        ]
        if graded:
            changes += [
                f"requires_grad of {name} was {needed!r} and is {value.requires_grad!r}"
                for name, value, _, needed in self._seen
                if value.requires_grad != needed
            ]
        if changes:
            raise InstallError(
                f"{what} was asked for, and since its call {', '.join(changes[:SHOWN])}"
                f"{f' and {len(changes) - SHOWN} more' if len(changes) > SHOWN else ''}; a decoder under a plan"
                " computes when log_prob(x) is summed, and would compute something else now than at the call: take"
                " log_prob(x).mean() or .sum() before anything changes, or train with strategies='S1'"
            )


def version(tensor: Tensor) -> int:
    """Torch's count of changes in place."""
    return 0 if tensor.is_inference() else tensor._version
