"""Find writes to storages that left for the host which no version counter of autograd shows, as to `x.data`.

Autograd would use the new values in the backward pass; the copy on the host has the old ones. Fake tensors have no
values to compare: only a real step is refused.
"""

from typing import Any

from torch import Tensor

from lightning_amp._torch import TorchDispatchMode, version_of
from lightning_amp.errors import ModelError
from lightning_amp.footprint.live_bytes import tensors_written
from lightning_amp.techniques.offload.entries import Left
from lightning_amp.techniques.offload.moves import Moves

UNSEEN = (
    "offload cannot run this step: {name} writes to a tensor that autograd has saved, and autograd does not see it, as"
    " with x.data; write with torch.no_grad() instead, or leave offload out"
)


class UnseenWrites(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that raises a ModelError after such a write."""

    def __init__(self, moves: Moves) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._moves = moves
        self._written = list[tuple[str, Left, int, Tensor]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and look at the counters of what the one before wrote: they change after it has returned."""
        self._check()
        kwargs = kwargs or {}
        # an operator without schema is a higher-order one, whose operators come here too
        if getattr(getattr(func, "_schema", None), "is_mutable", False):
            for tensor in tensors_written(func, args, kwargs):
                left = self._moves.left_of(tensor)
                if left is not None:
                    # held until then: the operator's caller may drop it
                    self._written.append((str(func), left, version_of(left.watched.counter), tensor))
        return func(*args, **kwargs)

    def __exit__(self, *args: Any) -> None:
        """End the step."""
        super().__exit__(*args)  # type: ignore[no-untyped-call]
        if args[0] is None:
            self._check()

    def _check(self) -> None:
        written, self._written = self._written, []
        for name, left, before, _ in written:
            # parts of a storage may have counters of their own: what was saved is compared
            if version_of(left.watched.counter) == before and self._moves.differs(left):
                raise ModelError(UNSEEN.format(name=name))
