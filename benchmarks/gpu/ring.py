"""Blocks of ring attention on the device against torch's attention, forward and backward: values, and time.

The ring's ranks are virtual: one process computes the blocks of all of them, one after the other, with the functions
that the ring calls, and sends nothing. The reference is attention in float64 on the device.

    error    norm of the difference of the result or a gradient, relative to that of the reference; the largest
    torch's  the same of torch's own attention in this type
"""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.device import median_seconds
from benchmarks.gpu.runner import Work, first_line
from lightning_amp.sharding.attention.blocks import block_backward, block_forward, kernel_of, merged
from lightning_amp.sharding.attention.ring import seen_of
from lightning_amp.sharding.attention.written_out import Block

TYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
FORMS = ("all", "causal", "masked", "added")
RANKS, TIMES = 3, 4.0
LEAST = {torch.float32: 1e-5, torch.float64: 1e-12}
"""A smaller error is rounding; else one of some `TIMES` torch's own."""
SHAPES = ((64, 384), (80, 333), (33, 333), (5, 4), (256, 130), (320, 130))
"""Features of a head, and rows."""
TIMED, TINY_TIMED = ((2, 16, 8192, 64), (2, 16, 8192, 128)), ((1, 2, 64, 8),)
Results = tuple[Tensor, ...]


def run(work: Work) -> None:
    """Compare all types, forms and shapes, then time one block."""
    wrong = list[str]()
    for dtype in TYPES:
        for form in FORMS:
            for dim, rows in SHAPES[1:3] if work.tiny else SHAPES:
                name = f"{_short(dtype)}, {form}, {dim} features, {rows} rows"
                if not work.has_time(name):
                    continue
                try:
                    row = compared(work, dtype, form, dim, rows)
                except Exception as error:
                    work.record.note(f"{name}: **failed**, {first_line(error)}")
                    wrong.append(name)
                    continue
                work.record.row(**row)
                if not row["error"] <= max(LEAST.get(dtype, 0.0), TIMES * row["torchs_error"]):
                    wrong.append(name)
    for shape in TINY_TIMED if work.tiny else TIMED:
        for dtype in (torch.bfloat16, torch.float32):
            for causal in (False, True):
                if work.has_time(f"time of {_short(dtype)}", 3):
                    work.record.row(**timed(work, dtype, shape, causal=causal))
    if wrong:
        raise AssertionError(f"{wrong!r} failed, or are wrong by more than rounding")


def compared(work: Work, dtype: torch.dtype, form: str, dim: int, rows: int) -> dict[str, Any]:
    """Return a row: the errors of a ring and of torch's attention."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = _drawn((2, 3, rows, dim), dtype, work.device, generator)
    causal, mask = form == "causal", None
    if form in ("masked", "added"):
        drawn = torch.rand(2, 1, rows, rows, generator=generator)
        mask = (drawn < 0.7 if form == "masked" else drawn.to(dtype)).to(work.device)
        if form == "masked":
            mask[..., 0] = True
    wide = mask.double() if form == "added" and mask is not None else mask
    exact = plain(*(x.double() for x in (q, k, v, grad)), wide, causal)
    own, torchs = virtual_ring(q, k, v, grad, mask, causal), plain(q, k, v, grad, mask, causal)
    first = q[:, :, : -(-rows // RANKS)]
    return {
        "type": _short(dtype),
        "form": form,
        "features": dim,
        "rows": rows,
        "kernel": kernel_of(Block(first, first, first, mask, causal, 1.0)).name,
        "error": _error(own, exact),
        "torchs_error": _error(torchs, exact),
    }


def virtual_ring(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, mask: Tensor | None, causal: bool) -> Results:
    """Return result and gradients of attention in blocks of `RANKS` ranks."""
    scale, n = q.shape[3] ** -0.5, q.shape[2]
    ends = [n * rank // RANKS for rank in range(RANKS + 1)]
    parts = [range(*pair) for pair in pairwise(ends)]
    results, of_q = list[Tensor](), list[Tensor]()
    of_k, of_v = torch.zeros_like(k), torch.zeros_like(v)
    for own in parts:
        local = [x[:, :, own.start : own.stop] for x in (q, grad)]
        of_rank = mask if mask is None else mask[..., own.start : own.stop, :]

        def blocks(own: range = own, of_rank: Tensor | None = of_rank) -> Iterator[tuple[range, bool, Tensor | None]]:
            for columns in parts:
                how = seen_of(of_rank, causal, own, columns, q.device)
                if how is not None:
                    yield columns, *how

        so_far: tuple[Tensor, Tensor] | None = None
        for columns, square, seen in blocks():
            found = block_forward(Block(local[0], _of(k, columns), _of(v, columns), seen, square, scale))
            so_far = found if so_far is None else merged(*so_far, *found)
        assert so_far is not None, "the own columns are seen"
        out, log_sums = so_far[0].to(q.dtype), so_far[1]
        total = torch.zeros_like(local[0])
        for columns, square, seen in blocks():
            block = Block(local[0], _of(k, columns), _of(v, columns), seen, square, scale)
            added = block_backward(block, local[1], out, log_sums)
            for whole, part in zip((total, _of(of_k, columns), _of(of_v, columns)), added, strict=True):
                whole += part
        results.append(out)
        of_q.append(total)
    return torch.cat(results, 2), torch.cat(of_q, 2), of_k, of_v


def plain(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, mask: Tensor | None, causal: bool) -> Results:
    """Return result and gradients of torch's attention."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*leaves, mask, is_causal=causal)
    return out.detach(), *torch.autograd.grad(out, leaves, grad)


def timed(work: Work, dtype: torch.dtype, shape: tuple[int, ...], *, causal: bool) -> dict[str, Any]:
    """Return a row: seconds of one block forward and backward, and of torch's attention."""
    q, k, v, grad = _drawn(shape, dtype, work.device, torch.Generator().manual_seed(0))
    scale = shape[3] ** -0.5

    def block() -> None:
        whole = Block(q, k, v, None, causal, scale)
        out, sums = block_forward(whole)
        block_backward(whole, grad, out, sums)

    seconds = partial(median_seconds, device=work.device, most=10, within=1.0)
    own, torchs = seconds(block), seconds(partial(plain, q, k, v, grad, None, causal))
    shown = " x ".join(map(str, shape))
    return {"type": _short(dtype), "shape": shown, "causal": causal, "seconds": own, "torchs_seconds": torchs}


def _drawn(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Results:
    batch, heads, rows, dim = shape
    made = torch.randn(4, batch, rows, heads, dim, generator=generator).to(device, dtype)
    return tuple(made.transpose(2, 3))


def _of(x: Tensor, columns: range) -> Tensor:
    return x[:, :, columns.start : columns.stop]


def _error(found: Results, exact: Results) -> float:
    pairs = zip(found, exact, strict=True)
    return max(float((a.double() - b).norm() / b.norm().clamp(min=1e-30)) for a, b in pairs)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
