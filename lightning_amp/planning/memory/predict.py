"""The memory model's answer for strategies: S1 to S5 it knows, the others say what the model looks like after them."""

from collections.abc import Iterable

from lightning_amp.errors import PlanError
from lightning_amp.planning.memory.peak_model import Estimate, estimate
from lightning_amp.planning.plan.axes import Axes
from lightning_amp.planning.plan.model_shape import ModelShape
from lightning_amp.planning.plan.strategies import STRATEGIES


def predict(
    shape: ModelShape, strategies: Iterable[str], *, model_ranks: int = 1, axes: Axes | None = None
) -> Estimate:
    """Predict the memory of a training step on one rank.

    Args:
        shape: The model, with the cells of one rank's batch.
        strategies: Ids of the strategies in force.
        model_ranks: R.
        axes: The decoder's choices; None for those of the strategies' usual rules.

    Raises:
        PlanError: `shape_after` of a strategy from outside returned something else than a shape.
    """
    chosen = tuple(strategies)
    for strategy in chosen:
        after = STRATEGIES[strategy].shape_after
        shape = shape if after is None else after(shape, model_ranks)
        if not isinstance(shape, ModelShape):
            raise PlanError(
                f"shape_after of {strategy} returned {shape!r}; allowed is a ModelShape: return"
                " dataclasses.replace(shape, ...) with the sizes that it changes"
            )
    return estimate(shape, axes or Axes.of(chosen), model_ranks=model_ranks, wide_layers="S2" in chosen)
