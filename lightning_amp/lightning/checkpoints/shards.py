"""Save, load, clip and restore sharded parameters: full tensors in checkpoints, shards on the ranks.

Parameters are sharded over the model axis, by S2 or nodes, or over the data axis, by fsdp, which reduces their
gradients itself.

    saved_state, saved_optimizer_state    a rank's state -> full tensors, as on one device, or this rank's `Part`
    own_state, own_optimizer_states       full tensors, as on one device -> a rank's state
    norm, clip                            |g|^2 = sum over replicated |g|^2 + sum over ranks of sum over shards |g|^2

So a checkpoint fits any number of ranks. Full tensors are gathered one by one, by one all-gather each, and kept in host
memory, because the full state may not fit a device; those of a checkpoint on rank 0 only, which writes it. Optimiser
state of a sharded checkpoint is read one tensor at a time, and only the rank's shard is kept. Without sharded
parameters, states are returned unchanged, and there are no collectives.

This is exact for optimisers whose update of an element depends only on that element's gradient and state (RMSprop,
Adam, SGD). `check_optimizers` raises for those of torch that mix elements (`COUPLED`), and tests optimisers of other
packages on a small parameter (probe_optimizer.py).
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_amp.errors import DataError, InstallError, PlanError
from lightning_amp.lightning._compat import rank_zero_warn
from lightning_amp.lightning.checkpoints.probe_optimizer import mixes, mixes_elements
from lightning_amp.lightning.checkpoints.read_directory import Stored, fill, replaced
from lightning_amp.lightning.checkpoints.write_checkpoint import Form, Part, kept
from lightning_amp.techniques.contract.protocol import Units
from lightning_amp.techniques.contract.sharded_parameter import ShardedParameter, is_split, local
from lightning_amp.techniques.ranks import collectives
from lightning_amp.techniques.ranks.sharded_region import check_region

COUPLED = ("LBFGS", "Adafactor", "Muon")
"""Optimisers of torch.optim whose update of an element depends on other elements of the parameter."""


class Shards:
    """The sharded parameters of a module, while they are installed; frees the device memory of full parameters.

    Attributes:
        sharded: Parameters that were replaced by this rank's shard.
        partial: Replicated parameters of which a rank has a partial gradient.
        model_ranks_differ: Whether model ranks have different parameters, as stages do, whose gradients the step itself
            completes.
        units: Sharding units of fsdp, or of a technique with its own steps; None without.
    """

    model_ranks_differ = False

    def __init__(
        self,
        module: nn.Module | None = None,
        sharded: Sequence[ShardedParameter] = (),
        partial: Sequence[nn.Parameter] = (),
        *,
        units: Units | None = None,
    ) -> None:
        self.sharded, self.partial, self.units = tuple(sharded), tuple(partial), units
        self._module = module if module is not None else nn.Module()
        self._trains = False
        # stored now: during a step of fsdp, modules have full parameters instead
        self._parameters = tuple(self._module.parameters())
        for parameter in self.sharded:
            parameter.offload()

    @property
    def groups(self) -> DeviceMesh | None:
        """Mesh with the axes "replicate" and "shard" if parameters are sharded in groups of ranks; else None."""
        return None if self.units is None else self.units.groups

    @property
    def on_host(self) -> bool:
        """Whether parameters, and thus optimiser states, are in host memory."""
        return self.units is not None and self.units.offload

    @property
    def over_model(self) -> list[ShardedParameter]:
        """Parameters that are sharded over the model axis."""
        return [parameter for parameter in self.sharded if not parameter.by_units]

    @property
    def reduced(self) -> list[nn.Parameter]:
        """Parameters whose gradients are averaged after a backward pass; units average theirs during the pass."""
        others = {id(parameter.shard) for parameter in self.sharded if parameter.by_units}
        return [parameter for parameter in self._parameters if id(parameter) not in others]

    def check(self, loss: Tensor) -> None:
        """Raise an InstallError of `check_region` if the loss reads a sharded parameter outside its region."""
        check_region(loss, self._module, partial=self.partial, sharded=self.over_model)

    def refuse_backward(self) -> None:
        """Raise a PlanError for a backward pass outside a fit if ranks have partial or sharded gradients."""
        if self.partial or self._held():
            raise PlanError(
                "manual_backward was called outside of a fit; only in a fit are the gradients of this plan, which lie"
                " on several ranks, put together: use model_parallel_size=1, and no fsdp, for this run"
            )

    def saved_state(self, state: dict[str, Any], form: Form) -> dict[str, Any]:
        """Return the module's state in a form; a collective unless that is in parts."""
        # copied, because load_state_dict reads the version metadata that torch keeps in the dict
        saved, found = copy.copy(state), dict[int, Any]()
        for name, one in self._named(state):
            # one tensor for a parameter with several names, as in a plain state
            if id(one) not in found:
                found[id(one)] = self._saved(one, state[name], form)
            saved[name] = found[id(one)]
        return saved

    def full_gradients(self, module: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
        """Return the full gradients that an optimizer uses, by the names of their parameters; a collective."""
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        of = {name: p.grad for name, p in module.named_parameters() if id(p) in own and p.grad is not None}
        return self._full({name: grad.detach().clone() for name, grad in of.items()}, module)

    def own_state(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Convert a state with full tensors to this rank's shards; raise a DataError if a shape differs."""
        own = copy.copy(state if isinstance(state, dict) else dict(state))
        own.update({name: self._own(one, state[name], name) for name, one in self._named(state)})
        return own

    def saved_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any], form: Form) -> dict[str, Any]:
        """Return an optimiser's state in a form; a collective unless that is in parts.

        Raises:
            InstallError: The state of a shard differs from it in shape.
        """

        def saved(one: ShardedParameter, value: Any, name: str) -> Any:
            if value.shape != one.shard.shape:
                kind = type(getattr(optimizer, "optimizer", optimizer)).__name__
                raise InstallError(
                    f"the optimizer {kind!r} keeps {name!r} of shape {tuple(value.shape)!r} for a shard of shape"
                    f" {tuple(one.shard.shape)!r}; only an optimizer that keeps elementwise state can train what"
                    f" {one.technique} splits over ranks: use another one, or leave {one.technique} out"
                )
            return self._saved(one, value, form)

        return self._converted(optimizer, state, saved, own=True)

    def own_optimizer_states(
        self, optimizers: Sequence[Optimizer], states: Sequence[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Convert optimiser states of full tensors to this rank's shards; read tensors that are still on disk.

        Raises:
            DataError: A tensor has neither the shape of the full parameter nor one element.
        """
        pairs = zip(optimizers, states, strict=False)
        return [fill(self._own_optimizer_state(optimizer, state)) for optimizer, state in pairs]

    def watch(self, trainer: Trainer) -> Callable[[], None]:
        """Check the optimisers, and make clipping by norm use the gradients of all ranks; return an undo."""
        if not self._held():
            return lambda: None
        self._trains = True
        self._check_optimizers(trainer.optimizers)
        plugin: Any = trainer.precision_plugin
        # replaced on the instance: the plugin may be the user's
        plugin.clip_grad_by_norm = lambda optimizer, clip_val: self.clip(plugin.main_params(optimizer), clip_val)
        handles: list[RemovableHandle] = []
        if (units := self.units) is not None:
            # hooks, so that steps called by Lightning or by the user are included
            for optimizer in trainer.optimizers:
                handles.append(optimizer.register_step_pre_hook(lambda *_: units.before_update()))
                handles.append(optimizer.register_step_post_hook(lambda *_: units.after_update()))

        def undo() -> None:
            vars(plugin).pop("clip_grad_by_norm", None)
            for handle in handles:
                handle.remove()

        return undo

    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        """Clip like `torch.nn.utils.clip_grad_norm_` by the norm of all ranks' gradients, and return the norm."""
        parameters = list(parameters)
        norm = self.norm(parameters)
        clip_grads_with_norm_([p for p in parameters if not is_split(p)], max_norm, norm)
        # same formula as torch for the other parameters
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for grad in (local(p.grad) for p in parameters if is_split(p) and p.grad is not None):
            grad.mul_(scale.to(grad.device))
        return norm

    def gradient_norm(self) -> Tensor:
        """Return the norm of the module's gradients over all ranks; a collective if parameters are sharded."""
        return self.norm(self._parameters)

    def norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Return the norm of gradients, including all ranks' shards; all ranks of their mesh must call it.

        One all-reduce if one of the parameters is sharded, else none.
        """
        parameters, held = list(parameters), self._held()
        among = [held[id(p)] for p in parameters if id(p) in held]
        rest = [p.grad for p in parameters if id(p) not in held and p.grad is not None]
        # without any gradients the norm is 0 in single precision
        norms = [get_total_norm(rest)] if rest or not among else []
        if among:
            # shards are parts of one vector: sum their squared norms over the ranks, then take the root
            own = get_total_norm([grad for grad in self._gradients(among) if grad.numel()])
            dtype = among[0].whole.dtype
            # in float16 the square of a norm above 256 is infinite
            own = own.to(device=among[0].mesh.device_type, dtype=torch.promote_types(dtype, torch.float32))
            over_ranks = (collectives.all_reduce(among[0].mesh, own**2) ** 0.5).to(dtype)
            norms.append(over_ranks.to(norms[0].dtype) if norms else over_ranks)
        # the norm of an empty list is on the CPU
        return get_total_norm([value.to(norms[-1].device) for value in norms])

    def give_back(self, optimizers: Sequence[Optimizer], *, complete: bool) -> None:
        """Restore full parameters at the end of a run, also in the optimisers; without values if they had none.

        With all ranks (`complete`) this is a collective; otherwise the values of other ranks are lost.
        """
        if self.units is not None and self.units.deferred:
            for parameter in self.sharded:
                parameter.drop()
            return
        held = self._held()
        # optimisers of an earlier fit have states for full parameters already
        optimizers = [
            o
            for o in (optimizers if self._trains else ())
            if any(id(p) in held for group in o.param_groups for p in group["params"])
        ]
        # first, because the conversion needs the shards to know which state is sharded
        states = [self.saved_optimizer_state(o, o.state_dict(), "whole") for o in optimizers if complete]
        restore(list(dict.fromkeys(held.values())), complete=complete)
        # full parameters first: torch compares the state with the shapes of the parameters
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["params"] = [held[id(p)].whole if id(p) in held else p for p in group["params"]]
        for optimizer, state in zip(optimizers, states, strict=False):
            optimizer.load_state_dict(state)

    # --- overridden for parameters of stages ---

    def _full(self, gradients: dict[str, Tensor], module: nn.Module) -> dict[str, Tensor]:
        return self.saved_state(gradients, "whole")

    def _held(self) -> dict[int, Any]:
        """Return the sharded parameters by the id of their shard in the module and in optimisers."""
        return {id(parameter.shard): parameter for parameter in self.sharded}

    def _saved(self, one: Any, value: Tensor, form: Form) -> Tensor | Part:
        # 0-dim parameters are saved as full tensors in a distributed checkpoint too
        if form != "in parts" or not one.shape:
            return kept(one.join(value), form)
        own = local(value).detach()
        return Part(one.shape, own.dtype, {torch.Size(at): box for at, box in one.parts.boxes(own)})

    def _own(self, one: Any, value: Any, name: str) -> Tensor:
        if not isinstance(value, Tensor | Stored) or value.shape != one.shape:
            found = tuple(value.shape) if isinstance(value, Tensor | Stored) else value
            raise DataError(
                f"cannot load {name!r} from the checkpoint: found {found!r}, and the whole parameter of "
                f"shape {tuple(one.shape)!r} is required, of which every rank takes its part; load a "
                "checkpoint that was written with strategy='amp' or on one device"
            )
        whole = value.read() if isinstance(value, Stored) else value
        # a copy: a view would keep the full tensor alive
        return cast(Tensor, one.like_shard(one.own(whole).clone()))

    def _own_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        return self._converted(optimizer, state, self._own, own=False)

    def _check_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        try:
            check_optimizers(optimizers, self.sharded)
            if self.units is not None:
                self.units.optimizers_made(optimizers)
        except InstallError:
            # all ranks raise here, because their optimisers are equal, so full parameters can be gathered first
            if self.units is not None:
                restore(self.sharded, complete=True)
            raise

    def _gradients(self, among: Sequence[Any]) -> list[Tensor]:
        return [local(one.shard.grad) for one in among if one.shard.grad is not None]

    def _named(self, state: Mapping[str, Any]) -> list[tuple[str, Any]]:
        held = self._held()
        named = self._module.named_parameters(remove_duplicate=False)
        return [(name, held[id(p)]) for name, p in named if id(p) in held and name in state]

    def _converted(
        self, optimizer: Any, state: Mapping[str, Any], change: Callable[[Any, Any, str], Any], *, own: bool
    ) -> dict[str, Any]:
        """Convert elementwise state of the sharded parameters in an optimiser's state.

        State of the complete parameter, such as a step count, does not change. For a parameter of one element both
        kinds of state have the same shape, so the state of other parameters decides: a shard may have one element on
        some ranks only.

        Args:
            optimizer: The optimiser, or Lightning's wrapper of it.
            state: State dict of the optimiser.
            change: Function of parameter, tensor and name that returns the converted tensor.
            own: Whether the state has the shapes of this rank's shards instead of full parameters.
        """
        held = self._held()
        groups = getattr(optimizer, "optimizer", optimizer).param_groups
        if not any(id(parameter) in held for group in groups for parameter in group["params"]):
            # without sharded parameters the state may have any form
            return dict(state)
        states = dict(state.get("state", {}))
        # by number in the state: the entry of `held`, None for an ordinary parameter, and the shape on this rank
        with_state = {i: (held.get(id(p)), p.shape) for p, i in numbered(optimizer, state) if i in states}
        shapes = {i: shape if own or one is None else one.shape for i, (one, shape) in with_state.items()}
        # by place in a parameter's state, such as "/exp_avg": whether its tensors have a value for every element
        of_elements: dict[str, bool] = {}

        def look(shape: torch.Size, place: str, value: Any) -> None:
            if isinstance(value, Tensor | Stored):
                of_elements[place] = value.shape == shape or of_elements.get(place, False)

        def changed(one: Any, shape: torch.Size, place: str, value: Any) -> Any:
            if not isinstance(value, Tensor | Stored):
                return value
            # if no other parameter shows what the tensor at this place is, a step count is recognised by its name
            if value.shape.numel() == 1 and not of_elements.get(place, value.shape == shape and place != "/step"):
                return value
            return change(one, value, place.removeprefix("/"))

        for i, shape in shapes.items():
            if shape.numel() != 1:
                replaced(states[i], partial(look, shape))
        for i, (one, _) in with_state.items():
            if one is not None:
                states[i] = replaced(states[i], partial(changed, one, shapes[i]))
        return {**state, "state": states}


def numbered(optimizer: Any, state: Mapping[str, Any]) -> Iterator[tuple[nn.Parameter, Any]]:
    """Yield the parameters of an optimiser, or of Lightning's wrapper, with their numbers in its state."""
    groups = getattr(optimizer, "optimizer", optimizer).param_groups
    # torch raises for a state with other groups when it is loaded
    for group, saved in zip(groups, state.get("param_groups", ()), strict=False):
        yield from zip(group["params"], saved["params"], strict=False)


def check_optimizers(optimizers: Iterable[Optimizer], sharded: Sequence[ShardedParameter]) -> None:
    """Check that optimisers train shards as one device would train the full parameter.

    Raises:
        InstallError: An optimiser mixes elements, such as those of `COUPLED`, or was made before sharding.
    """
    shards = {id(parameter.shard) for parameter in sharded}
    replaced = {id(parameter.whole) for parameter in sharded if not parameter.in_place}
    for optimizer in optimizers:
        held = [id(p) for group in optimizer.param_groups for p in group["params"]]
        if stale := sum(p in replaced for p in held):
            raise InstallError(
                f"the optimizer {type(optimizer).__name__!r} has {stale!r} parameters that the plan has replaced by the"
                " rank's shard, which it would not train; make it in configure_optimizers from self.parameters(), not"
                f" before, or leave {_who(sharded)} out"
            )
        tried = partial(mixes_elements, flat=any(parameter.in_place for parameter in sharded))
        if (own := sum(p in shards for p in held)) and mixes(optimizer, COUPLED, tried, "element", _who(sharded)):
            raise InstallError(
                f"the optimizer {type(optimizer).__name__!r} was given {own!r} parameters that {_who(sharded)} splits"
                f" over ranks; its update mixes the elements of a parameter or of several, as those of {COUPLED!r} do,"
                " and would see a part of them: use an elementwise one (RMSprop, Adam, SGD), or leave"
                f" {_who(sharded)} out"
            )


def restore(sharded: Sequence[Any], *, complete: bool) -> None:
    """Restore the trained values of full parameters; without the other ranks (`complete`) their values become nan."""
    if complete:
        for parameter in sharded:
            parameter.restore()
        return
    lost = [parameter for parameter in sharded if parameter.trained]
    for parameter in lost:
        parameter.restore_own()
    if lost:
        sizes = [tuple(parameter.shape) for parameter in lost]
        rank_zero_warn(
            f"The run ended early, and {len(lost)} parameters, of shapes such as {sizes[:3]!r}, which {_who(lost)} had"
            " split over the ranks, could not be collected: what other ranks have trained is nan now. Load a checkpoint"
            " before you use the module."
        )


def _who(sharded: Iterable[ShardedParameter]) -> str:
    return next(parameter.technique for parameter in sharded)
