"""Update parameters when their gradients are complete, within one backward pass, and free the gradients.

A hook of each parameter runs when autograd has added up its gradient. Gradients wait until they are `bucket_bytes`
together; then the optimizer's own step runs for these parameters alone, with the options of their groups. What is left
when the pass ends is updated by the optimizer's step as without this technique.

Checked in every backward pass: no gradient comes a second time after its update. Checked in the first: no operator
reads a parameter after its update, as a checkpointed block can that detaches it. Autograd's version counters find other
reads. From then on, code outside of torch that reads `.grad` of a parameter gets an error.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_amp._torch import TorchDispatchMode
from lightning_amp.errors import ModelError
from lightning_amp.footprint.live_bytes import Repeated, storages_of, tensors_of
from lightning_amp.footprint.run.last_gradients import GradientReads
from lightning_amp.techniques.early_update.readers import refuse_readers
from lightning_amp.techniques.own_step import update

CHANGED = "has been modified by an inplace operation"
"""Part of autograd's message for a saved tensor that has another version."""
LEAVE_OUT = "leave early_update out (strategies=[...] without it)"


class EarlyUpdates:
    """Updates within the backward passes of a module; `stop` ends them."""

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self._steps = 0
        self._reads: GradientReads | None = None

    def stop(self) -> None:
        """Let `.grad` be read again."""
        if self._reads is not None:
            self._reads.stop()
        self._reads, self._steps = None, 0

    @contextmanager
    def during(self, module: LightningModule) -> Iterator[None]:
        """Run the backward pass of a module's loss in this context.

        Raises:
            InstallError: Something of the run reads gradients when they are gone.
            ModelError: A gradient comes in several parts, or an updated parameter is read.
        """
        trainer = module.trainer
        if self._reads is None or not self._reads.of(module):
            self.stop()
            refuse_readers(module, trainer)
            self._reads = GradientReads(module, _refuse_read, also=("torch.optim.",))
            self._reads.start()
        self._steps += 1
        one = _Pass(module, trainer.optimizers[0], self._bucket_bytes)
        try:
            with one.hooks(), ReadsAfterUpdate(one) if self._steps == 1 else nullcontext():
                yield
        except RuntimeError as error:
            if CHANGED not in str(error) or not one.updated:
                raise
            raise ModelError(
                "early_update cannot run this step: its backward pass needs a parameter again after its update, for a"
                f" part of the loss that gives it no gradient; {LEAVE_OUT}"
            ) from error
        if one.problem:
            raise ModelError(one.problem)


def _refuse_read(name: str) -> None:
    raise ModelError(
        f"the gradient of {name!r} is read, which early_update has used and freed: read gradients in a hook of the"
        f" tensor, or {LEAVE_OUT}"
    )


class _Pass:
    """The updates of one backward pass.

    Attributes:
        problem: Why the pass is wrong; "" if it is right. An error raised within a nested backward pass may abort the
            process, so that it is raised after the pass.
        names: Names of parameters by id.
        updated: Ids of parameters that have been updated.
        updating: Whether the optimizer's step runs now.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer, bucket_bytes: int) -> None:
        self._optimizer, self._bucket_bytes = optimizer, bucket_bytes
        self.problem, self.updating = "", False
        self.names = {id(p): name for name, p in module.named_parameters()}
        self._waiting, self._bytes = list[Tensor](), 0
        self.updated = set[int]()

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Put hooks on the parameters."""
        with ExitStack() as undo:
            for group in self._optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.requires_grad:
                        undo.callback(parameter.register_post_accumulate_grad_hook(self._complete).remove)
            yield

    def _complete(self, parameter: Tensor) -> None:
        if id(parameter) in self.updated:
            self.problem = self.problem or (
                f"the gradient of {self.names.get(id(parameter), '')!r} comes in several parts, the last after its"
                f" update, as with torch.utils.checkpoint(use_reentrant=True): use_reentrant=False, or {LEAVE_OUT}"
            )
            return
        self._waiting.append(parameter)
        assert parameter.grad is not None, "autograd has added it up"
        self._bytes += parameter.grad.untyped_storage().nbytes() if parameter.grad.layout is torch.strided else 0
        if self._bytes >= self._bucket_bytes:
            self._update()

    def _update(self) -> None:
        """Run the optimizer's step for the parameters that wait, and free their gradients."""
        # a gradient that came in parts while it waited is there twice
        waiting = {id(parameter): parameter for parameter in self._waiting}
        self._waiting, self._bytes = [], 0
        self.updating = True
        try:
            update(self._optimizer, waiting)
        finally:
            self.updating = False
        self.updated |= waiting.keys()
        for parameter in waiting.values():
            parameter.grad = None


class ReadsAfterUpdate(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that finds an operator that reads a parameter after its update."""

    def __init__(self, one: _Pass) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._pass = one
        # by the address: a storage is another Python object each time
        named = ((p, id(p)) for group in one._optimizer.param_groups for p in group["params"])
        self._of_storage = {
            storage._cdata: key for p, key in named if p.layout is torch.strided for _, storage in storages_of([p])
        }

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False, as LiveBytes does."""
        return False

    counts_repeated = True

    def repeated(self, steps: Iterable[Repeated]) -> None:
        """Look at what operators read that do not run."""
        for step in steps:
            self._look(step.func, step.given)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, after a look at what it reads."""
        self._look(func, (*args, *kwargs.values()) if kwargs else args)
        return func(*args, **(kwargs or {}))

    def _look(self, func: Any, given: Sequence[Any]) -> None:
        one = self._pass
        if one.updated and not (one.updating or one.problem):
            for _, storage in storages_of(tensors_of(given)):
                key = self._of_storage.get(storage._cdata)
                if key in one.updated:
                    one.problem = (
                        f"{func} reads {one.names.get(key or 0, '')!r} after its update, in the same backward pass, as"
                        f" a checkpointed block does that detaches it: {LEAVE_OUT}"
                    )
