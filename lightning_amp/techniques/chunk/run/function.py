"""Run a region of a block chunk by chunk: only one chunk's inner tensors are alive at a time, in either pass.

    forward     for every chunk c:  y[c] = f(x[c], w)            s += g(x[c], w)
    backward    for every chunk c:  f and g of x[c], w again;    dx[c] += x'(dy[c], ds)    dw += w'(dy[c], ds)

x is what is cut and w what every chunk needs whole: parameters, keys, values. y, s, dx and dw are made once, before the
first chunk, and written in place: nothing is put together at the end. The last chunk may be smaller. Exact: y equals
eager's bit for bit where kernels do not depend on the length; in s, dw and where chunks meet in dx only the order of
sums differs. Sums over chunks of 16-bit numbers are kept in 32 bits, and rounded once.

Kept between the passes are the region's inputs alone. Where no gradient is wanted there is no autograd.Function.

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
        name: In the generated code.
        shape: Of the whole.
        stride: As eager lays the whole out, so that later views of it are possible.
        dtype: Of the whole and of every chunk.
        dim: Dim along which chunks lie side by side; None where they are added up.
        needs_grad: Whether eager's result would have a gradient.
        over: Input in whose memory the whole lies, which nothing reads later; None for new memory.
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
    """A region of a block that is ready to run; made by `lower`.

    Attributes:
        compute: Called as `compute(put, size, *pieces)`: the operators of one chunk of `size` positions. It hands
            result k to `put(k, value)`.
        length: Positions in all. A tensor that has several numbers per position has a multiple of it along its dim.
        bounds: First position and size of every chunk.
        input_dims: Of every input the dim along which it is cut; None where every chunk gets it whole.
        outputs: What `put` is given.
        reach: Positions on either side of a chunk that it computes as well; `put` drops what it makes of them.
    """

    compute: Callable[..., None]
    length: int
    bounds: tuple[tuple[int, int], ...]
    input_dims: tuple[int | None, ...]
    outputs: tuple[Output, ...]
    reach: int = 0

    def __call__(self, *inputs: Tensor) -> list[Tensor]:
        """The region's results, whole.

        Args:
            inputs: One for every entry of `input_dims`.

        Raises:
            ModelError: A chunk's result has another shape than the plan says; in the backward pass, a second
                derivative.
        """
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs):
            return list(_Chunked.apply(self, *inputs))  # type: ignore[no-untyped-call]
        return run_region(self, inputs)

    def some(self, inputs: Sequence[Tensor]) -> Iterator[tuple[int, int]]:
        """The chunks to run: all; of tensors without values two, one in the middle, which has all its neighbours and
        stands for all others, and the last.
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
        """The first position that a chunk computes, and how many."""
        first = max(0, start - self.reach)
        return first, min(self.length, start + size + self.reach) - first

    def own(self, k: int, value: Tensor, start: int, size: int) -> Tensor:
        """Of result k of a chunk its own positions."""
        output = self.outputs[k]
        if not self.reach or output.dim is None:
            return value
        each = output.shape[output.dim] // self.length
        return value.narrow(output.dim, (start - self.reached(start, size)[0]) * each, size * each)

    def piece(self, tensor: Tensor, dim: int | None, start: int, size: int) -> Tensor:
        """The part of an input or result that belongs to one chunk, as a view."""
        if dim is None:
            return tensor
        each = tensor.shape[dim] // self.length
        return tensor.narrow(dim, start * each, size * each)


def run_region(region: ChunkedRegion, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The forward pass without anything kept for a backward pass."""
    wholes = []
    for output in region.outputs:
        if output.over is not None:
            wholes.append(inputs[output.over].view(output.shape))
            continue
        dtype = torch.float32 if output.dim is None and output.dtype in NARROW else output.dtype
        whole = torch.empty_strided(output.shape, output.stride, dtype=dtype, device=inputs[0].device)
        # zeros where chunks are added
        wholes.append(whole if output.dim is not None else whole.zero_())
    pairs = tuple(zip(inputs, region.input_dims, strict=True))
    with _autocast(_autocast_of(inputs)):
        for start, size in region.some(inputs):

            def put(k: int, value: Tensor, start: int = start, size: int = size) -> None:
                output = region.outputs[k]
                place = region.piece(wholes[k], output.dim, start, size)
                value = region.own(k, value, start, size)
                # one of another shape would be broadcast in silence; where all is computed in 64 bits, so is the place
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
    """`run_region` with the backward pass of the module docstring."""

    @staticmethod
    def forward(ctx: Any, region: ChunkedRegion, *inputs: Tensor) -> tuple[Tensor, ...]:
        # no zeros of the whole size for results that the loss does not read
        ctx.set_materialize_grads(False)
        ctx.region, ctx.autocast = region, _autocast_of(inputs)
        # not as attributes of ctx: only saved tensors have their versions checked, and an input that is changed in
        # place before the backward pass would be computed again with its new values
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
    """Compute one chunk again, and add its gradients to the sums as soon as autograd has each of them."""
    pieces, (first, n) = [], region.reached(start, size)
    for tensor, dim, total in zip(inputs, region.input_dims, sums, strict=True):
        pieces.append(total.piece(region, first, n) if total else region.piece(tensor, dim, first, n).detach())
    results: dict[int, Tensor] = {}
    region.compute(results.__setitem__, n, *pieces)
    wanted, given = [], []
    for k, (output, grad) in enumerate(zip(region.outputs, grads, strict=True)):
        # popped: the graph of a result that is not wanted ends here, and its tensors with it
        result = region.own(k, results.pop(k), start, size)
        if grad is not None and result.requires_grad:
            wanted.append(result)
            given.append(region.piece(grad, output.dim, start, size))
    # also a leaf that no wanted result depends on: `allow_unused` leaves its hook uncalled, and its sum without a
    # number
    leaves = [piece for piece in pieces if piece.requires_grad]
    if wanted:
        torch.autograd.grad(wanted, leaves, given, allow_unused=True)


class _Gradient:
    """The gradient of one input, in memory that is there before the first chunk.

    A sum over chunks of 16-bit numbers has 32 bits.
    """

    def __init__(self, of: Tensor, dim: int | None) -> None:
        self._of, self._dim, self._found = of, dim, False
        # of what is cut, a place has the gradient of one chunk (neighbours aside): as in eager, nothing is added up in
        # 16 bits
        wide = dim is None and of.dtype in NARROW
        self._sum = torch.zeros_like(of, dtype=torch.float32 if wide else of.dtype)

    def piece(self, region: ChunkedRegion, start: int, size: int) -> Tensor:
        """What a chunk reads: a leaf, whose gradient is added to the sum and let go of as soon as it is whole.

        Autograd is handed the piece in its place, which costs nothing and is never read: the gradients of all
        parameters would else wait for the chunk's end, besides their sums.
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
        """The gradient; None where no chunk had one, as eager has it."""
        return self._sum.to(self._of.dtype) if self._found else None


def _autocast_of(inputs: Sequence[Tensor]) -> Autocast:
    return autocast_now({tensor.device.type for tensor in inputs})


def _autocast(found: Autocast) -> AbstractContextManager[None]:
    """Without a cache, which would keep a copy of every chunk's pieces, and one of a parameter without gradients."""
    return autocast_again(found, cache_enabled=False)
