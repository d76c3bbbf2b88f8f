"""Operators of a step as autograd and Python dispatch them: what a device launches, and what its host waits for.

    operators     all that are dispatched: each is Python and C++ work on the host
    kernels       those that make or change a tensor: no views, no bare allocations
    views         those that only give a part of a tensor, or another form of it, back
    host syncs    those for which the host must see numbers that a device has computed, or that copy numbers of
                  pageable memory to it

A device may launch several kernels for one operator, or none for an empty tensor.

Known limits: what libraries do below the dispatcher is not seen. Where all tensors are on the CPU, copies between
devices are not seen, unless they are of Python's or NumPy's numbers, and `tolist` and `numpy` need no operator.
"""

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

import lightning_amp
from lightning_amp._torch import PythonNode, TorchDispatchMode, autograd_node, tree_leaves

PACKAGE = str(Path(lightning_amp.__file__).parent)
ALLOCATING = (
    "empty",
    "empty_like",
    "empty_permuted",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "_unsafe_view",
    "promote_types",
)
"""Operators that return new memory, or a view, and compute nothing."""
WAITING = (
    "_local_scalar_dense",
    "is_nonzero",
    "nonzero",
    "equal",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "lift_fresh",
    "lift_fresh_copy",
)
"""Operators that read numbers on the host; lift_fresh: `torch.tensor` has made numbers of Python's on the host."""
INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")
COPYING = ("copy_", "_to_copy", "_copy_from")


class OperatorCounter(TorchDispatchMode):
    """Counts the operators of what runs in its context.

    Attributes:
        operators: All that were dispatched.
        kernels: Those that make or change a tensor.
        bytes: What the kernels read and write.
        parts: Kernels by the module of lightning_amp that asked for them, "autograd" where torch did.
        lines: All operators by name, by whether they are kernels, and by the line of lightning_amp that asked for them,
            or the node of the graph whose backward pass did.
        host_syncs: Operators that the host waits for, by name and by the line of lightning_amp that asked for them.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators = self.kernels = self.bytes = 0
        self.parts: Counter[str] = Counter()
        self.lines: Counter[tuple[str, bool, str]] = Counter()
        self.host_syncs: Counter[tuple[str, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.operators += 1
        tensors = [leaf for leaf in tree_leaves((args, kwargs, found)) if isinstance(leaf, Tensor)]
        if _waits(func, args, tensors):
            self.host_syncs[func._opname, _asked_by(lines=True)] += 1
        kernel = not _is_view(func) and func._opname not in ALLOCATING
        self.lines[func._opname, kernel, _node() or _asked_by(lines=True)] += 1
        if kernel:
            self.kernels += 1
            self.bytes += sum(map(_moved, tensors))
            self.parts[_asked_by()] += 1
        return found


def _node() -> str:
    """The node of torch's whose backward pass runs; "" outside of one, and in one that is written in Python."""
    node = autograd_node()
    return "" if node is None or isinstance(node, PythonNode) else str(node.name())


def _is_view(operator: Any) -> bool:
    returns = operator._schema.returns
    # what returns nothing, as foreach operators in place do, is no view
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _waits(operator: Any, args: tuple[Any, ...], tensors: list[Tensor]) -> bool:
    name = operator._opname
    if name in INDEXING:
        # a mask has as many places as it has true ones, which the host must know to make the result
        return any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
    if name in COPYING:
        return len({t.device for t in tensors}) > 1
    return name in WAITING


def _moved(tensor: Tensor) -> int:
    """Bytes of different numbers: what is broadcast is read once."""
    n_bytes = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        n_bytes *= size if stride else 1
    return n_bytes


def _asked_by(*, lines: bool = False) -> str:
    """The innermost module of the package on the stack."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(PACKAGE):
            return f"{file[len(PACKAGE) + 1 :]}:{frame.f_lineno}" if lines else Path(file).stem
        frame = frame.f_back
    return "outside"
