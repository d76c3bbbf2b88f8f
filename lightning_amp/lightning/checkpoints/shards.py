"""Handle sharded parameters in a run: whole in checkpoints, local on the ranks, one norm over both.

They lie over the model axis, by S2 or nodes, or over the data axis, by fsdp, which reduces their gradients itself.

    saved_state, saved_optimizer_state    a rank's state -> what one device would have, or this rank's `Part` of it
    own_state, own_optimizer_states       what one device would have -> a rank's state
    norm, clip                            |g|^2 = sum over replicated |g|^2 + sum over ranks of sum over shards |g|^2

A checkpoint therefore fits any number of ranks. Whole tensors are joined one after the other, by one all-gather each,
and kept in the host's memory: the state of a wide layer is what no device should hold. Of a checkpoint in shards,
optimiser state is read here, one tensor at a time, and the rank's part is kept. Without sharded parameters everything
here returns what it was given, and nothing communicates.

Exact for optimisers whose update of an element needs nothing but that element's gradient and state (RMSprop, Adam,
SGD). Others see the shard where one device sees the whole: `check_optimizers` refuses those of torch.
One from elsewhere is tried on a small parameter (probe_optimizer.py).
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
from lightning_amp.lightning.checkpoints.write_checkpoint import Part
from lightning_amp.techniques.contract.protocol import Units
from lightning_amp.techniques.contract.sharded_parameter import ShardedParameter, is_split, local
from lightning_amp.techniques.ranks import collectives
from lightning_amp.techniques.ranks.sharded_region import check_region

COUPLED = ("LBFGS", "Adafactor", "Muon")
"""Optimisers of torch.optim whose update of an element depends on other elements of the parameter."""


class Shards:
    """The sharded parameters of a module, while they are installed; frees the devices of the whole ones.

    Attributes:
        sharded: Those that were replaced by this rank's shard.
        partial: Whole ones of which a rank's gradient is a part.
        apart: Whether ranks of the model axis have their own parameters, whose gradients the step itself completes.
        units: What fsdp, or a technique with steps, has installed; None without it.
    """

    apart = False

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
        # of all modules now: in a step of fsdp's some have other, whole parameters
        self._parameters = tuple(self._module.parameters())
        for parameter in self.sharded:
            parameter.offload()

    @property
    def groups(self) -> DeviceMesh | None:
        """With the axes "replicate" and "shard", where groups of ranks have the same parts of parameters."""
        return None if self.units is None else self.units.groups

    @property
    def on_host(self) -> bool:
        """Whether parameters lie in the host's memory, where optimisers keep their state."""
        return self.units is not None and self.units.offload

    @property
    def over_model(self) -> list[ShardedParameter]:
        """Those that lie over the model axis."""
        return [parameter for parameter in self.sharded if not parameter.by_units]

    @property
    def reduced(self) -> list[nn.Parameter]:
        """Parameters whose gradients are averaged over ranks when a backward pass has ended; torch's are by then."""
        others = {id(parameter.shard) for parameter in self.sharded if parameter.by_units}
        return [parameter for parameter in self._parameters if id(parameter) not in others]

    def check(self, loss: Tensor) -> None:
        """Refuse a loss that reads one of them where it must not, with an InstallError of `check_region`."""
        check_region(loss, self._module, partial=self.partial, sharded=self.over_model)

    def refuse_backward(self) -> None:
        """Refuse, with a PlanError, a backward outside of a fit: nobody completes gradients that lie on other ranks."""
        if self.partial or self._held():
            raise PlanError(
                "manual_backward was called outside of a fit; only in a fit are the gradients of this plan, which lie"
                " on several ranks, put together: use model_parallel_size=1, and no fsdp, for this run"
            )

    def saved_state(self, state: dict[str, Any], *, in_parts: bool) -> dict[str, Any]:
        """The module's state with whole tensors, a collective, or with this rank's parts of them."""
        # copied, not made anew: load_state_dict reads the versions that torch keeps with the tensors
        saved, found = copy.copy(state), dict[int, Any]()
        for name, one in self._named(state):
            # of a parameter with several names one tensor, as in a plain state
            if id(one) not in found:
                found[id(one)] = self._saved(one, state[name], in_parts=in_parts)
            saved[name] = found[id(one)]
        return saved

    def own_state(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """A state with whole tensors as this rank loads it; a DataError where one has another shape."""
        own = copy.copy(state if isinstance(state, dict) else dict(state))
        own.update({name: self._own(one, state[name], name) for name, one in self._named(state)})
        return own

    def saved_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any], *, in_parts: bool) -> dict[str, Any]:
        """An optimiser's state with whole tensors, a collective, or with this rank's parts of them.

        Raises:
            InstallError: The state of a shard has not its shape.
        """

        def saved(one: ShardedParameter, value: Any, name: str) -> Any:
            if value.shape != one.shard.shape:
                kind = type(getattr(optimizer, "optimizer", optimizer)).__name__
                raise InstallError(
                    f"the optimizer {kind!r} keeps {name!r} of shape {tuple(value.shape)!r} for a shard of shape"
                    f" {tuple(one.shard.shape)!r}; only an optimizer that keeps elementwise state can train what"
                    f" {one.technique} splits over ranks: use another one, or leave {one.technique} out"
                )
            return self._saved(one, value, in_parts=in_parts)

        return self._converted(optimizer, state, saved, own=True)

    def own_optimizer_states(
        self, optimizers: Sequence[Optimizer], states: Sequence[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """The optimisers' states for whole tensors as this rank loads them; what is still in shards is read.

        Raises:
            DataError: A tensor has neither the shape of the whole parameter nor one element.
        """
        pairs = zip(optimizers, states, strict=False)
        return [fill(self._own_optimizer_state(optimizer, state)) for optimizer, state in pairs]

    def watch(self, trainer: Trainer) -> Callable[[], None]:
        """Check the optimisers, and let clipping by norm see the gradients of all ranks; returns what undoes it."""
        if not self._held():
            return lambda: None
        self._trains = True
        self._check_optimizers(trainer.optimizers)
        plugin: Any = trainer.precision_plugin
        # on the instance: clipping belongs to the plugin, which the user may have chosen
        plugin.clip_grad_by_norm = lambda optimizer, clip_val: self.clip(plugin.main_params(optimizer), clip_val)
        handles: list[RemovableHandle] = []
        if (units := self.units) is not None:
            # whoever calls the step of an optimiser, Lightning or the user
            for optimizer in trainer.optimizers:
                handles.append(optimizer.register_step_pre_hook(lambda *_: units.before_update()))
                handles.append(optimizer.register_step_post_hook(lambda *_: units.after_update()))

        def undo() -> None:
            vars(plugin).pop("clip_grad_by_norm", None)
            for handle in handles:
                handle.remove()

        return undo

    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        """`torch.nn.utils.clip_grad_norm_` with the gradients of all ranks in the norm, which it returns."""
        parameters = list(parameters)
        norm = self.norm(parameters)
        clip_grads_with_norm_([p for p in parameters if not is_split(p)], max_norm, norm)
        # as torch does for the others
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for grad in (local(p.grad) for p in parameters if is_split(p) and p.grad is not None):
            grad.mul_(scale.to(grad.device))
        return norm

    def gradient_norm(self) -> Tensor:
        """Norm of the module's gradients with those of every rank; a collective where some lie on other ranks."""
        return self.norm(self._parameters)

    def norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """The norm of gradients with all ranks' shards in it; every rank of the model axis must call it.

        One all-reduce if one of the parameters is a shard, else none.
        """
        parameters, held = list(parameters), self._held()
        among = [held[id(p)] for p in parameters if id(p) in held]
        rest = [p.grad for p in parameters if id(p) not in held and p.grad is not None]
        # of no gradients the norm is in single precision
        norms = [get_total_norm(rest)] if rest or not among else []
        if among:
            # shards are parts of one vector: squares are summed over the ranks, and the root is taken of the sum
            own = get_total_norm([grad for grad in self._gradients(among) if grad.numel()])
            dtype = among[0].whole.dtype
            # in half precision the square of a norm above 256 is infinite
            own = own.to(device=among[0].mesh.device_type, dtype=torch.promote_types(dtype, torch.float32))
            over_ranks = (collectives.all_reduce(among[0].mesh, own**2) ** 0.5).to(dtype)
            norms.append(over_ranks.to(norms[0].dtype) if norms else over_ranks)
        # an empty list of gradients has a norm on the host
        return get_total_norm([value.to(norms[-1].device) for value in norms])

    def give_back(self, optimizers: Sequence[Optimizer], *, complete: bool) -> None:
        """Make the parameters whole at the end of a run, in the optimisers too; without values where they came so.

        With all ranks (`complete`) it is a collective, else other ranks' values are lost.
        """
        if self.units is not None and self.units.deferred:
            for parameter in self.sharded:
                parameter.drop()
            return
        held = self._held()
        # those of a fit before have states for whole parameters
        optimizers = [
            o
            for o in (optimizers if self._trains else ())
            if any(id(p) in held for group in o.param_groups for p in group["params"])
        ]
        # while the parameters are shards still, which tell whose state is in parts
        states = [self.saved_optimizer_state(o, o.state_dict(), in_parts=False) for o in optimizers if complete]
        restore(list(dict.fromkeys(held.values())), complete=complete)
        # whole parameters first: torch compares a state with the shapes of the parameters that it is for
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["params"] = [held[id(p)].whole if id(p) in held else p for p in group["params"]]
        for optimizer, state in zip(optimizers, states, strict=False):
            optimizer.load_state_dict(state)

    # --- what differs between kinds of parameters that a rank does not have, or not all of ---

    def _held(self) -> dict[int, Any]:
        """These parameters, by the ids of what stands for them in the module and in optimisers."""
        return {id(parameter.shard): parameter for parameter in self.sharded}

    def _saved(self, one: Any, value: Tensor, *, in_parts: bool) -> Tensor | Part:
        # a checkpoint in parts keeps numbers as they are
        if not in_parts or not one.shape:
            return cast(Tensor, one.join(value).cpu())
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
        # a copy: a view would keep the whole alive
        return cast(Tensor, one.like_shard(one.own(whole).clone()))

    def _own_optimizer_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """What a rank loads of an optimiser's state for whole parameters."""
        return self._converted(optimizer, state, self._own, own=False)

    def _check_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        try:
            check_optimizers(optimizers, self.sharded)
            if self.units is not None:
                self.units.optimizers_made(optimizers)
        except InstallError:
            # all ranks have made the same optimisers, and have nothing but rows any more
            if self.units is not None:
                restore(self.sharded, complete=True)
            raise

    def _gradients(self, among: Sequence[Any]) -> list[Tensor]:
        """Those of a rank, which make up the gradients of these parameters together with other ranks'."""
        return [local(one.shard.grad) for one in among if one.shard.grad is not None]

    def _named(self, state: Mapping[str, Any]) -> list[tuple[str, Any]]:
        held = self._held()
        named = self._module.named_parameters(remove_duplicate=False)
        return [(name, held[id(p)]) for name, p in named if id(p) in held and name in state]

    def _converted(
        self, optimizer: Any, state: Mapping[str, Any], change: Callable[[Any, Any, str], Any], *, own: bool
    ) -> dict[str, Any]:
        """An optimiser's state with that of these parameters' elements changed.

        State of the parameter itself, such as a number of steps, stays. Of a parameter of one element both have the
        same shape, so the state of other parameters decides: a shard may have one element on some ranks only.

        Args:
            optimizer: Perhaps inside of Lightning's.
            state: Of its parameters.
            change: Gets the parameter, a tensor, and its name.
            own: Whether the state has the shapes of this rank's shards, and not those of whole parameters.
        """
        held = self._held()
        groups = getattr(optimizer, "optimizer", optimizer).param_groups
        if not any(id(parameter) in held for group in groups for parameter in group["params"]):
            # its state may have another form
            return dict(state)
        states = dict(state.get("state", {}))
        # by number in the state: what `held` has of the parameter, None of an ordinary one, and the shape that is here
        with_state = {i: (held.get(id(p)), p.shape) for p, i in numbered(optimizer, state) if i in states}
        shapes = {i: shape if own or one is None else one.shape for i, (one, shape) in with_state.items()}
        # by its place in the state of a parameter, such as "/exp_avg", whether a tensor has a value for every element
        of_elements: dict[str, bool] = {}

        def look(shape: torch.Size, place: str, value: Any) -> None:
            if isinstance(value, Tensor | Stored):
                of_elements[place] = value.shape == shape or of_elements.get(place, False)

        def changed(one: Any, shape: torch.Size, place: str, value: Any) -> Any:
            if not isinstance(value, Tensor | Stored):
                return value
            # where no other parameter has shown what a tensor at this place is, a number of steps is known by its name
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
    """The parameters of an optimiser, perhaps inside of Lightning's, with their numbers in its state."""
    groups = getattr(optimizer, "optimizer", optimizer).param_groups
    # a state for other groups is refused by torch when it is loaded
    for group, saved in zip(groups, state.get("param_groups", ()), strict=False):
        yield from zip(group["params"], saved["params"], strict=False)


def check_optimizers(optimizers: Iterable[Optimizer], sharded: Sequence[ShardedParameter]) -> None:
    """Refuse optimisers that would train a shard otherwise than the whole, or not at all.

    Raises:
        InstallError: An optimiser of `COUPLED` has a sharded parameter, or one was made before it was sharded.
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
    """Give the whole parameters their trained values; without the other ranks (`complete`) theirs become nan."""
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
