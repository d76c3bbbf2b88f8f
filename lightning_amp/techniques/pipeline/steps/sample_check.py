"""Split a batch into micro-batches, and check that these compute what the batch does: samples are independent.

Micro-batches are runs of samples whose sizes differ by one at most.

    first        n samples                       f(x_1 .. x_j, x_j+1 .. x_k, x_k+1 .. x_n)
    second       those in the middle, others     f(y_1 .. y_j, x_j+1 .. x_k, y_k+1 .. y_n)

Both have the same shapes and draw the same random numbers, so what is computed of the samples in the middle has to be
the same. It is not where a statistic of the batch is in it (a normalisation by hand, a limit for all samples together),
where a sample reads those before it or after it (a recurrence over the samples, a difference from the first one), where
a block returns something of the batch besides its samples (its own loss), and where samples are not in one dimension in
their order. And a block whose attributes are others after the second pass than after the first one remembers samples,
or counts its calls.

Known limit: samples that are all equal show nothing.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from itertools import pairwise
from typing import Any, get_args

import numpy as np
import torch
from lightning.fabric.utilities.apply_func import apply_to_collection  # type: ignore[attr-defined]
from torch import Tensor, nn

from lightning_amp._torch import tree_leaves
from lightning_amp.data.batch import parts_in, tensors_in
from lightning_amp.data.sparse_counts import SparseCounts
from lightning_amp.errors import DataError, ModelError
from lightning_amp.techniques.checks.same_function import close
from lightning_amp.techniques.pipeline.run.run_stages import Stages, Work, dim_of_samples
from lightning_amp.techniques.pipeline.steps.step_attributes import differing, values_of

Samples = Tensor | SparseCounts | np.ndarray
"""What has a first axis of samples."""
SAME = (bool, int, float, complex, str, bytes, type(None))
"""What every micro-batch gets as it is."""


def cut(batch: Any, parts: int) -> tuple[list[Any], list[int]]:
    """The micro-batches, and their samples; as many as there are samples where these are fewer than `parts`.

    Raises:
        DataError: Not all tensors of the batch have one first axis, or something else in it has its length.
    """
    if parts == 1:
        return [batch], [1]
    found = list(parts_in(batch))
    shapes = [tuple(part.shape) for part in found if isinstance(part, get_args(Samples))]
    strange = sorted({type(part).__name__ for part in found if not isinstance(part, (*get_args(Samples), *SAME))})
    lengths = {shape[0] for shape in shapes if shape}
    if len(lengths) != 1 or not all(lengths) or strange:
        raise DataError(
            f"the batch cannot be cut into {parts!r} micro-batches: it has tensors of the shapes "
            f"{shapes!r} and {strange!r}; allowed are numbers, texts and tensors, and all tensors "
            "with a dimension must have the same first one, that of the samples: bring the batch "
            "into that form, or set micro_batches=1"
        )
    n = lengths.pop()
    _refuse_lists(batch, n)
    parts = min(parts, n)
    ends = [(j * n) // parts for j in range(parts + 1)]
    runs = [slice(first, end) for first, end in pairwise(ends)]

    return [_of(batch, run) for run in runs], [run.stop - run.start for run in runs]


def alike(batch: Any, size: int, total: int) -> tuple[Any, Any, range]:
    """Two batches whose samples in the middle are the same and whose others are not.

    Args:
        batch: As for `cut`.
        size: Of a micro-batch: how many samples they have, or three.
        total: Samples of the batch, two or more.

    Returns:
        The two, and the places of the samples that are the same.
    """
    # With other samples both before and after those that are compared: a recurrence over samples shows in those that
    # follow a change, and its reverse in those that precede one.
    n = max(3, size)
    same = range(n // 3, n - n // 3)
    # samples of other micro-batches where there are enough; a step of one never gives the same samples in another order
    step = n if total >= 2 * n else 1
    first = [i % total for i in range(n)]
    second = [i if place in same else (i + step) % total for place, i in enumerate(first)]
    return _of(batch, first), _of(batch, second), same


class Given:
    """Hands a batch to calls of a step, each of which finds it as it was.

    Dictionaries, lists and dataclasses are others in every call, and so are tensors of integers, into which steps write
    (labels that are not to be learned). `write` lets the batch have what the calls have written.
    """

    def __init__(self) -> None:
        self._written: list[tuple[Tensor, Tensor]] = []

    def call(self, step: Callable[..., Any], batch: Any, *rest: Any) -> Any:
        """What the step returns for the batch."""
        copies: list[tuple[Tensor, Tensor]] = []
        tensors = [values for values in tensors_in(batch) if values.layout is torch.strided]
        memory = Counter(values.untyped_storage().data_ptr() for values in tensors)

        def own(values: Any) -> Any:
            if not isinstance(values, Tensor) or values.layout is not torch.strided:
                return values
            # what is written into one of two that share memory is in the other one too, and stays refused
            if values.is_floating_point() or values.is_complex() or memory[values.untyped_storage().data_ptr()] > 1:
                return values
            copies.append((values, values.clone()))
            return copies[-1][1]

        try:
            return step(apply_to_collection(batch, get_args(Samples), own), *rest)
        finally:
            # in inference mode there are no versions
            self._written += [
                (values, copy)
                for values, copy in copies
                if (not torch.equal(values, copy) if copy.is_inference() else copy._version)
            ]

    def write(self) -> None:
        """Write into the batch what the calls have written into theirs, in their order."""
        for values, copy in self._written:
            values.copy_(copy)


def _of(batch: Any, run: slice | list[int]) -> Any:
    def own(values: Any) -> Any:
        if isinstance(values, SparseCounts) and isinstance(run, list):
            values = values.to_dense()
        return values[run] if values.shape else values

    return apply_to_collection(batch, get_args(Samples), own)


def _refuse_lists(batch: Any, n: int) -> None:
    """A list of texts or of numbers, one for each sample, would be given whole to every micro-batch."""
    inside: Sequence[Any] = batch if isinstance(batch, list | tuple) else ()
    has_samples = any(isinstance(part, get_args(Samples)) and part.shape for part in parts_in(batch))
    if inside and not has_samples and len(inside) == n:
        raise DataError(
            f"the batch cannot be cut into micro-batches: it has a list of {n!r} values without a "
            f"dimension, such as {inside[0]!r}, perhaps one for each sample; make it a tensor, take it "
            "out of the batch, or set micro_batches=1"
        )
    if isinstance(batch, Mapping):
        inside = list(batch.values())
    elif is_dataclass(batch):
        inside = [getattr(batch, field.name) for field in fields(batch)]
    for value in inside:
        _refuse_lists(value, n)


ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-4}
HALF = 3e-2
"""Of other types: difference that counts as rounding, relative to the largest number."""


class SampleCheck:
    """Made once for a run.

    Args:
        stages: Of this rank.
        blocks: By name.
    """

    def __init__(self, stages: Stages, blocks: Mapping[str, nn.Module]) -> None:
        self._stages = stages
        own = [range(stages.spans[now.stage].first, stages.spans[now.stage].end) for now in stages.forward_only]
        mine = {i for run in own for i in run}
        self._own = {
            f"{name}.{inner}" if inner else name: part
            for i, (name, block) in enumerate(blocks.items())
            if i in mine
            for inner, part in block.named_modules()
        }

    def look(
        self, step: Callable[[Any], Any], batch: Any, part: Any, sizes: Sequence[int], *, seed: int
    ) -> DataError | None:
        """Run two micro-batches forward; what is wrong with their results, known to the last stage.

        Args:
            step: Calls the user's step with a batch, and leaves no trace.
            batch: Of the step.
            part: Its first micro-batch.
            sizes: Of all micro-batches.
            seed: Of the random numbers.

        Raises:
            ModelError: A block of this rank remembers something.
        """
        first, second, same = alike(batch, sizes[0], sum(sizes))
        results, left = [], []
        for own in (first, second):
            work = Work(step=partial(lambda batch, _: step(batch), own), seeds=[seed])
            results.append(self._stages.run(self._stages.forward_only, work).results[0])
            left.append(values_of(self._own))
        name = differing(*left)
        if name:
            raise ModelError(
                f"pipeline: every forward pass of a block changes {name!r}, once for every micro-batch: change it in"
                " on_train_batch_end, or leave 'pipeline' out"
            )
        if not self._stages.is_last:
            return None
        shapes = (self._stages.placeholders(partial(step, own)) for own in (batch, part))
        leaves = map(tree_leaves, (*shapes, *results))
        unlike = (_difference(*row, same=same, size=sizes[0]) for row in zip(*leaves, strict=True))
        found = next(filter(None, unlike), "")
        if not found:
            return None
        return DataError(
            "the batch cannot be cut into micro-batches: blocks compute a sample from other samples of the batch"
            " (BatchNorm by hand, a recurrence over samples, a loss within a block), which in a micro-batch are others;"
            f" found {found}. Let blocks compute each sample separately, set micro_batches=1, or leave 'pipeline' out"
        )


def _difference(whole: Any, part: Any, first: Any, second: Any, *, same: range, size: int) -> str:
    """What of a result differs, though its samples are the same; "" for nothing."""
    if not isinstance(first, Tensor):
        return "" if first == second else f"{first!r} and {second!r}"
    if whole.shape != part.shape:
        dim = dim_of_samples(whole, part)
        each = 0 if dim is None else part.shape[dim] // size
        # a sample has as many entries whatever their number is
        if dim is None or part.shape[dim] != each * size or first.shape[dim] != each * (same.start + same.stop):
            return f"tensors of shape {tuple(part.shape)!r}, and {tuple(whole.shape)!r} for the batch"
        first, second = (own.narrow(dim, each * same.start, each * len(same)) for own in (first, second))
    if not close(first, second, rtol=ROUNDING.get(first.dtype, HALF), equal_nan=True):
        return f"other values for the same samples, in a tensor of shape {tuple(part.shape)!r}"
    return ""


TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}
HALF_TOLERANCE = 1e-2
"""Of other types, and under autocast: difference of two losses that counts as rounding, relative to the larger."""


def single(value: Any) -> Any:
    """A tensor of half precision in single precision; anything else as it is."""
    half = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if half else value


def compare(loss: Tensor, losses: list[Tensor], weights: Any, *, rounds: bool) -> DataError | None:
    """What is wrong with the loss of a batch, if it is no mean of the losses of its micro-batches with these weights.

    With `rounds` they are of autocast.
    """
    mean = float(sum(weight * float(own) for weight, own in zip(weights, losses, strict=True)))
    found = float(loss)
    rounding = HALF_TOLERANCE if rounds else TOLERANCE.get(loss.dtype, HALF_TOLERANCE)
    # written so that nan, which one process would train on too, passes where both are
    if abs(found - mean) <= rounding * max(abs(found), *(abs(float(own)) for own in losses)):
        return None
    if found != found and mean != mean:
        return None
    return DataError(
        f"a batch was trained on in {len(losses)!r} micro-batches, whose losses have a mean over samples of"
        f" {mean!r}, and the loss of the batch is {found!r}: it is no mean over samples. A mean over entries"
        " that are not masked has other weights; a sum, a contrastive loss and one that draws random"
        " numbers cannot be cut. Nothing was changed: take schedule='gpipe', which computes the loss of the"
        " whole batch at once, or micro_batches=1, or leave 'pipeline' out"
    )


@contextmanager
def evaluating(module: nn.Module, evaluates: bool) -> Iterator[None]:
    """A module in evaluation mode, if it `evaluates`."""
    modes = [(part, part.training) for part in module.modules()]
    if evaluates:
        module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
