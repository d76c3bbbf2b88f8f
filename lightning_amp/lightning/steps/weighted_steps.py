"""Training steps of a strategy: the rank's share of the loss, averaged gradients, one optimiser step for all ranks.

Known limit: an optimiser from `self.optimizers(use_pl_optimizer=False)` steps without the check for gradients that were
not reduced.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from lightning_amp.errors import DataError
from lightning_amp.lightning._compat import rank_zero_warn
from lightning_amp.lightning.checkpoints.whole_state import WholeState
from lightning_amp.lightning.steps.cell_weight import CellWeight
from lightning_amp.lightning.steps.finite_check import FiniteCheck
from lightning_amp.parallel.s1_data.gradient_sync import GradientSync

ONE_VALUE = "Expected more than 1 value per channel"
"""What torch says of a batch of one cell."""

RAW_BACKWARD = (
    "Gradients reached an optimizer step without having been averaged over ranks: in manual optimization call"
    " self.manual_backward(loss), not loss.backward(). They are averaged now, every rank counted equally, but"
    " gradient clipping before this point has seen the gradients of one rank only."
)


class WeightedSteps(WholeState):
    """Steps on the mean over the cells of all ranks.

    The weight and the gradients' reduction are there while a fit is set up, and None otherwise.
    """

    _gradients: GradientSync | None
    _weight: CellWeight | None
    _finite: FiniteCheck | None = None

    def training_step(self, *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """The module's training step, with its batch noted for weighting.

        Raises:
            DataError: A batch of one cell that batch normalisation cannot train on.
        """
        if self._weight is not None and self._gradients is not None:
            self._weight.start(args[0] if args else None)
            self._gradients.watch()
        if self._finite is not None:
            self._finite.start()
        try:
            output = super().training_step(*args, **kwargs)
        except ValueError as error:
            if ONE_VALUE not in str(error):
                raise
            raise DataError(
                f"a batch normalisation was to train on one value per channel, which has no variance, found: {error}."
                " Two cells or more are needed, of all ranks together, or of each with share_batch_statistics=False:"
                " take a batch_size of 2 or more, and drop_last=True where the last batch of an epoch has one cell"
            ) from error
        if self._finite is not None:
            self._finite.check_loss(output)
        return output

    def backward(
        self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """Backward of the rank's share of the union batch's mean loss, then average the gradients over ranks.

        Averaged before `on_after_backward`, so that hooks and clipping see what the optimiser will. Outside of a fit a
        rank keeps the gradients of its own loss, as under DDPStrategy.

        Raises:
            PlanError: Outside of a fit, where the plan leaves parts of the gradients on other ranks.
        """
        module = self.lightning_module
        assert module is not None, "the Trainer sets the module before setup"
        if self._gradients is None:
            self._shards.refuse_backward()
            return super().backward(closure_loss, optimizer, *args, **kwargs)
        self.pre_backward(closure_loss)
        self._gradients.watch()
        self._shards.check(closure_loss)
        if self._finite is not None:
            self._finite.check_loss(closure_loss)
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        self.precision_plugin.backward(self._share_of(closure_loss), module, optimizer, *args, **kwargs)
        if self._finite is not None:
            self._finite.check_gradients()
        self._gradients.reduce()
        closure_loss = self.precision_plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    def _share_of(self, loss: Tensor) -> Tensor:
        assert self._weight is not None, "set in setup for fitting"
        weight = self._weight.value()
        return loss if weight == 1.0 else loss * weight

    def gradient_norm(self) -> Tensor:
        """Norm of all gradients while training, as clipping sees it; every rank calls it, for shards are summed."""
        return self._shards.gradient_norm()

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Leave gradients on their ranks, for accumulation; the next backward outside averages their sum."""
        if self._gradients is None:
            yield
            return
        before, self._gradients.blocked = self._gradients.blocked, True
        try:
            yield
        finally:
            self._gradients.blocked = before

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        """Step, after a last look in manual optimisation for gradients that were not averaged."""

        def averaged() -> Any:
            loss = closure()
            self._average_rest()
            # its line search and stopping rules read the loss, and ranks must take the same number of steps
            is_read = isinstance(optimizer, LBFGS) and isinstance(loss, Tensor)
            return self.reduce(self._share_of(loss).detach().clone()) if is_read else loss

        return super().optimizer_step(optimizer, averaged, model, **kwargs)

    def _average_rest(self) -> None:
        """Average what manual optimisation has left: a raw `loss.backward()`, or a step while blocked."""
        module = self.lightning_module
        if self._gradients is None or module is None or module.automatic_optimization:
            return
        if self._gradients.pending and not self._gradients.blocked:
            rank_zero_warn(RAW_BACKWARD)
        self._gradients.reduce(force=True)
