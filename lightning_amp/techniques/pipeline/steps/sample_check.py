"""Check that samples pass the blocks independently, so that micro-batches compute what their batch does.

    first        n samples                       f(x_1 .. x_k, x_k+1 .. x_n)
    second       the first k of them, others     f(x_1 .. x_k, y_k+1 .. y_n)

Both have the same shapes and draw the same random numbers, so what is computed of the first k samples has to be the
same. It is not where a statistic of the batch is in it (a normalisation by hand, a limit for all samples together),
where a block returns something of the batch besides its samples (its own loss), and where samples are not in one
dimension in their order. And a block whose attributes are others after the second pass than after the first one
remembers samples, or counts its calls.

Known limit: samples that are all equal show nothing.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_amp._torch import tree_leaves
from lightning_amp.errors import DataError, ModelError
from lightning_amp.techniques.checks.same_function import close
from lightning_amp.techniques.pipeline.run.run_stages import Stages, Work, dim_of_samples
from lightning_amp.techniques.pipeline.steps.micro_batches import alike
from lightning_amp.techniques.pipeline.steps.step_attributes import differing, values_of

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
            work = Work(step=partial(_with, step, own), seeds=[seed])
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
        told = [_difference(*row, same=same, size=sizes[0]) for row in zip(*leaves, strict=True)]
        return next((DataError(_refusal(one)) for one in told if one), None)


def _with(step: Callable[[Any], Any], batch: Any, _: int) -> Any:
    return step(batch)


def _difference(whole: Any, part: Any, first: Any, second: Any, *, same: int, size: int) -> str:
    """What of a result differs, though its samples are the same; "" for nothing."""
    if not isinstance(first, Tensor):
        return "" if first == second else f"{first!r} and {second!r}"
    if whole.shape != part.shape:
        dim = dim_of_samples(whole, part)
        if dim is None or part.shape[dim] % size:
            return f"tensors of shape {tuple(part.shape)!r}, and {tuple(whole.shape)!r} for the batch"
        kept = same * (part.shape[dim] // size)
        first, second = (own.narrow(dim, 0, min(kept, own.shape[dim])) for own in (first, second))
    if not close(first, second, rtol=ROUNDING.get(first.dtype, HALF), equal_nan=True):
        return f"other values for the same samples, in a tensor of shape {tuple(part.shape)!r}"
    return ""


def _refusal(told: str) -> str:
    return (
        "the batch cannot be cut into micro-batches: blocks compute a sample from other samples of the batch (BatchNorm"
        f" by hand, a loss within a block), which in a micro-batch are others; found {told}. Let blocks compute each"
        " sample separately, set micro_batches=1, or leave 'pipeline' out"
    )
