"""Know the results of element-wise operators for all lengths, once they were found for one.

Strata of a decoder, or batches, differ in length, and torch's rules in Python take milliseconds for an `out=`. The
dtype of a result depends on the dtypes, numbers of dims and numbers of the arguments alone. Its layout follows from the
shapes in two cases, and others are computed:

    an argument is written, and has the shape of the result      the result is that argument
    all arguments are contiguous, and of one shape; or one of    the result is contiguous
    them has the result's shape, of at least two in each dim
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
UNTAGGED = {_aten.softplus, _aten.softplus_backward, _aten.complex}
"""Element-wise operators that torch does not tag as such."""
Result = int | str | torch.dtype
"""The argument that is the result, by its index or name, or the dtype of a new tensor."""
_known: dict[Any, Result] = {}


class ByElement:
    """A call of an element-wise operator.

    Attributes:
        shape: Shape of its result; None if that does not follow from the rules above.
    """

    def __init__(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.shape: tuple[int, ...] | None = None
        if not (torch.Tag.pointwise in func.tags or func.overloadpacket in UNTAGGED):
            return
        values = [*args, *kwargs.values()]
        tensors = [value for value in values if isinstance(value, Tensor)]
        shape = max((tensor.shape for tensor in tensors), key=len)
        n, shapes = len(shape), [tensor.shape for tensor in tensors]
        full = tuple(max(one[i - n] for one in shapes if len(one) >= n - i) for i in range(n))
        fits = all(m in (1, full[i - len(one)]) for one in shapes for i, m in enumerate(one))
        written = [i for i, one in enumerate(func._schema.arguments) if one.alias_info is not None]
        alike = all(one == shapes[0] for one in shapes)
        if not fits or min(full) < (1 if alike else 2) or len(written) > 1:
            return
        if any(isinstance(value, list | tuple) for value in values):
            return
        if written:
            # in place, or one named argument
            target = next(iter(kwargs.values())) if kwargs else args[written[0]]
            if tuple(target.shape) != full:
                return
        elif full not in map(tuple, shapes) or not all(tensor.is_contiguous() for tensor in tensors):
            return
        described = [
            (one.dtype, one.dim(), one.requires_grad) if isinstance(one, Tensor) else (type(one), one) for one in values
        ]
        self.shape = full
        self._key = func, tuple(kwargs), torch.get_default_dtype(), torch.is_inference_mode_enabled(), *described

    @property
    def stride(self) -> tuple[int, ...]:
        """Strides of a new result."""
        assert self.shape is not None, "it is known"
        found = [1]
        for n in reversed(self.shape[1:]):
            found.insert(0, found[0] * n)
        return tuple(found)

    def gives(self, result: Tensor) -> bool:
        """Whether a new result has the layout that follows from the shapes."""
        return self.shape is not None and (tuple(result.shape), result.stride()) == (self.shape, self.stride)

    def known(self) -> Result | None:
        """Return the result that was found for other lengths; None if there is none."""
        return None if self.shape is None else _known.get(self._key)

    def keep(self, result: Result) -> None:
        """Keep a result for other lengths."""
        if self.shape is not None:
            _known[self._key] = result
