"""What does not go together with what was installed; said before the first step, because it would train wrongly.

    sharded parameters    loss scaling, which lets a rank skip a step by what its own shard holds; averaged models
    replaced layers       callbacks that have chosen the layers that were replaced, such as pruning

Optimisers are looked at in sharded_state.py. Known limit: callbacks are recognised by the name of one of their classes.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning.pytorch.plugins import Precision
from torch import nn

from lightning_amp.errors import PlanError

if TYPE_CHECKING:
    from lightning_amp.parallel.install import Installed

RAW_BACKWARD = (
    "Gradients reached an optimizer step without having been averaged over ranks: in manual optimization call"
    " self.manual_backward(loss), not loss.backward(). They are averaged now, every rank counted equally, but"
    " gradient clipping before this point has seen the gradients of one rank only."
)

AVERAGED = ("StochasticWeightAveraging", "WeightAveraging")
KEEPS_LAYERS = ("ModelPruning",)


def check_precision(installed: "Installed", precision: Precision) -> None:
    """Refuse loss scaling with sharded parameters: an overflow in one shard would let one rank alone skip the step.

    Raises:
        PlanError: The precision plugin has a gradient scaler.
    """
    if installed.sharded and getattr(precision, "scaler", None) is not None:
        raise PlanError(
            f"precision={getattr(precision, 'precision', '16-mixed')!r} was asked for, whose loss scaling skips steps"
            f" rank by rank, together with S2, which has sharded {_names(installed)}; use precision='bf16-mixed' or"
            " '32-true', or leave S2 out"
        )


def check_callbacks(installed: "Installed", callbacks: Sequence[object]) -> None:
    """Refuse callbacks that hold the module as it was before.

    Raises:
        PlanError: Averaging of a module with shards, or pruning of a module whose layers were replaced.
    """
    replaced = [swap.fqn for swap in installed.swaps if swap.old is not None and _owns_parameters(swap.old)]
    for callback in callbacks:
        if installed.sharded and _is_named(callback, AVERAGED):
            raise PlanError(
                f"{type(callback).__name__} was asked for, which averages whole parameters, together with S2, which"
                f" has sharded {_names(installed)}; leave one of the two out"
            )
        if replaced and _is_named(callback, KEEPS_LAYERS):
            raise PlanError(
                f"{type(callback).__name__} was asked for, which has chosen its layers already, and the plan replaces"
                f" {replaced[:3]!r}; it would change layers that are not trained. Leave it out, or S2 and S5"
            )


def _owns_parameters(module: nn.Module) -> bool:
    return next(module.parameters(recurse=False), None) is not None


def _is_named(thing: object, names: tuple[str, ...]) -> bool:
    """Whether one of its classes has such a name; not every version of Lightning has these classes."""
    return any(kind.__name__ in names for kind in type(thing).__mro__)


def _names(installed: "Installed") -> str:
    swapped = {id(swap.new): swap.fqn for swap in installed.swaps}
    names = [f"{swapped.get(id(s.module), type(s.module).__name__)}.{s.name}" for s in installed.sharded]
    return ", ".join(map(repr, names))
