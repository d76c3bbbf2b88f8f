"""Run a region of a block chunk by chunk, so that inner tensors of only one chunk are alive, in either pass.

    forward     for every chunk c:  y[c] = f(x[c], w)            s += g(x[c], w)
    backward    for every chunk c:  recompute f and g;           dx[c] += x'(dy[c], ds)    dw += w'(dy[c], ds)

x is cut; w is read whole by every chunk: parameters, keys, values. y, s, dx and dw are allocated before the first chunk
and written in place, so nothing is concatenated at the end. The last chunk may be smaller. y equals eager's bit for bit
if kernels do not depend on the length. In s, dw and where chunks overlap in dx, only the order of summation differs.
Sums over chunks of 16-bit numbers are accumulated in 32 bits, and rounded once.

Only the region's inputs are kept between the passes. Without gradients, no autograd.Function is used.

Known limits: no second derivative, no forward-mode derivative, no vmap.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_amp._torch import FakeTensor
from lightning_amp.derivatives import refuse_second
from lightning_amp.errors import ModelError
from lightning_amp.footprint.chain.block_call import Autocast, autocast_again, autocast_now
from lightning_amp.footprint.operator_rates import standing_for

Put = Callable[[int, Tensor], None]
NARROW = (torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """One result of a region.

    Attributes:
        name: Name in the generated code.
        shape: Full shape.
        stride: Strides of the full result in eager mode, so that later views of it are possible.
        dtype: Dtype of the full result and of every chunk.
        dim: Dim along which chunks are concatenated; None if they are summed.
        needs_grad: Whether eager's result would have a gradient.
        over: Index of the input that the result overwrites, which no later row reads; None for new memory.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    dim: int | None
    needs_grad: bool
    over: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkedRegion:
    """A region of a block that can be called; made by `lower`.

    Attributes:
        compute: Function `compute(put, size, *pieces)` that runs the operators of one chunk of `size` positions. It
            passes result k to `put(k, value)`.
        length: Total number of positions. A cut dim may be a multiple of it, with several entries per position.
        bounds: First position and size of every chunk.
        input_dims: Dim along which each input is cut; None if every chunk reads it whole.
        outputs: Results of the region, in the order of `put`.
        reach: Positions on either side of a chunk that are computed with it; their results are dropped.
    """

    compute: Callable[..., None]
    length: int
    bounds: tuple[tuple[int, int], ...]
    input_dims: tuple[int | None, ...]
    outputs: tuple[Output, ...]
    reach: int = 0

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        """Return the region's full results.

        Args:
            inputs: One tensor for every entry of `input_dims`.

        Raises:
            ModelError: A chunk's result has another shape or dtype than planned; or, in the backward pass, a second
                derivative is requested.
        """
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
            return list(_Chunked.apply(self, *inputs))  # type: ignore[no-untyped-call]
        return run_region(self, inputs)

    def some(self, inputs: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
        """Yield the chunks to run: all, or the first two, the middle and the last one if tensors are fake.

        The middle one has all its neighbours, and represents all chunks that are not run.
        """
        if not isinstance(inputs[0], FakeTensor):
            yield from self.bounds
            return
        middle = self.bounds[len(self.bounds) // 2]
        found = tuple(dict.fromkeys((*self.bounds[:2], middle, self.bounds[-1])))
        for bound in found:
            with standing_for(1 + len(self.bounds) - len(found) if bound == middle else 1):
                yield bound

    def reached(self, start: int, size: int) -> tuple[int, int]:
        """Return the first position that a chunk computes, and their number."""
        first = max(0, start - self.reach)
        return first, min(self.length, start + size + self.reach) - first

    def own(self, k: int, value: Tensor, start: int, size: int) -> Tensor:
        """Return result k of a chunk without the positions that only its neighbours need."""
        output = self.outputs[k]
        if not self.reach or output.dim is None:
            return value
        each = output.shape[output.dim] // self.length
        return value.narrow(output.dim, (start - self.reached(start, size)[0]) * each, size * each)

    def piece(self, tensor: Tensor, dim: int | None, start: int, size: int) -> Tensor:
        """Return the view of an input or result that belongs to one chunk."""
        if dim is None:
            return tensor
        each = tensor.shape[dim] // self.length
        return tensor.narrow(dim, start * each, size * each)


def run_region(region: ChunkedRegion, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Run the forward pass without keeping anything for a backward pass."""
    wholes = []
    for output in region.outputs:
        if output.over is not None:
            wholes.append(inputs[output.over].view(output.shape))
            continue
        # only sums accumulate; concatenated chunks are written once, so 16 bits suffice
        dtype = torch.float32 if output.dim is None and output.dtype in NARROW else output.dtype
        whole = torch.empty_strided(output.shape, output.stride, dtype=dtype, device=inputs[0].device)
        # zeros if chunks are summed
        wholes.append(whole if output.dim is not None else whole.zero_())
    pairs = tuple(zip(inputs, region.input_dims, strict=True))
    with _autocast(_autocast_of(inputs)):
        for start, size in region.some(inputs):

            def put(k: int, value: Tensor, start: int = start, size: int = size) -> None:
                output = region.outputs[k]
                place = region.piece(wholes[k], output.dim, start, size)
                value = region.own(k, value, start, size)
                # another shape would be broadcast silently; in a float64 check both dtypes are float64
                if value.shape != place.shape or value.dtype not in (output.dtype, place.dtype):
                    raise ModelError(
                        f"a chunk of {output.name!r} should have the shape {tuple(place.shape)!r} and {output.dtype!r},"
                        f" found {tuple(value.shape)!r} and {value.dtype!r}: its operators do not follow the plan's"
                        " dims; leave the region out of the plan, and report the operators"
                    )
                if output.dim is None:
                    place.add_(value)
                else:
                    place.copy_(value)

            first, n = region.reached(start, size)
            region.compute(put, n, *[region.piece(tensor, dim, first, n) for tensor, dim in pairs])
    return [whole.to(output.dtype) for whole, output in zip(wholes, region.outputs, strict=True)]


class _Chunked(torch.autograd.Function):
    """Autograd function of a region, as described in the module docstring."""

    @staticmethod
    def forward(ctx: Any, region: ChunkedRegion, *inputs: Tensor) -> tuple[Tensor, ...]:
        # a result that the loss does not read gets None instead of full-size zeros as its gradient
        ctx.set_materialize_grads(False)
        ctx.region, ctx.autocast = region, _autocast_of(inputs)
        # not attributes of ctx: only saved tensors have their versions checked. Otherwise chunks would be recomputed
        # from the new values of an input that was changed in place before the backward pass
        ctx.save_for_backward(*inputs)
        results = run_region(region, inputs)
        pairs = zip(results, region.outputs, strict=True)
        ctx.mark_non_differentiable(*(result for result, output in pairs if not output.needs_grad))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        names = ", ".join(repr(output.name) for output in ctx.region.outputs)
        refuse_second(
            f"a region that runs in chunks ({names}), whose gradients are numbers by then; leave chunks out of this"
            " module"
        )
        inputs = ctx.saved_tensors
        needed = ctx.needs_input_grad[1:]
        sums = [_Gradient(t, d) if n else None for t, d, n in zip(inputs, ctx.region.input_dims, needed, strict=True)]
        with torch.enable_grad(), _autocast(ctx.autocast):
            for start, size in ctx.region.some(inputs):
                _backward_of_chunk(ctx.region, inputs, sums, grads, start, size)
        return None, *(None if total is None else total.value() for total in sums)


def _backward_of_chunk(
    region: ChunkedRegion,
    inputs: Sequence[Tensor],
    sums: Sequence["_Gradient | None"],
    grads: Sequence[Tensor | None],
    start: int,
    size: int,
) -> None:
    """Recompute one chunk, and add each of its gradients to the sums as soon as autograd has computed it."""
    pieces, (first, n) = [], region.reached(start, size)
    for tensor, dim, total in zip(inputs, region.input_dims, sums, strict=True):
        pieces.append(total.piece(region, first, n) if total else region.piece(tensor, dim, first, n).detach())
    results: dict[int, Tensor] = {}
    region.compute(results.__setitem__, n, *pieces)
    wanted, given = [], []
    for k, (output, grad) in enumerate(zip(region.outputs, grads, strict=True)):
        # popped, so that a result without gradient is freed here, with its autograd graph
        result = region.own(k, results.pop(k), start, size)
        if grad is not None and result.requires_grad:
            wanted.append(result)
            given.append(region.piece(grad, output.dim, start, size))
    # all leaves, including those that no result depends on: with `allow_unused` their hooks are not called, and their
    # sums are not changed
    leaves = [piece for piece in pieces if piece.requires_grad]
    if wanted:
        torch.autograd.grad(wanted, leaves, given, allow_unused=True)


class _Gradient:
    """Gradient of one input, allocated before the first chunk.

    A sum over chunks of 16-bit numbers is accumulated in 32 bits.
    """

    def __init__(self, of: Tensor, dim: int | None) -> None:
        self._of, self._dim, self._found = of, dim, False
        # neighbours aside, a cut input gets one chunk's gradient at each place: as in eager mode, 16 bits suffice
        wide = dim is None and of.dtype in NARROW
        self._sum = torch.zeros_like(of, dtype=torch.float32 if wide else of.dtype)

    def piece(self, region: ChunkedRegion, start: int, size: int) -> Tensor:
        """Return a leaf for a chunk to read, whose gradient is added to the sum and freed as soon as it is complete.

        The hook returns the piece itself to autograd in place of the gradient, which takes no memory and is never read.
        Otherwise the gradients of all parameters would be held until the end of the chunk, in addition to their sums.
        """
        piece = region.piece(self._of.detach(), self._dim, start, size)
        leaf = piece.detach().requires_grad_()
        place = region.piece(self._sum, self._dim, start, size)

        def add(grad: Tensor) -> Tensor:
            place.add_(grad)
            self._found = True
            return piece

        leaf.register_hook(add)  # type: ignore[no-untyped-call]
        return leaf

    def value(self) -> Tensor | None:
        """Return the gradient; None if no chunk had one, as in eager mode."""
        return self._sum.to(self._of.dtype) if self._found else None


def _autocast_of(inputs: Sequence[Tensor]) -> Autocast:
    return autocast_now({tensor.device.type for tensor in inputs})


def _autocast(found: Autocast) -> AbstractContextManager[None]:
    """Enter autocast without its cache, which would keep casts of every chunk's pieces, or casts without gradients."""
    return autocast_again(found, cache_enabled=False)
