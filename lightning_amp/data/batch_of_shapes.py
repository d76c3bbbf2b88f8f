"""Make a batch from a text with its shapes: "4x128", "4x3x32x32,4:int64" or "ids=4x128:int64,labels=4:int64".

    BATCH    PART, or parts with commas between them; "4x128," is a tuple of one
    PART     [NAME=]SIZES[:DTYPE]; with names the batch is a dict, else one tensor or a tuple
    SIZES    4x128; DTYPE is float32 unless it is given

Tensors have the same values each time: floats between 0 and 1, integers 0, which is a valid index of anything, and
booleans True. Nested batches cannot be written.
"""

import re

import torch
from torch import Tensor

from lightning_amp.errors import DataError

DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
_PART = re.compile(r"(?:(?P<name>\w+)=)?(?P<sizes>[1-9]\d*(?:x[1-9]\d*)*)(?::(?P<dtype>\w+))?")

Shaped = Tensor | tuple[Tensor, ...] | dict[str, Tensor]


def batch_of_shapes(text: str) -> Shaped:
    """Make the batch.

    Raises:
        DataError: The text does not describe a batch.
    """
    whole = text.strip().removesuffix(",")
    names, tensors = list[str](), list[Tensor]()
    numbers = torch.Generator().manual_seed(0)
    for part in whole.split(","):
        found = _PART.fullmatch(part.strip())
        if found is None or (dtype := found["dtype"] or "float32") not in DTYPES:
            raise DataError(
                f"the shapes of a batch are {text!r}, of which {part.strip()!r} is no [NAME=]SIZES[:DTYPE];"
                f" sizes are written as 4x128, and DTYPE is one of {', '.join(DTYPES)}; write for example '4x128', "
                "'4x3x32x32,4:int64' or 'ids=4x128:int64'"
            )
        sizes = [int(size) for size in found["sizes"].split("x")]
        kind = getattr(torch, dtype)
        if kind.is_floating_point:
            tensors.append(torch.rand(sizes, generator=numbers).to(kind))
        else:
            tensors.append(torch.full(sizes, kind == torch.bool, dtype=kind))
        names.append(found["name"] or "")
    if any(names) and (not all(names) or len(set(names)) < len(names)):
        raise DataError(
            f"the shapes of a batch are {text!r}, with the names {names!r}; give every part its own name for a dict,"
            " or no part a name for a tuple"
        )
    if any(names):
        return dict(zip(names, tensors, strict=True))
    return tensors[0] if len(tensors) == 1 and not text.strip().endswith(",") else tuple(tensors)
