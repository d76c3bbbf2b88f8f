"""Shard a module's parameters over a grid of ranks for tensor3d, and run its steps on sharded tensors, until `undo`.

    between steps    the module has its Parameter objects, each with this rank's shard, flat
    in a step        sharded tensors replace them, and are gathered where a layer reads them, until the backward pass
                     has ended, or until the step has returned nothing that requires a gradient

Gradients are reduced over the grid during the backward pass, and averaged over the copies of the grid at its end.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from types import MethodType
from typing import Any, cast

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim import Optimizer

import lightning_amp.sharding.ops  # noqa: F401  (registers the operators)
from lightning_amp.errors import ModelError
from lightning_amp.sharding.collectives import reduce_now
from lightning_amp.techniques.contract.protocol import Units
from lightning_amp.techniques.contract.sharded_parameter import ShardedParameter
from lightning_amp.techniques.deferred import DEFERRED, DROPPED
from lightning_amp.techniques.put_methods import STEPS, method_of
from lightning_amp.techniques.sequence.split_batch import HowToSplit, read_dims
from lightning_amp.techniques.sharded_step import run_sharded, tensors
from lightning_amp.techniques.tensor3d.grid import Grid
from lightning_amp.techniques.tensor3d.in_step import InStep
from lightning_amp.techniques.tensor3d.layouts import splits_in
from lightning_amp.techniques.tensor3d.parameters import GridParameter, forgetting_gathered
from lightning_amp.techniques.tensor3d.reads_elsewhere import READ_ELSEWHERE, ReadsElsewhere, watch_hooks
from lightning_amp.techniques.tensor3d.row import TensorParallel3D


class GridUnits(Units):
    """Parameters of a module on a grid.

    Attributes:
        parameters: In the order of the module's, without duplicates.
        deferred: Whether parameters came without values, and are initialized module by module when they are sharded.

    Args:
        module: Has full parameters, equal on all ranks.
        spec: How dims are split (layouts.py), the dims of the batch that z splits, and which collectives overlap.
        grid: The ranks.
        agree: Called with a description of this rank's next action; a collective that raises if ranks differ.
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
        # as checkpoints and optimisers see them: a rank's shard has the place of the parameter
        self.sharded = tuple(
            ShardedParameter(
                whole=one.parameter, shard=one.parameter, module=module, name=one.name, parts=one, version=0
            )
            for one in self.parameters
        )
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
        """Replace the values of every parameter by this rank's shard, and also existing states of optimisers."""
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
                # a tied parameter is initialized again, as `reset_parameters` in one process does
                if deferred or not one.is_cut:
                    one.cut()
        for one in self.parameters:
            vars(one.parameter).pop(DROPPED, None)
            if one.parameter.requires_grad:
                hook = one.parameter.register_hook(_refuse_read)  # type: ignore[no-untyped-call]
                self._undo.append(hook.remove)

    optimizers_made = cut

    def wrap_steps(self) -> None:
        """Run the module's steps (`steps_of`) from now on, in which sharded tensors replace its parameters."""
        UNITS[self._module] = self
        self._undo.append(partial(UNITS.__delitem__, self._module))
        self._undo.append(watch_hooks(self._module, self.parameters))

    def run(self, name: str, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a step; tensors that it returns are gathered."""
        if self._running:
            # called by another step, in which sharded tensors replace the parameters already
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
            # reads of parameters are checked in the first step of each kind
            first = name not in self._looked_at
            self._looked_at.add(name)
            with forgetting_gathered(), ReadsElsewhere(self.parameters) if first else nullcontext():
                axes = (self._grid.x, self._grid.y, *(() if self._how is None else self._how.axes))
                found = run_sharded(name, partial(self._call, step, *args, **kwargs), self._module, axes)
            automatic = getattr(self._module, "automatic_optimization", True)
            goes_on = automatic and any(tensor.requires_grad for _, tensor in tensors(found))
            if not goes_on:
                # no backward pass follows
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
        """Context manager for the backward pass of a loss; a collective."""
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
        """Wait for pending gradients, average them over the copies, and restore the parameter objects."""
        reached = self._in_step.end("ends the backward pass")
        if (replicas := self._grid.replicas) is not None:
            for grad in (p.grad for p in reached if p.grad is not None):
                grad.copy_(reduce_now(grad / replicas.size, replicas))
        self._put_back()

    def undo(self) -> None:
        """Restore the module; its parameters have the shards or, after `restore`, their full values."""
        self._put_back()
        while self._undo:
            self._undo.pop()()

    def _put_back(self) -> None:
        # a step with manual optimisation continues after a backward pass
        if self._inside and not self._running:
            for child, place, one in self._places:
                child._parameters[place] = one.parameter
            self._inside = False


UNITS: dict[nn.Module, GridUnits] = {}
"""Units that run the steps of a module."""


def steps_of(module: nn.Module) -> dict[str, MethodType]:
    """Return steps of a module that its units run, once there are any; changes of other techniques lie around them."""
    own = [n for n in STEPS if getattr(type(module), n, None) is not getattr(LightningModule, n, None)]
    return {name: MethodType(_step_of(name, method_of(module, name)), module) for name in own}


def _step_of(name: str, step: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(step)
    def run(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own, units = partial(step, module), UNITS.get(module)
        return own(*args, **kwargs) if units is None else units.run(name, own, *args, **kwargs)

    return run


def _refuse_read(grad: Tensor | None) -> None:
    # a gathered parameter's gradient is reduced separately, and not passed on to the parameter
    if grad is not None:
        raise ModelError(READ_ELSEWHERE.format(name="it"))
