"""Define batches of cells and the seeds of their random numbers; make a batch from a text that lists its shapes.

    BATCH    PART, or parts separated by commas; "4x128," is a tuple of one
    PART     [NAME=]SIZES[:DTYPE]; with names the batch is a dict, otherwise a tensor or a tuple
    SIZES    4x128; DTYPE is float32 by default

The values are the same in every run: floats between 0 and 1, integers 0, which is a valid index for any table, and
booleans True. Nested batches are not supported.
"""

import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NotRequired, TypeAlias, TypedDict

import numpy as np
import torch
from jaxtyping import Float, Int64
from numpy.typing import NDArray
from torch import Tensor

from lightning_amp._torch import has_no_values
from lightning_amp.data.sparse_counts import SparseCounts
from lightning_amp.errors import DataError


class CellRows(TypedDict):
    """Cells of one modality as stored in its file."""

    x: Float[Tensor, "cell feature"] | SparseCounts
    library: Float[Tensor, "cell 1"]
    batch: Int64[Tensor, " cell"]
    index: Int64[Tensor, " cell"]


class CellBatch(CellRows):
    """Cells of one modality in one step; `draw`, in [0, 2**31), is the seed of a cell's random numbers.

    `repeated` exists only in evaluation, on a rank without cells: it gets a cell of another rank again.
    """

    draw: Int64[Tensor, " cell"]
    repeated: NotRequired[bool]


Batch: TypeAlias = dict[str, CellBatch]


def parts_in(batch: object) -> Iterator[object]:
    """Yield the leaves of any nesting of mappings, lists, tuples and dataclasses."""
    inside: Iterable[object]
    if isinstance(batch, Mapping):
        inside = batch.values()
    elif isinstance(batch, list | tuple):
        inside = batch
    elif is_dataclass(batch) and not isinstance(batch, type):
        inside = [getattr(batch, field.name) for field in fields(batch)]
    else:
        yield batch
        return
    for part in inside:
        yield from parts_in(part)


def tensors_in(batch: object) -> Iterator[Tensor]:
    """Yield the tensors among the leaves, and the tensors of sparse counts."""
    for part in parts_in(batch):
        if isinstance(part, Tensor):
            yield part
        elif isinstance(part, SparseCounts):
            yield from part.tensors()


def integers_in(batch: object) -> list[Tensor]:
    """Return the dense tensors of integers among the leaves that share memory with no other tensor of the batch."""
    memory = Counter(_memory_of(x) for x in tensors_in(batch) if _has_memory(x))
    leaves = (part for part in parts_in(batch) if isinstance(part, Tensor) and _has_memory(part))
    of_integers = (x for x in leaves if not x.is_floating_point() and not x.is_complex())
    return [x for x in of_integers if memory[_memory_of(x)] == 1]


def _has_memory(tensor: Tensor) -> bool:
    # a wrapper subclass, such as a sharded tensor, has only that of the tensors inside
    return tensor.layout is torch.strided and not hasattr(tensor, "__tensor_flatten__")


def _memory_of(tensor: Tensor) -> int:
    storage = tensor.untyped_storage()
    # two storages may have one memory, as of tensors that `torch.from_numpy` makes of one array
    return id(storage) if has_no_values(tensor) else storage.data_ptr() or id(storage)


def dense_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    """Return the dense tensors that store a dense or sparse tensor; none for another layout."""
    if tensor.layout is torch.strided:
        return (tensor,)
    if tensor.layout is torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()


def datamodule_of(trainer: Any) -> Any:
    """Return the data module of a Trainer's run, or None: `trainer.datamodule` stays that of an earlier one where
    loaders are given. Before a run, it is what `trainer.datamodule` was set to by hand.
    """
    selector = None if trainer is None else trainer._data_connector._datahook_selector
    return getattr(trainer, "datamodule", None) if selector is None else selector.datamodule


DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
_PART = re.compile(r"(?:(?P<name>\w+)=)?(?P<sizes>[1-9]\d*(?:x[1-9]\d*)*)(?::(?P<dtype>\w+))?")

Shaped = Tensor | tuple[Tensor, ...] | dict[str, Tensor]


def batch_of_shapes(text: str) -> Shaped:
    """Make the batch that a text describes, in the format above."""
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


def mix(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix the bits of 64-bit integers with a bijection (SplitMix64, Steele et al. 2014)."""
    value = value + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def hash_integers(*values: int) -> int:
    """Hash a few integers of any size to one in [0, 2**63), the same on every machine and rank."""
    state = np.zeros(1, dtype=np.uint64)  # an array of one: numpy warns when scalars wrap, arrays just wrap
    for value in values:
        state = mix(state ^ np.array([value % 2**64], dtype=np.uint64))
    return int(state[0] >> np.uint64(1))


def hash_text(text: str) -> int:
    """Hash a name to a 32-bit integer; unlike `hash` it is the same in every process."""
    return zlib.crc32(text.encode())


def draw_keys(draw_key: int, modality: str, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the seed of each cell's random numbers, in [0, 2**31), [cell]: a function of step, modality and row only.

    It does not depend on the position in the batch or the rank, so a batch split over any number of ranks draws
    the same numbers. A cell twice in one step draws the same numbers twice.
    """
    step = np.uint64(hash_integers(draw_key, hash_text(modality)))
    # rows are mixed before the xor with the step: xors of small numbers collide
    return (mix(mix(rows.astype(np.uint64)) ^ step) >> np.uint64(33)).astype(np.int64)
