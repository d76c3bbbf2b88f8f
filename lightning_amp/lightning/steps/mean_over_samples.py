"""Test on the first batch of a run on several data ranks whether the loss is a mean over samples, and warn if not.

Ranks average gradients with the weights of their numbers of samples n_r, which is exact if

    loss(batch) = n_1 / n loss(first half) + n_2 / n loss(second half)

and the same with labels in place of samples for a mean over labels, which is weighed by these (uneven_means.py). Three
passes of the step without gradients compare the two sides, with BatchNorm by its running statistics (the ranks share
those of a batch) and without random numbers (same_draws.py). Everything that a pass has changed is put back
(state_of_batch.py). If the sides differ, another pass of the batch must repeat its loss.

Cost: about two forward passes of one batch on every rank, once.

Not judged, with the reason in Lightning's log: manual optimization; steps of a technique; ranks that split samples or
modules between them; a batch of one sample, or one that cannot be cut; a step that communicates with other ranks, moves
parameters, or fails in one of these passes.

Known limits: other batches than the first; a difference below the rounding of the loss; terms that are zero in the
first step, or without random numbers; a batch whose first dim is not that of the samples may be warned of wrongly.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor

from lightning_amp._torch import AnyBatchNorm, multiplies_in_tf32
from lightning_amp.data.cut_batch import cut
from lightning_amp.errors import AmpError, ModelError
from lightning_amp.footprint.copies.fake_copy import map_tensors
from lightning_amp.footprint.copies.no_side_effects import without_side_effects
from lightning_amp.holding import replacing
from lightning_amp.lightning._compat import rank_zero_info, rank_zero_warn
from lightning_amp.lightning.steps.loss_weight import cells_to_weigh
from lightning_amp.lightning.steps.same_draws import NotJudged, SameDraws
from lightning_amp.lightning.steps.state_of_batch import StateOfBatch
from lightning_amp.techniques.ranks.collectives import RanksDiffer, trying_a_pass

ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-4}
"""Difference of the two sides, relative to the largest loss, that counts as rounding."""
HALF = 2e-2
"""The same under autocast, in TF32 and for other dtypes."""
SUSPECTED = 1e-2
"""Factor of the first where a cross-entropy leaves out labels: losses of samples are nearly equal before training."""

FAILED_ELSEWHERE = "a pass that judges it failed on another rank"
NO_MEAN = (
    "The loss is no mean over samples: it is {whole:.6g} for the first batch of a rank, and {halves} for its halves."
    " Ranks average their gradients by samples, so they are not those of the union of the batches, as under ddp. This"
    " holds for sums over samples, means over entries that are not masked, and contrastive losses. Exact is a mean over"
    " samples, a sum over entries divided by self.trainer.strategy.reduce(count, reduce_op='mean') of those that count"
    " (if all ranks have equally many samples), or one data rank"
)


class FirstLosses:
    """Losses of the first batch and of its halves, on this rank.

    Attributes:
        labels: What a cross-entropy divides by that depends on its labels; "" if none does.
        n_labels: What the last loss divides by, if it is a mean over labels; else None.

    Args:
        module: The module, attached to its Trainer.
        step: Runs the training step on a batch, with all that is installed.
        batch: The batch; passes get copies.
    """

    def __init__(self, module: LightningModule, step: Callable[[Any], Any], batch: Any) -> None:
        self._module, self._step, self._batch = module, step, batch
        loop: Any = module.trainer.fit_loop.epoch_loop.automatic_optimization
        self._gradients = [(p, p.grad) for p in module.parameters()]
        # assigning `.data` calls no operator
        self._memory = [(p, p.data) for p in module.parameters() if not hasattr(p, "__tensor_flatten__")]
        self._norms = [child for child in module.modules() if isinstance(child, AnyBatchNorm)]
        if any(norm.training and norm.running_mean is None for norm in self._norms):
            raise NotJudged("it has BatchNorm without running statistics")
        self._state = StateOfBatch(module, loop, None, ())
        self.labels = ""
        self.n_labels: float | None = None

    def loss(self, part: Any) -> float:
        """Return the loss of a part of the batch, and put everything back.

        Raises:
            NotJudged: The step communicates, or has no loss.
        """
        trainer: Any = self._module.trainer
        draws = SameDraws([*self._module.parameters(), *self._state.compared])
        loggers, part = trainer.loggers, map_tensors(part, lambda _, tensor: tensor.clone())
        try:
            with ExitStack() as around:
                around.enter_context(without_side_effects(alone=False))
                around.enter_context(torch.no_grad())
                around.enter_context(trying_a_pass())
                for child in self._module.modules():
                    if isinstance(child, LightningModule):
                        around.enter_context(replacing(child, log=_nothing, log_dict=_nothing))
                for norm in self._norms:
                    norm.training = False
                trainer.loggers = [DummyLogger() for _ in loggers]
                around.enter_context(draws)
                returned = self._step(part)
        finally:
            trainer.loggers = loggers
            self._put_back()
        self.labels = self.labels or draws.labels
        if draws.exchanges:
            raise NotJudged("it exchanges values with other ranks itself")
        loss = returned.get("loss") if isinstance(returned, Mapping) else returned
        if not isinstance(loss, Tensor) or loss.numel() != 1 or loss.is_complex():
            raise NotJudged("it returns no loss")
        self.dtype, self.n_labels = loss.dtype, None
        if len(draws.means) == 1 and torch.equal(
            draws.means[0][0].nan_to_num().to(loss), loss.nan_to_num().reshape(())
        ):
            self.n_labels = float(draws.means[0][1])
        if self.n_labels == 0:
            # no label counts: nan, of which the mean has nothing
            return 0.0
        if not bool(torch.isfinite(loss)):
            raise NotJudged("its loss is not finite without random numbers")
        return float(loss)

    def _put_back(self) -> None:
        for parameter, data in self._memory:
            if parameter.data_ptr() != data.data_ptr():
                parameter.data = data
        self._state.restore()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient

    def halves(self) -> tuple[list[Any], list[float]]:
        """Return the two halves of the batch, and their shares of its samples."""
        samples = cells_to_weigh(self._batch)
        try:
            parts, _ = cut(self._batch, 2)
        except AmpError:
            parts = []
        if len(parts) < 2 or not samples:
            raise NotJudged("its batch cannot be cut into two halves of samples")
        return parts, [(cells_to_weigh(part) or 0) / samples for part in parts]

    def finish(self) -> None:
        """Raise a ModelError if a pass has changed what cannot be put back."""
        if changed := self._state.changed():
            raise ModelError(
                f"the first batch was run to judge its loss, and has changed {', '.join(changed)}; please report it"
            )


def warn_unless_mean(
    module: LightningModule, step: Callable[[Any], Any], batch: Any, group: dist.ProcessGroup, *, rounds: bool
) -> tuple[bool, str]:
    """Warn on the first rank if the loss is no mean over samples or labels on any rank. A collective.

    Args:
        module, step, batch: As for FirstLosses.
        group: The ranks of the data axis.
        rounds: Whether the step runs in half precision.

    Returns:
        Whether the loss was judged to be no mean over samples, and what its cross-entropy divides by if it can be a
        mean over labels, of which nothing was said.
    """
    found: FirstLosses | None = None

    def tried(run: Callable[[], Any]) -> Any:
        """Return the result of all ranks, or raise on all of them why one has none."""
        try:
            mine, why = run(), ""
        except NotJudged as reason:
            mine, why = None, str(reason)
        except RanksDiffer:
            mine, why = None, FAILED_ELSEWHERE
        except Exception as error:
            mine, why = None, f"{type(error).__name__} in a pass that judges it: {error}".partition("\n")[0]
        everyone: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyone, (mine, why), group=group)
        if reasons := [why for _, why in everyone if why]:
            raise NotJudged(min(reasons, key=lambda why: why == FAILED_ELSEWHERE))
        return mine, [one for one, _ in everyone]

    def begin() -> None:
        nonlocal found
        first = FirstLosses(module, step, batch)
        first.halves()
        found = first

    try:
        tried(begin)
        assert found is not None, "it has begun"
        judged = found

        def measured(part: Any) -> tuple[float, float | None]:
            return judged.loss(part), judged.n_labels

        (loss, _), _ = tried(partial(measured, batch))
        halves, shares = judged.halves()
        # one by one: after an error the ranks meet again at the end of a pass
        parts = [tried(partial(measured, half))[0] for half in halves]
        losses, counts = [one for one, _ in parts], [count or 0.0 for _, count in parts]
        rounds = rounds or (multiplies_in_tf32() and next(module.parameters()).is_cuda)
        rounding = HALF if rounds else ROUNDING.get(judged.dtype, HALF)

        def differs(weights: list[float], share: float = 1.0) -> bool:
            mean = sum(weight * one for weight, one in zip(weights, losses, strict=True)) / sum(weights)
            return bool(abs(loss - mean) > share * rounding * max(abs(loss), *map(abs, losses)))

        no_mean = differs(shares, SUSPECTED if judged.labels else 1.0)
        known = all(count is not None for _, count in parts) and sum(counts) > 0
        # with other terms it cannot be tested, and is not weighed by labels either
        may_be_of_labels = bool(judged.labels) and not (known and differs(counts))
        text = NO_MEAN.format(whole=loss, halves=" and ".join(f"{one:.6g}" for one in losses))
        _, said = tried(lambda: (no_mean, judged.labels if may_be_of_labels else "", text))
        said = [one for one in said if one[0]]
        if not said:
            return False, ""
        # a clock, or a generator that nobody can find
        _, again = tried(lambda: judged.loss(batch) == loss)
        if not all(again):
            raise NotJudged("the same batch has another loss when it runs again")
    except NotJudged as reason:
        rank_zero_info(f"Whether the loss of the step is a mean over samples was not tested: {reason}")
        return False, ""
    finally:
        if found is not None:
            found.finish()
    if all(labels for _, labels, _ in said):
        return True, str(said[0][1])
    rank_zero_warn(next(text for _, labels, text in said if not labels))
    return True, ""


def _nothing(*_: Any, **__: Any) -> None:
    """Log nothing."""
