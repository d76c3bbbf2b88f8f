"""Put a module's parameters on a grid of ranks, until `undo`.

    between steps    the module has its own Parameter objects, each with this rank's part, flat
    in a step        in their places are sharded tensors, which are gathered where a layer reads them; until the
                     backward pass has ended, or the step has returned nothing to train on

Gradients are summed over the grid while the backward pass goes on, and averaged over its copies when it has ended.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from typing import Any, cast

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer

import lightning_amp.dist.ops  # noqa: F401  (registers the operators)
from lightning_amp.dist.collectives import reduce_now
from lightning_amp.errors import ModelError
from lightning_amp.techniques.contract.protocol import Units
from lightning_amp.techniques.deferred import DEFERRED, DROPPED
from lightning_amp.techniques.put_methods import STEPS, put_methods
from lightning_amp.techniques.sequence.split_batch import HowToSplit, read_dims
from lightning_amp.techniques.sharded_step import run_sharded, tensors
from lightning_amp.techniques.tensor3d.grid import Grid
from lightning_amp.techniques.tensor3d.in_step import InStep
from lightning_amp.techniques.tensor3d.layouts import splits_in
from lightning_amp.techniques.tensor3d.parameters import GridParameter, forgetting_gathered
from lightning_amp.techniques.tensor3d.row import TensorParallel3D
from lightning_amp.techniques.tensor3d.strays import READ_ELSEWHERE, StrayReads, watch_hooks


class GridUnits(Units):
    """The parameters of a module on a grid.

    Attributes:
        parameters: In the order of the module's, each once.
        deferred: Whether parameters came without values, and get them one module at a time when they are cut.

    Args:
        module: Whole, equal on all ranks.
        spec: How dims are split (layouts.py), the dims of the batch that z splits, and what overlaps.
        grid: The ranks.
        agree: Called with what this rank is about to do; a collective that fails where ranks differ.
        begun: Whether any backward pass belongs to the step, as in a dry run.
    """

    def __init__(
        self,
        module: nn.Module,
        spec: TensorParallel3D,
        grid: Grid,
        *,
        agree: Callable[[str], None] = lambda what: None,
        begun: bool = False,
    ) -> None:
        self._module, self._grid, self._dry = module, grid, begun
        self._in_step = InStep(agree=agree, overlap=spec.overlap, cache_bytes=spec.cache_bytes, begun=begun)
        splits = splits_in(spec.layouts, module, grid)
        self._how = HowToSplit(dims=read_dims(spec.dims), sizes="even", axes=(grid.z,)) if spec.dims else None
        self.deferred = any(DROPPED in vars(p) for p in module.parameters()) or any(
            DEFERRED in vars(child) for child in module.modules()
        )
        self.parameters = [
            GridParameter(parameter, grid, splits[name], name=name, in_step=self._in_step)
            for name, parameter in module.named_parameters()
        ]
        of = {id(one.parameter): one for one in self.parameters}
        self._places = [
            (child, name, of[id(parameter)])
            for child in module.modules()
            for name, parameter in child._parameters.items()
            if parameter is not None
        ]
        self._inside = self._running = False
        self._looked_at = set[str]()
        self._undo: list[Callable[[], None]] = []

    def cut(self, optimizers: Iterable[Optimizer] = ()) -> None:
        """Give every parameter this rank's part; optimisers that have state of it already get theirs."""
        for optimizer in optimizers:
            own = getattr(optimizer, "optimizer", optimizer).state
            for one in self.parameters:
                for key, value in own.get(one.parameter, {}).items():
                    if isinstance(value, Tensor) and value.dim() and value.shape == one.shape:
                        own[one.parameter][key] = one.own(value).clone()
        for child in self._module.modules():
            own = {id(one): one for place, _, one in self._places if place is child}.values()
            deferred = vars(child).pop(DEFERRED, False)
            if deferred:
                for one in own:
                    one.parameter.data = one.parameter.new_empty(one.shape)
                cast(Any, child).reset_parameters()
            for one in own:
                # a tied one once more, as `reset_parameters` in one process would
                if deferred or not one.is_cut:
                    one.cut()
        for one in self.parameters:
            vars(one.parameter).pop(DROPPED, None)
            if one.parameter.requires_grad:
                hook = one.parameter.register_hook(_refuse_read)  # type: ignore[no-untyped-call]
                self._undo.append(hook.remove)

    optimizers_made = cut

    def wrap_steps(self) -> None:
        """Run the module's steps with sharded tensors in the places of its parameters."""
        methods = {
            name: getattr(self._module, name)
            for name in STEPS
            if getattr(type(self._module), name, None) is not getattr(LightningModule, name, None)
        }
        steps = {name: wraps(method)(partial(self.run, name, method)) for name, method in methods.items()}
        self._undo.append(put_methods(self._module, steps))
        self._undo.append(watch_hooks(self._module, self.parameters))

    def run(self, name: str, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a step; what it returns is whole."""
        if self._running:
            # another step has called it, and goes on with what is in the parameters' places
            return step(*args, **kwargs)
        self._put_back()
        # a tied parameter stays one object
        made = {id(one): one.wrapper() for _, _, one in self._places}
        for child, place, one in self._places:
            child._parameters[place] = made[id(one)]  # type: ignore[assignment]
        self._inside = self._running = True
        goes_on = False
        self._in_step.begin(name)
        try:
            # the first step of a kind tells how it reads parameters
            first = name not in self._looked_at
            self._looked_at.add(name)
            with forgetting_gathered(), StrayReads(self.parameters) if first else nullcontext():
                axes = (self._grid.x, self._grid.y, *(() if self._how is None else self._how.axes))
                found = run_sharded(name, partial(self._call, step, *args, **kwargs), self._module, axes)
            automatic = getattr(self._module, "automatic_optimization", True)
            goes_on = automatic and any(tensor.requires_grad for _, tensor in tensors(found))
            if not goes_on:
                # no backward pass is to come
                self._in_step.end(f"ends {name!r}")
        except BaseException:
            self._in_step.forget()
            raise
        finally:
            self._running = False
            if not goes_on:
                self._put_back()
        return found

    def _call(self, step: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        return step(batch if self._how is None else self._how.batch(batch), *args, **kwargs)

    @contextmanager
    def backward(self, loss: Tensor) -> Iterator[None]:
        """Around the backward pass of a loss; a collective."""
        self._in_step.begun = True
        try:
            with forgetting_gathered():
                yield
            self.end_backward()
        except BaseException:
            self._in_step.forget()
            raise
        finally:
            self._in_step.begun = self._dry
            self._put_back()

    def end_backward(self) -> None:
        """Wait for gradients, and put the parameters back."""
        reached = self._in_step.end("ends the backward pass")
        if (replicas := self._grid.replicas) is not None:
            for grad in (p.grad for p in reached if p.grad is not None):
                grad.copy_(reduce_now(grad / replicas.size, replicas))
        self._put_back()

    def undo(self) -> None:
        """Give the module back as it was; its parameters have the parts or, after `restore`, are whole."""
        self._put_back()
        while self._undo:
            self._undo.pop()()

    def _put_back(self) -> None:
        # a step that optimises by hand goes on after a backward pass
        if self._inside and not self._running:
            for child, place, one in self._places:
                child._parameters[place] = one.parameter
            self._inside = False


def _refuse_read(grad: Tensor | None) -> None:
    # what is gathered has its gradient summed, and hands none on
    if grad is not None:
        raise ModelError(READ_ELSEWHERE.format(name="it"))
