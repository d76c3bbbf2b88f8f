"""Install `logits`: linear layers of the training step defer their matrix products. Bound what this can save."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from lightning.pytorch import LightningModule
from torch import nn

from lightning_amp._torch import tree_map
from lightning_amp.footprint.chain.chain_of import CountedStep
from lightning_amp.footprint.module_profile import HELD
from lightning_amp.holding import replacing
from lightning_amp.sharding._torch import functorch_utils
from lightning_amp.techniques.contract.change import Change
from lightning_amp.techniques.logits.pending import LEAST_CHUNKS, PutOff, values
from lightning_amp.techniques.put_methods import method_of, refuse_unseen


def install(module: nn.Module, spec: object, mesh: object) -> Change:
    """Replace the training step of a LightningModule by one that defers the products of linear layers."""
    refuse_unseen("logits", module)
    return Change({}, methods={"training_step": in_chunks(method_of(module, "training_step"))})


def read_step(module: LightningModule, step: CountedStep) -> int:
    """Return the most bytes of the peak that `logits` can save: all tensors as wide as the result of a deferred layer.

    Logits, their casts, views and copies, what the loss makes of them and their gradients have a dim of this length,
    and so has what the loss reads: a layer whose outputs no cross-entropy reads is computed as a whole.
    """
    wide = {outputs for inputs, outputs in step.factors if outputs >= LEAST_CHUNKS * inputs} & step.scored
    return sum(t.n_bytes for t in step.profile.tensors if t.kind not in HELD and wide.intersection(t.shape))


def in_chunks(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a training step that defers the products of linear layers."""

    @wraps(step)
    def run(module: LightningModule, *args: Any, **kwargs: Any) -> Any:
        put_off, unwrap = PutOff(), functorch_utils.unwrap_dead_wrappers

        def computed(given: Any) -> Any:
            return unwrap(tree_map(values, given))

        # autograd Functions call this first; they read their arguments in C++, where no torch function mode sees them
        with replacing(functorch_utils, unwrap_dead_wrappers=computed), put_off:
            found = step(module, *args, **kwargs)
        found = tree_map(values, found)
        put_off.compute()
        return found

    return run
