"""Run a training step over all ranks: the rank's share of the loss, averaged gradients, one optimiser step.

Known limit: an optimiser from `self.optimizers(use_pl_optimizer=False)` steps without the check for gradients that were
not reduced.

`FiniteCheck` finds the source of the first NaN or infinity: module, stratum and rank.

    forward     of every module, the first call whose output is not finite although its inputs are
    loss        looked at before backward, on the rank that has it and before any rank has averaged with it
    gradient    looked at as soon as it is accumulated, before it is averaged: the first in the order of backward; under
                fsdp the rank's rows of it once they are averaged

Outputs by themselves stop nothing: a module may well return -inf where a score is masked. Looking waits for the device.

Its known limits: gradients are not looked at under loss scaling (precision="16-mixed"), which overflows on purpose
and skips such steps; what is computed outside of modules is attributed to no module.
"""

import re
from collections.abc import Callable, Generator
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
from lightning_amp.errors import DataError, ModelError
from lightning_amp.footprint.recompute_state import types_of_the_step
from lightning_amp.holding import replacing
from lightning_amp.lightning._compat import rank_zero_warn
from lightning_amp.lightning.checkpoints.shards import Shards
from lightning_amp.lightning.consistency.same_parameters import refuse_own_statistics
from lightning_amp.lightning.steps.cells import CellWeight
from lightning_amp.techniques.contract.sharded_parameter import local
from lightning_amp.techniques.data.gradient_sync import GradientSync

STRATUM = re.compile(r"\bstrata\.(\d+)\b")


class FiniteCheck:
    """Watches one module as it is trained, its gradients too if asked."""

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
        """Stop watching."""
        for handle in self._handles:
            handle.remove()

    def start(self) -> None:
        """A training step begins."""
        self._first = self._reader = self._gradient = ""
        # a callback may have unfrozen some
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
        """Refuse, with a ModelError, a loss that is not finite, as the step returned it or a manual backward got it."""
        loss = output.get("loss") if isinstance(output, dict) else output
        if isinstance(loss, Tensor) and not _is_finite(loss):
            raise ModelError(f"{self._seen(f'a loss of {loss.detach().sum().item()!r}')}{self._origin()}")

    def check_gradients(self) -> None:
        """Refuse, with a ModelError, gradients that are not finite, before they are averaged."""
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
    # of a shard the rank's own entries: other ranks may not look now
    return bool(torch.isfinite(local(tensor.detach())).all())


ONE_VALUE = "Expected more than 1 value per channel"
"""What torch says of a batch of one cell."""

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
    """The steps of one fit, on the mean over the cells of all ranks.

    Args:
        module: The LightningModule.
        model: It, or what the Trainer's plugins have made of it, with what was installed.
        mesh: With the axes "data" and "model".
        device, precision: Of the run.
        shards: The sharded parameters.
        bucket_bytes, check_finite: As for AMPStrategy.
        own_statistics: Whether buffers that a rank changes from its own cells are accepted.
        over_model: Whether a rank of the model axis has gradients of its part of the samples, to be averaged.
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
        self._weight = CellWeight(mesh["data"], device)
        self._gradients = GradientSync(
            # those of other stages of a pipeline are not here
            (parameter for parameter in shards.reduced if not (shards.apart and parameter.is_meta)),
            mesh,
            partial=shards.partial,
            sharded=[parameter.shard for parameter in shards.over_model],
            apart=shards.apart,
            bucket_bytes=bucket_bytes,
            rounds_differently=over_model or device.type == "cuda",
        )
        # loss scaling overflows on purpose and skips such steps
        scaled = getattr(precision, "scaler", None) is not None
        self._finite = FiniteCheck(model, rank=mesh.get_rank(), gradients=not scaled) if check_finite else None
        self._gradients.watch()
        self._steps = 0
        self._refuse: Callable[[], None] | None = None
        if not own_statistics:
            self._refuse = partial(refuse_own_statistics, module, mesh, apart=shards.apart)
        # called when a backward pass has ended, before gradients are averaged
        self.before_averaging: Callable[[], None] = lambda: None

    def remove(self) -> None:
        """Take all hooks off the module."""
        self._gradients.remove()
        if self._finite is not None:
            self._finite.remove()

    def forward(self, step: Callable[[], STEP_OUTPUT], batch: object) -> STEP_OUTPUT:
        """Run the module's training step, with its batch noted for weighting.

        Raises:
            DataError: A batch of one cell that batch normalisation cannot train on.
            PlanError: The first step has shown that a rank changes buffers from its own cells.
        """
        self._steps += 1
        if self._steps == 2 and self._refuse is not None:
            # not within the first step, which memory may have ended on one rank only
            self._refuse()
        self._weight.start(batch)
        self._gradients.watch()
        if self._finite is not None:
            self._finite.start()
        try:
            output = step()
        except ValueError as error:
            if ONE_VALUE not in str(error):
                raise
            raise DataError(
                f"BatchNorm cannot train on one value per channel, which has no variance: {error}. It needs two samples"
                " or more, of all ranks together (of each rank with share_batch_statistics=False): set batch_size to 2"
                " or more, and drop_last=True if the last batch of an epoch has one sample"
            ) from error
        if self._finite is not None:
            self._finite.check_loss(output)
        return output

    def backward(self, loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Backward of the rank's share of the union batch's mean loss, then average the gradients over ranks.

        Averaged before `on_after_backward`, so that hooks and clipping see what the optimiser will.

        Raises:
            ModelError: A loss that a profile has left without values.
        """
        # for parameters that were unfrozen since
        self._gradients.watch()
        self._shards.check(loss)
        if isinstance(loss, FakeTensor):
            raise ModelError(NO_VALUES)
        if self._finite is not None:
            self._finite.check_loss(loss)
        loss = self._precision.pre_backward(loss, self._module)
        # weighted after `on_before_backward`, which sees the module's loss; averaging then gives the mean over cells
        share, units = self._share_of(loss), self._shards.units
        with types_of_the_step(self._precision), nullcontext() if units is None else units.backward(share):
            self._precision.backward(share, self._module, optimizer, *args, **kwargs)
        if self._finite is not None:
            self._finite.check_gradients()
        # a rank whose memory has ended says so here, before others would wait for its gradients
        self.before_averaging()
        self._gradients.reduce()
        return self._precision.post_backward(loss, self._module)

    @contextmanager
    def unreduced(self) -> Generator[None, None, None]:
        """Leave gradients on their ranks, for accumulation; the next backward outside averages their sum."""
        with replacing(self._gradients, blocked=True):
            yield

    def averaging(
        self, closure: Callable[[], Any], optimizer: Optimizer, mean: Callable[[Tensor], Tensor]
    ) -> Callable[[], Any]:
        """The closure, forward and backward, of an optimiser step, with a last look for gradients not averaged."""

        def averaged() -> Any:
            loss = closure()
            # what manual optimisation has left: a raw `loss.backward()`, or a step while blocked
            if not self._module.automatic_optimization:
                if self._gradients.pending and not self._gradients.blocked:
                    rank_zero_warn(RAW_BACKWARD)
                self._gradients.reduce_rest()
            # its line search and stopping rules read the loss, and ranks must take the same number of steps
            is_read = isinstance(optimizer, LBFGS) and isinstance(loss, Tensor)
            return mean(self._share_of(loss).detach().clone()) if is_read else loss

        return averaged

    def _share_of(self, loss: Tensor) -> Tensor:
        weight = self._weight.value()
        return loss if weight == 1.0 else loss * weight
