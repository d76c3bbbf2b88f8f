"""Run a streamed stratum: its cells in micro-batches, and its key in fewer operators.

    nll(key, u, all cells) = sum over micro-batches of nll(key, u of its cells, its cells)

Exact: every cell's log-likelihood depends on the key, its own u and its own counts, so values and gradients are sums
over cells. Saved: scores and likelihood [B, F_k] exist for one micro-batch only. The gradient of the key [N, D] is
computed for every micro-batch and summed. Collectives of the decode and of the softmax (S2, S5, nodes) run once per
micro-batch; their number depends on the number of cells, which is the same in a model group. An argument of a stratum
has one row per cell, or is the same for all: one row, no dimension, a number, a name, None.

    qk, val = p A^T, p B^T         dp = g + dqk A + dval B, summed inside the products; g is the gradient of p as value
    key' = [key +] a gelu(b)       da, db = dkey' gelu(b), dkey' a gelu'(b), the two halves of one tensor

This applies to keys that are found by probing to be one of the forms of stratum_keys.py. With hooks on a projection, a
bias, another class of layer or autocast, a key runs unchanged. Saved are two sums of gradients of p, and a copy of the
gradient of ff's output.

Legend: cell (B), anchor (N), dim (D).
Known limits: one backward pass per loss only, and second derivatives raise an error. A check of the loss (`check_sum`)
cannot detect changes below its tolerance, a term independent of cells that is 0 at first, or anything in a loss that
draws random numbers or is only simulated. Because of the check, hooks inside run four more times, and counters in the
stratum count that often.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_amp._torch import gelu_backward, has_no_values, multiplies_in_tf32
from lightning_amp.derivatives import first_only
from lightning_amp.errors import InstallError
from lightning_amp.footprint.forward_overrides import HOOKS
from lightning_amp.shapes import PerAnchor, PerCell, Scalar
from lightning_amp.techniques.checks.key import attention_form
from lightning_amp.techniques.checks.same_function import mismatch
from lightning_amp.techniques.precomputed_gradients import (
    Gradients,
    add,
    gradients,
    leaf,
    wants_gradients,
    with_gradients,
)

PER_CELL = ("library", "log_weight")
"""Arguments with one row per cell that may need a gradient, in addition to u."""


def in_microbatches(sum_over_cells: object, *, size: int) -> nn.Module:
    """Return a module that sums over cells in micro-batches of `size` cells."""
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise InstallError(f"stream got cells={size!r}; a micro-batch has a whole number of cells, at least 1")
    taken = "takes micro-batches of cells already" if isinstance(sum_over_cells, CellMicrobatches) else ""
    problem = taken or mismatch(sum_over_cells, {"": torch.tensor(63.0)}, _run)
    if problem:
        raise InstallError(
            f"stream does not support a stratum whose child `sum_over_cells` {problem}; only a module without state"
            " that returns nll(key, u, **cells) can be replaced: move the rest to the stratum, or leave 'stream' out"
        )
    return CellMicrobatches(size, known=getattr(sum_over_cells, "known", True))


class CellMicrobatches(nn.Module):
    """Sum a stratum's likelihood over micro-batches; made by `in_microbatches`. Unless `known`, the loss is checked."""

    def __init__(self, size: int, *, known: bool = True) -> None:
        super().__init__()
        self.size = size
        self.known = known

    def extra_repr(self) -> str:
        """Shown by `print(module)`."""
        return f"size={self.size}"

    def forward(
        self, nll: Callable[..., Scalar], key: PerAnchor, u: PerCell, *, parameters: Iterable[Tensor], **cells: Tensor
    ) -> Scalar:
        """Return the sum over cells of `nll(key, u, **cells)`; one micro-batch is alive at a time."""
        odd = {name: n for name, value in cells.items() if (n := _n_rows(value)) not in (1, len(u))}
        if odd:
            raise InstallError(
                f"a stratum cannot be streamed in micro-batches of its {len(u)!r} cells: an argument "
                f"has {odd!r} rows, and one row per cell, or one for all, is allowed; make the rest a "
                "parameter or a buffer of the stratum, or leave 'stream' out"
            )
        if not self.known and len(u) > max(1, self.size):
            check_sum(nll, key, u, lambda part: _rows(cells, part))
            self.known = True
        if len(u) <= self.size:
            # nothing to split, and the stratum's own backward pass follows
            return _at_least_float32(nll(key, u, **cells))
        shared, per_cell = [key, *parameters], [u, *(cells[name] for name in PER_CELL)]
        if not wants_gradients([*shared, *per_cell]):
            parts = [nll(key, u[part], **_rows(cells, part)) for part in self._parts(len(u))]
            return torch.stack(parts).sum()

        def compute(needed: Sequence[bool]) -> tuple[Tensor, Gradients]:
            n = len(shared)
            # the key is detached, so that its own graph waits until the gradients of all micro-batches are summed;
            # `nll` itself reads the tables, so they are passed unchanged
            leaves = [leaf(key, needed[0]), *shared[1:]]
            values: list[Tensor] = []
            # gradients of shared arguments are summed, those of per-cell arguments concatenated
            of_shared: Gradients = [None] * n
            of_cells: list[Gradients] = []
            for part in self._parts(len(u)):
                own = [leaf(_row(t, part), need) for t, need in zip(per_cell, needed[n:], strict=True)]
                arguments = _rows(cells, part) | dict(zip(PER_CELL, own[1:], strict=True))
                value = nll(leaves[0], own[0], **arguments)
                found = gradients([value], [*leaves, *own], [None])
                of_shared = list(map(add, of_shared, found[:n]))
                of_cells.append(found[n:])
                values.append(_at_least_float32(value.detach()))
            return torch.stack(values).sum(), [*of_shared, *map(_join, per_cell, zip(*of_cells, strict=True))]

        return with_gradients(compute, [*shared, *per_cell])

    def _parts(self, n: int) -> list[slice]:
        return [slice(start, min(start + self.size, n)) for start in range(0, n, self.size)] or [slice(0, 0)]


def _at_least_float32(value: Tensor) -> Tensor:
    # a sum over many strata and micro-batches would lose digits in 16 bits
    if value.dtype in (torch.float32, torch.float64):
        # without a call to torch, which would be one more operator
        return value
    return value.to(torch.promote_types(value.dtype, torch.float32))


def _n_rows(value: object) -> int:
    """Return the number of rows; 1 for a value without rows, which is the same for all cells."""
    if isinstance(value, str):
        # len() is its letters, which are not rows even if there are as many as cells
        return 1
    try:
        return len(cast(Sized, value))
    except TypeError:
        # a number, None, or a tensor without dimensions
        return 1


def _row(tensor: Tensor, part: slice) -> Tensor:
    return tensor if _n_rows(tensor) == 1 else tensor[part]


def _rows(cells: dict[str, Tensor], part: slice) -> dict[str, Tensor]:
    return {name: _row(value, part) for name, value in cells.items()}


def _join(tensor: Tensor, parts: Sequence[Tensor | None]) -> Tensor | None:
    """Concatenate the gradients of micro-batches, or sum them if all cells share one row."""
    found = [part for part in parts if part is not None]
    if not found or _n_rows(tensor) == 1:
        return reduce(add, found, None)
    return torch.cat(found)


def _run(sum_over_cells: Any) -> dict[str, Tensor]:
    key, u = torch.arange(6.0).view(3, 2), torch.arange(4.0).view(2, 2)

    def nll(key: Tensor, u: Tensor, **rows: Tensor) -> Tensor:
        return (u @ key.T).sum() + rows["x"]

    return {"": sum_over_cells(nll, key, u, parameters=(), x=key.sum())}


TOLERANCE = 1e-3
HALF_TOLERANCE = 0.05
"""Relative tolerance of losses whose products are rounded to 16 bits or TF32."""


def check_sum(
    nll: Callable[..., Scalar], key: PerAnchor, u: PerCell, rows: Callable[[slice], Mapping[str, Any]]
) -> None:
    """Check that the loss of two cells is the sum of both, and that the loss of no cells is 0.

    The check runs once, without gradients. A mean over cells, and cells that are centred or normalised by each other,
    make nll(cells a and b) differ from nll(cell a) + nll(cell b). Terms independent of cells (a penalty on weights) are
    the loss of no cells.
    """
    if has_no_values(u):
        return
    with torch.random.fork_rng([u.device] if u.is_cuda else []), torch.no_grad():
        drawn = _random_states(u.device)
        none = 0.0
        # if the loss of no cells raises or is not a number, that says nothing about sums
        with suppress(Exception):
            none = float(nll(key, u[:0], **rows(slice(0, 0))))
        parts = (slice(0, 2), slice(0, 1), slice(1, 2))
        both, first, second = (float(nll(key, u[part], **rows(part))) for part in parts)
        if not all(map(torch.equal, drawn, _random_states(u.device))):
            return
    tf32 = u.is_cuda and multiplies_in_tf32()
    half = u.dtype.itemsize < 4 or tf32 or torch.is_autocast_enabled(u.device.type)
    room = (HALF_TOLERANCE if half else TOLERANCE) * (abs(both) + abs(first) + abs(second))
    # exactly 0: a penalty may be much smaller than the losses, and would be counted once per micro-batch
    term = math.isfinite(none) and none != 0
    # not `<=`: a NaN loss says nothing about sums
    if not (term or abs(both - (first + second)) > room):
        return
    found = f"no cells is {none!r}" if term else f"two cells is {both!r}, of each {first!r} and {second!r}"
    raise InstallError(
        "a stratum cannot be streamed in micro-batches of cells, because its loss is no sum "
        f"over cells: that of {found}. Use "
        "reduction='sum', normalise cells before the decoder, add what is not of a cell (a "
        "penalty on weights) to the loss outside of the decoder, or leave 'stream' out"
    )


def _random_states(device: torch.device) -> list[Tensor]:
    own = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.get_rng_state(), *own]


def streamed_key(key: nn.Module | None) -> "StreamedKey | None":
    """Return the replacement for a key's `forward`; None if the key runs unchanged."""
    form = None if key is None or "forward" in vars(key) else attention_form(key)
    return None if form is None else StreamedKey(*form)


@dataclass(frozen=True)
class StreamedKey:
    """Compute a key in fewer operators; made by `streamed_key`."""

    projected: bool  # whether the values are the projected anchors, instead of the normalised ones
    residual: bool  # whether the output of the gated layer is added to its input

    def __call__(self, key: Any, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the key, and the projected anchors."""
        if not _plain(key, v):
            found: tuple[Tensor, Tensor] = type(key).forward(key, v)
            return found
        p = key.prenorm(v)
        qk, val, p = _Project.apply(p, key.qk.weight, key.value.weight)  # type: ignore[no-untyped-call]
        met = val + key.attention(qk, qk, val if self.projected else p)
        gated = _Gate.apply(key.ff(key.postnorm(met)), met if self.residual else None)  # type: ignore[no-untyped-call]
        return gated, val


def _plain(key: Any, v: Tensor) -> bool:
    """Whether the projections are plain products with their weights."""
    kind = v.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return False
    return all(
        type(layer) is nn.Linear
        and layer.bias is None
        and "forward" not in vars(layer)
        and not any(getattr(layer, hooks) for hooks in HOOKS)
        for layer in (key.qk, key.value)
    )


class _Project(torch.autograd.Function):
    """Compute both projections of p, and return p itself, so that its gradients are summed in the backward pass."""

    @staticmethod
    def forward(ctx: Any, p: Tensor, of_qk: Tensor, of_value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(p, of_qk, of_value)
        return F.linear(p, of_qk), F.linear(p, of_value), p.view_as(p)

    @staticmethod
    @first_only("a streamed stratum; leave 'stream' out")
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        p, *weights = ctx.saved_tensors
        *of_rows, found = grads
        pairs = [(g, w) for g, w in zip(of_rows, weights, strict=True) if g is not None]
        for i, (g, weight) in enumerate(pairs if ctx.needs_input_grad[0] else ()):
            if found is None:
                found = g @ weight
            else:
                # out of place: the incoming gradient may be used elsewhere too
                found = torch.addmm(found, g, weight) if i == 0 else found.addmm_(g, weight)
        needed = ctx.needs_input_grad[1:]
        of_weights = (g.T @ p if g is not None and need else None for g, need in zip(of_rows, needed, strict=True))
        return found, *of_weights


class _Gate(torch.autograd.Function):
    """Multiply the first half of the channels by the GELU of the second half, and add the key if given."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, key: Tensor | None) -> Tensor:
        a, b = h.chunk(2, dim=-1)
        gate = F.gelu(b)
        ctx.save_for_backward(h, gate)
        return a * gate if key is None else torch.addcmul(key, a, gate)

    @staticmethod
    @first_only("a streamed stratum; leave 'stream' out")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        h, gate = ctx.saved_tensors
        a, b = h.chunk(2, dim=-1)
        of_h = torch.empty_like(h)
        of_a, of_b = of_h.chunk(2, dim=-1)
        torch.mul(grad, gate, out=of_a)
        torch.mul(grad, a, out=of_b)
        # in place: an elementwise kernel reads an element before it writes it
        gelu_backward(of_b, b, grad_input=of_b)
        return of_h, grad if ctx.needs_input_grad[1] else None
