"""Run a training step over all ranks: weighted loss, averaged gradients, one optimiser step; and check for NaN.

Known limit: an optimiser from `self.optimizers(use_pl_optimizer=False)` steps without the check for gradients that were
not reduced.

`FiniteCheck` finds the source of the first NaN or infinity: module, stratum and rank.

    forward     the first module whose output is not finite although its inputs are
    loss        checked before the backward pass, on the rank that has it, before any rank averages with it
    gradient    checked when it is accumulated, before it is averaged: the first in backward order; under fsdp the
                rank's shard after averaging

An output that is not finite is no error by itself, because modules may return -inf for masked scores. The checks
synchronize with the device.

Known limits of FiniteCheck: gradients are not checked under loss scaling (precision="16-mixed"), which overflows on
purpose and skips such steps; computations outside modules are not attributed to a module.
"""

import re
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import LBFGS, Optimizer

from lightning_amp._torch import FakeTensor
from lightning_amp.data.batch import tensors_in
from lightning_amp.default_dtype import types_of_the_step
from lightning_amp.errors import DataError, ModelError
from lightning_amp.footprint.run.last_gradients import LastGradients, nothing_reads_them
from lightning_amp.holding import replacing
from lightning_amp.lightning._compat import rank_zero_warn
from lightning_amp.lightning.checkpoints.shards import Shards
from lightning_amp.lightning.consistency.same_parameters import refuse_new_parameters, refuse_own_statistics
from lightning_amp.lightning.steps.loss_weight import CellWeight
from lightning_amp.lightning.steps.mean_over_samples import warn_unless_mean
from lightning_amp.lightning.steps.uneven_means import MeansOverLabels, warn_of_labels
from lightning_amp.own_operators import own_operators
from lightning_amp.techniques.contract.sharded_parameter import local
from lightning_amp.techniques.data.gradient_sync import GradientSync

STRATUM = re.compile(r"\bstrata\.(\d+)\b")


class FiniteCheck:
    """Check the outputs and the loss of one module in training, and optionally its gradients."""

    def __init__(self, module: nn.Module, *, rank: int, gradients: bool) -> None:
        self._rank = rank
        self._first = self._reader = self._gradient = ""
        self._handles: list[Any] = []
        for name, child in module.named_modules():
            if name:
                look = partial(self._look_at, name)
                self._handles.append(child.register_forward_hook(look, with_kwargs=True))
        self._unwatched = dict(module.named_parameters()) if gradients else {}
        self._watch_gradients()

    def remove(self) -> None:
        """Remove all hooks."""
        for handle in self._handles:
            handle.remove()

    def start(self) -> None:
        """Begin a training step."""
        self._first = self._reader = self._gradient = ""
        # parameters may have been unfrozen by a callback
        self._watch_gradients()

    def _watch_gradients(self) -> None:
        for name, parameter in list(self._unwatched.items()):
            if parameter.requires_grad:
                del self._unwatched[name]

                def look(parameter: Tensor, name: str = name) -> None:
                    if not self._gradient and parameter.grad is not None and not _is_finite(parameter.grad):
                        self._gradient = name

                self._handles.append(parameter.register_post_accumulate_grad_hook(look))  # type: ignore[no-untyped-call]

    def check_loss(self, output: Any) -> None:
        """Raise a ModelError if a loss of `training_step` or `manual_backward` is not finite."""
        loss = output.get("loss") if isinstance(output, dict) else output
        if isinstance(loss, Tensor) and not _is_finite(loss):
            raise ModelError(f"{self._seen(f'a loss of {loss.detach().sum().item()!r}')}{self._origin()}")

    def check_gradients(self) -> None:
        """Raise a ModelError if a gradient was not finite, before gradients are averaged."""
        if self._gradient:
            what = f"a gradient that is not finite, first that of parameter {self._gradient!r}"
            raise ModelError(f"{self._seen(what)}{_stratum(self._gradient)}{self._origin()}")

    def _seen(self, what: str) -> str:
        return f"check_finite=True requires finite numbers; rank {self._rank} found {what}"

    def _origin(self) -> str:
        if self._reader and not self._first:
            return f"; it came up outside of modules, before {self._reader!r}{_stratum(self._reader)} read it"
        if not self._first:
            return "; every module's output was finite. Look at what the loss does with them"
        return (
            f"; the first output that is not finite, of finite inputs, is that of module {self._first!r}"
            f"{_stratum(self._first)}. Look at its inputs in this step, at the learning rate, and at the precision"
        )

    def _look_at(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._first or _all_finite(output):
            return
        if _all_finite((args, kwargs)):
            self._first = name
        else:
            self._reader = self._reader or name


def _stratum(name: str) -> str:
    found = STRATUM.search(name)
    return f" (stratum {found.group(1)})" if found else ""


def _all_finite(values: Any) -> bool:
    floating = (t for t in tensors_in(values) if t.is_floating_point() and t.layout is torch.strided)
    return all(map(_is_finite, floating))


def _is_finite(tensor: Tensor) -> bool:
    # only local entries of a shard: other ranks may not run this check now, so it cannot be a collective
    return bool(torch.isfinite(local(tensor.detach())).all())


ONE_VALUE = "Expected more than 1 value per channel"
"""torch's error for a batch of one cell."""

RAW_BACKWARD = (
    "Gradients reached an optimizer step without having been averaged over ranks: in manual optimization call"
    " self.manual_backward(loss), not loss.backward(). They are averaged now, every rank counted equally, but"
    " gradient clipping before this point has seen the gradients of one rank only."
)

NO_VALUES = (
    "the loss has no values: it was computed from a tensor of the step that was profiled on fake tensors,"
    " which something outside the module has kept, such as a list or a cache in another file. Keep it in an"
    " attribute of the module"
)


class TrainingStep:
    """The training steps of one fit, which optimise the mean loss over the cells of all ranks.

    Args:
        module: The LightningModule.
        model: The module, or its wrapper from the Trainer's plugins, with the installed plan.
        mesh: Mesh with the axes "data" and "model".
        device, precision: Device and precision plugin of the run.
        shards: The sharded parameters.
        bucket_bytes, check_finite: As for AMPStrategy.
        own_statistics: Whether ranks may change buffers from their own cells.
        over_model: Whether model ranks compute gradients of their own part of the samples, which are averaged.
    """

    def __init__(
        self,
        module: LightningModule,
        model: nn.Module,
        mesh: DeviceMesh,
        device: torch.device,
        *,
        precision: Precision,
        shards: Shards,
        bucket_bytes: int,
        check_finite: bool,
        own_statistics: bool,
        over_model: bool = False,
    ) -> None:
        self._module, self._precision, self._shards = module, precision, shards
        self._weight, self._data_ranks = CellWeight(mesh["data"], device), mesh["data"].size()
        # where ranks split samples or modules between them, a half of a batch may not run
        self._has_all_labels = mesh["model"].size() == 1
        self._judged_over = mesh["data"] if self._has_all_labels and not over_model else None
        self._gradients = GradientSync(
            # parameters of other pipeline stages are placeholders on this rank
            (parameter for parameter in shards.reduced if not (shards.model_ranks_differ and parameter.is_meta)),
            mesh,
            partial=shards.partial,
            sharded=[parameter.shard for parameter in shards.over_model],
            model_ranks_differ=shards.model_ranks_differ,
            bucket_bytes=bucket_bytes,
            rounds_differently=over_model or device.type == "cuda",
        )
        # loss scaling overflows on purpose and skips such steps
        scaled = getattr(precision, "scaler", None) is not None
        self._finite = FiniteCheck(model, rank=mesh.get_rank(), gradients=not scaled) if check_finite else None
        self._gradients.watch()
        # parameters whose gradients become those of all ranks, by id; with references, so that no id is used again
        self._known = {id(parameter): parameter for parameter in model.parameters()} if mesh.size() > 1 else None
        self._steps = 0
        self._last_gradients: LastGradients | None = None
        self._refuse: Callable[[], None] | None = None
        if not own_statistics:
            self._refuse = partial(refuse_own_statistics, module, mesh, model_ranks_differ=shards.model_ranks_differ)
        # called after a backward pass, before gradients are averaged
        self.before_averaging: Callable[[], None] = lambda: None

    def remove(self) -> None:
        """Remove all hooks from the module."""
        self._gradients.remove()
        if self._finite is not None:
            self._finite.remove()

    def forward(self, step: Callable[..., STEP_OUTPUT], *args: Any, **kwargs: Any) -> STEP_OUTPUT:
        """Run the module's training step, and use its batch, the first argument, for the weight of the loss.

        Raises:
            DataError: Batch normalisation cannot train on a batch of one cell.
            PlanError: A rank changed buffers from its own cells in the first step, or an optimizer trains parameters
                that were not there when the plan was installed.
        """
        if self._known is not None:
            refuse_new_parameters(self._known, self._module, self._module.trainer.optimizers)
        self._steps += 1
        if self._last_gradients is None:
            allowed = nothing_reads_them(self._module.trainer)
            optimizers = self._module.trainer.optimizers
            self._last_gradients = LastGradients(self._module, optimizers, allowed=allowed)
        if self._steps == 2 and self._refuse is not None:
            # after the first step: during it, one rank alone may have run out of memory
            self._refuse()
        batch = args[0] if args else None
        first = self._steps == 1 and self._data_ranks > 1
        judged, uneven = self._is_judged(step, *args, **kwargs) if first else (False, "")
        means = MeansOverLabels(looks=first and not judged)
        may_be_of_labels = self._has_all_labels and self._module.automatic_optimization
        self._weight.start(batch, may_be_of_labels=may_be_of_labels)
        self._gradients.watch()
        if self._finite is not None:
            self._finite.start()
        try:
            watched = means.looks or self._weight.expects_labels
            with self._last_gradients.before_step(), means.watching() if watched else nullcontext():
                output = step(*args, **kwargs)
        except ValueError as error:
            if ONE_VALUE not in str(error):
                raise
            raise DataError(
                f"BatchNorm cannot train on one value per channel, which has no variance: {error}. It needs two samples"
                " or more, of all ranks together (of each rank with share_batch_statistics=False): set batch_size to 2"
                " or more, and drop_last=True if the last batch of an epoch has one sample"
            ) from error
        if said := ("cross_entropy", uneven) if uneven else means.uneven:
            self._weight.otherwise = partial(warn_of_labels, *said)
            if not self._weight.expects_labels:
                self._weight.otherwise()
        n_labels = means.behind(output.get("loss") if isinstance(output, Mapping) else output)
        empty = (
            n_labels is not None and self._weight.expects_labels and self._finite is not None and not n_labels.item()
        )
        self._weight.take_labels(n_labels)
        if self._finite is not None and not empty:
            self._finite.check_loss(output)
        return output

    def join(self) -> None:
        """Take part in the collective of this step that other ranks start after their forward pass."""
        self._weight.take_labels(None, lost=True)

    def _is_judged(self, step: Callable[..., STEP_OUTPUT], *args: Any, **kwargs: Any) -> tuple[bool, str]:
        """Test whether the first step's loss is a mean over samples; return whether it is found to be none, and why."""
        if not args or self._judged_over is None or not self._module.automatic_optimization:
            return False, ""
        half = not self._precision.precision.startswith(("32", "64"))
        return warn_unless_mean(
            self._module,
            lambda batch: step(batch, *args[1:], **kwargs),
            args[0],
            self._judged_over.get_group(),
            rounds=half,
        )

    def backward(self, loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Differentiate the rank's weighted loss, then average the gradients over ranks.

        Gradients are averaged before `on_after_backward`, so that hooks and clipping use the final gradients.

        Raises:
            ModelError: The loss is a fake tensor that was kept from profiling.
        """
        with own_operators():
            # parameters may have been unfrozen since
            self._gradients.watch()
            self._shards.check(loss)
            if isinstance(loss, FakeTensor):
                raise ModelError(NO_VALUES)
            # where no label of this rank counts, its mean is nan, and its gradients are zeros
            if self._finite is not None and not self._labels_left_out():
                self._finite.check_loss(loss)
        loss = self._precision.pre_backward(loss, self._module)
        with own_operators():
            # weighted after `on_before_backward`, which receives the unweighted loss; averaging gives the mean over
            # cells
            share, units = self._share_of(loss), self._shards.units
        with types_of_the_step(self._precision), nullcontext() if units is None else units.backward(share):
            self._precision.backward(share, self._module, optimizer, *args, **kwargs)
        with own_operators():
            if self._finite is not None:
                self._finite.check_gradients()
            # a rank that has run out of memory reports it here, before others wait for its gradients
            self.before_averaging()
            self._gradients.reduce()
        return self._precision.post_backward(loss, self._module)

    @contextmanager
    def unreduced(self) -> Generator[None, None, None]:
        """Accumulate gradients without averaging; the next backward pass outside averages their sum."""
        with replacing(self._gradients, blocked=True):
            yield

    def averaging(
        self, closure: Callable[[], Any], optimizer: Optimizer, mean: Callable[[Tensor], Tensor]
    ) -> Callable[[], Any]:
        """Wrap an optimiser step's closure, so that remaining gradients are averaged after it."""

        def averaged() -> Any:
            loss = closure()
            # manual optimisation may leave gradients from a raw `loss.backward()`, or from a step while blocked
            if not self._module.automatic_optimization:
                if self._gradients.pending and not self._gradients.blocked:
                    rank_zero_warn(RAW_BACKWARD)
                with own_operators():
                    self._gradients.reduce_rest()
            # LBFGS reads the loss in its line search, and ranks must take the same number of steps
            is_read = isinstance(optimizer, LBFGS) and isinstance(loss, Tensor)
            if not is_read:
                return loss
            return mean(self.share_to_read(loss))

        return averaged

    def _labels_left_out(self) -> bool:
        """Whether no label of this rank counts, but some of other ranks do."""
        self._weight.value()
        return self._weight.no_labels

    def share_to_read(self, loss: Tensor) -> Tensor:
        """Return this rank's weighted loss without a graph; the mean over ranks is the loss of all of their samples."""
        share = self._share_of(loss).detach().clone()
        return share.nan_to_num() if self._weight.no_labels else share

    def _share_of(self, loss: Tensor) -> Tensor:
        weight = self._weight.value()
        return loss if weight == 1.0 else loss * weight
