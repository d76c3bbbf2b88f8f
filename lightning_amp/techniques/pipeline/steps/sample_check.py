"""Split a batch into micro-batches, and check that samples are independent, so that these compute what the batch does.

Micro-batches are runs of samples whose sizes differ by one at most. The check runs two batches:

    first        n samples                       f(x_1 .. x_j, x_j+1 .. x_k, x_k+1 .. x_n)
    second       same middle, other samples      f(y_1 .. y_j, x_j+1 .. x_k, y_k+1 .. y_n)

Both have the same shapes and draw the same random numbers, so the results for the samples in the middle must be equal.
They differ if blocks use a statistic of the batch (a manual normalisation, a threshold over all samples), if a sample
depends on those before or after it (a recurrence over the samples, a difference from the first one), if a block returns
a value of the batch in addition to its samples (such as a loss), or if samples are not ordered along one dimension. If
the attributes of a block differ after the second pass from those after the first one, the block stores samples, or
counts its calls.

Known limit: if all samples are equal, nothing is detected.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, get_args

import torch
from lightning.fabric.utilities.apply_func import apply_to_collection  # type: ignore[attr-defined]
from torch import Tensor, nn

from lightning_amp._torch import tree_leaves
from lightning_amp.data.batch import integers_in
from lightning_amp.data.cut_batch import Samples, rows_of
from lightning_amp.errors import DataError, ModelError
from lightning_amp.techniques.checks.same_function import close
from lightning_amp.techniques.pipeline.run.run_stages import Stages, Work, dim_of_samples
from lightning_amp.techniques.pipeline.steps.step_attributes import differing, values_of


def alike(batch: Any, size: int, total: int) -> tuple[Any, Any, range]:
    """Make two batches whose samples in the middle are equal and whose other samples differ.

    Args:
        batch: As for `cut`.
        size: Samples of a micro-batch: the two batches have as many, or three.
        total: Samples of the batch, two or more.

    Returns:
        The two batches, and the positions of the equal samples.
    """
    # Other samples are on both sides of those that are compared: a recurrence over samples affects those that follow a
    # change, and a reverse recurrence those that precede it.
    n = max(3, size)
    same = range(n // 3, n - n // 3)
    # samples of other micro-batches if there are enough; a shift by one never only permutes them
    step = n if total >= 2 * n else 1
    first = [i % total for i in range(n)]
    second = [i if place in same else (i + step) % total for place, i in enumerate(first)]
    return rows_of(batch, first), rows_of(batch, second), same


class Given:
    """Pass a batch to several calls of a step, each of which sees the batch unchanged.

    Every call gets copies of dictionaries, lists and dataclasses, and of integer tensors, into which steps write (such
    as labels to be ignored). `write` copies what the calls have written into the batch.
    """

    def __init__(self) -> None:
        self._written: list[tuple[Tensor, Tensor]] = []

    def call(self, step: Callable[..., Any], batch: Any, *rest: Any) -> Any:
        """Call the step with the batch, and return its result."""
        copies: list[tuple[Tensor, Tensor]] = []
        # a write into one of two tensors that share memory changes both, so these are not copied, and writes raise
        copied = {*map(id, integers_in(batch))}

        def own(values: Any) -> Any:
            if id(values) not in copied:
                return values
            copies.append((values, values.clone()))
            return copies[-1][1]

        try:
            return step(apply_to_collection(batch, get_args(Samples), own), *rest)
        finally:
            # tensors of inference mode have no versions
            self._written += [
                (values, copy)
                for values, copy in copies
                if (not torch.equal(values, copy) if copy.is_inference() else copy._version)
            ]

    def write(self) -> None:
        """Write into the batch what the calls have written into their copies, in the order of the calls."""
        for values, copy in self._written:
            values.copy_(copy)


ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-4}
HALF = 3e-2
"""Difference that counts as rounding for other dtypes, relative to the largest number."""


class SampleCheck:
    """Check once per run that samples are independent.

    Args:
        stages: Stages of this rank.
        blocks: Blocks by name.
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
        """Run two micro-batches forward, and return the error in their results, if any; on the last stage only.

        Args:
            step: Calls the user's step with a batch, without side effects.
            batch: Batch of the step.
            part: Its first micro-batch.
            sizes: Samples of all micro-batches.
            seed: Seed of the random numbers.

        Raises:
            ModelError: A block of this rank keeps state between calls.
        """
        first, second, same = alike(batch, sizes[0], sum(sizes))
        results, left = [], []
        # one seed for both: equal samples then draw equal numbers, and must have equal results
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
    """Describe how results for equal samples differ; "" if they do not."""
    if not isinstance(first, Tensor):
        return "" if first == second else f"{first!r} and {second!r}"
    if whole.shape != part.shape:
        dim = dim_of_samples(whole, part)
        each = 0 if dim is None else part.shape[dim] // size
        # every sample must have the same number of entries
        if dim is None or part.shape[dim] != each * size or first.shape[dim] != each * (same.start + same.stop):
            return f"tensors of shape {tuple(part.shape)!r}, and {tuple(whole.shape)!r} for the batch"
        first, second = (own.narrow(dim, each * same.start, each * len(same)) for own in (first, second))
    if not close(first, second, rtol=ROUNDING.get(first.dtype, HALF), equal_nan=True):
        return f"other values for the same samples, in a tensor of shape {tuple(part.shape)!r}"
    return ""


TOLERANCE = {torch.float64: 1e-10, torch.float32: 2e-5}
HALF_TOLERANCE = 1e-2
"""For other dtypes, and under autocast: relative difference of two losses that counts as rounding."""


def single(value: Any) -> Any:
    """Convert a tensor of half precision to single precision; anything else is returned unchanged."""
    half = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if half else value


def compare(loss: Tensor, losses: list[Tensor], weights: Any, *, rounds: bool) -> DataError | None:
    """Return an error if the loss of a batch is not the weighted mean of its micro-batches' losses.

    With `rounds` the losses were computed under autocast.
    """
    mean = float(sum(weight * float(own) for weight, own in zip(weights, losses, strict=True)))
    found = float(loss)
    rounding = HALF_TOLERANCE if rounds else TOLERANCE.get(loss.dtype, HALF_TOLERANCE)
    # written so that nan passes if both are nan, because one process would train on it too
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
    """Context manager: set a module to evaluation mode if `evaluates`, and restore the modes at the end."""
    modes = [(part, part.training) for part in module.modules()]
    if evaluates:
        module.eval()
    try:
        yield
    finally:
        for part, training in modes:
            part.training = training
