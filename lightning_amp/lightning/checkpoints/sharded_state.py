"""State of sharded parameters: whole in checkpoints, own on the ranks, one norm over both.

    whole_state, whole_optimizer_state    a rank's state -> what one device would have; collectives
    part_state, part_optimizer_state      a rank's state -> what it writes of that, where every rank writes its own
    own_state, own_optimizer_state        what one device would have -> a rank's state
    clip_norm                             |g|^p = sum over replicated |g|^p + sum over ranks of sum over shards |g|^p

A checkpoint therefore fits any number of ranks. Whole tensors are joined one after the other, by one all-gather each,
and kept in the host's memory: the state of a wide layer is what no device should hold. Of a checkpoint in shards,
optimiser state is read here, one tensor at a time, and the rank's part is kept.

Exact for optimisers whose update of an element needs nothing but that element's gradient and state (RMSprop, Adam,
SGD). Others see the shard where one device sees the whole: `check_optimizers` refuses those of torch.
Known limit: an optimiser from elsewhere is noticed only when its state has neither the shard's shape nor one element.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim import Optimizer

from lightning_amp.errors import DataError, InstallError
from lightning_amp.lightning._compat import rank_zero_warn
from lightning_amp.lightning.checkpoints.read_directory import Stored
from lightning_amp.lightning.checkpoints.tensor_parts import Part, part_of
from lightning_amp.parallel.contract.sharded_parameter import ShardedParameter
from lightning_amp.parallel.ranks import collectives

COUPLED = ("LBFGS", "Adafactor", "Muon")
"""Optimisers of torch.optim whose update of an element depends on other elements of the parameter."""


def check_optimizers(optimizers: Iterable[Optimizer], sharded: Sequence[ShardedParameter]) -> None:
    """Refuse optimisers that would train a shard otherwise than the whole, or not at all.

    Raises:
        InstallError: An optimiser of `COUPLED` has a sharded parameter, or one was made before it was sharded.
    """
    shards = {id(parameter.shard) for parameter in sharded}
    replaced = {id(parameter.whole) for parameter in sharded}
    for optimizer in optimizers:
        stale = [p for group in optimizer.param_groups for p in group["params"] if id(p) in replaced]
        if stale:
            raise InstallError(
                f"the optimizer {type(optimizer).__name__!r} has {len(stale)!r} parameters that S2 has replaced by the"
                " rank's shard, which it would not train; make it in configure_optimizers from self.parameters(), not"
                " before, or leave S2 out"
            )
        kinds = {
            kind.__name__ for kind in type(optimizer).__mro__ if kind.__module__.startswith("torch.optim")
        }
        held = [p for group in optimizer.param_groups for p in group["params"] if id(p) in shards]
        if held and kinds & set(COUPLED):
            raise InstallError(
                f"the optimizer {type(optimizer).__name__!r} was given {len(held)!r} parameters that S2 splits over"
                f" ranks; its update mixes the elements of a parameter, as those of {COUPLED!r} do, and would see"
                " a part of them: use an elementwise one (RMSprop, Adam, SGD), or leave S2 out"
            )


def whole_state(
    module: nn.Module, state_dict: Mapping[str, Any], sharded: Sequence[ShardedParameter]
) -> dict[str, Any]:
    """A module's state with whole tensors; a collective.

    Args:
        module: The module that the state is of.
        state_dict: Its `state_dict()`.
        sharded: The sharded parameters.
    """
    return _convert(module, state_dict, sharded, lambda parameter, value, _: _whole(parameter, value))


def part_state(
    module: nn.Module, state_dict: Mapping[str, Any], sharded: Sequence[ShardedParameter]
) -> dict[str, Any]:
    """A module's state with a `Part` for every sharded tensor; arguments as for `whole_state`, no collective."""
    return _convert(module, state_dict, sharded, lambda parameter, value, _: part_of(parameter, value))


def own_state(
    module: nn.Module, state_dict: Mapping[str, Any], sharded: Sequence[ShardedParameter]
) -> dict[str, Any]:
    """A module's state with this rank's parts, from one with whole tensors.

    Args:
        module: The module that will load the state.
        state_dict: State with whole tensors.
        sharded: The sharded parameters.

    Raises:
        DataError: A tensor has not the shape of the whole parameter.
    """
    return _convert(module, state_dict, sharded, _own)


def whole_optimizer_state(
    optimizer: Optimizer, state: Mapping[str, Any], sharded: Sequence[ShardedParameter]
) -> dict[str, Any]:
    """An optimiser's state with whole tensors; a collective.

    Args:
        optimizer: The optimiser that the state is of.
        state: Its `state_dict()`.
        sharded: The sharded parameters.

    Raises:
        InstallError: The state of a shard has a shape that cannot be joined.
    """
    return _convert_optimizer(optimizer, state, sharded, _checked(optimizer, _whole))


def part_optimizer_state(
    optimizer: Optimizer, state: Mapping[str, Any], sharded: Sequence[ShardedParameter]
) -> dict[str, Any]:
    """An optimiser's state with a `Part` for every tensor of a shard's elements; no collective.

    Args:
        optimizer: The optimiser that the state is of.
        state: Its `state_dict()`.
        sharded: The sharded parameters.

    Raises:
        InstallError: The state of a shard has not the shape of the shard.
    """
    return _convert_optimizer(optimizer, state, sharded, _checked(optimizer, part_of))


def own_optimizer_state(
    optimizer: Optimizer, state: Mapping[str, Any], sharded: Sequence[ShardedParameter]
) -> dict[str, Any]:
    """An optimiser's state with this rank's parts, from one with whole tensors.

    Args:
        optimizer: The optimiser that will load the state.
        state: State with whole tensors.
        sharded: The sharded parameters.

    Raises:
        DataError: A tensor has neither the shape of the whole parameter nor one element.
    """
    return _convert_optimizer(optimizer, state, sharded, lambda p, name, value: _own(p, value, name))


def clip_norm(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    sharded: Sequence[ShardedParameter],
    norm_type: float = 2.0,
) -> Tensor:
    """Scale gradients to a norm, as `torch.nn.utils.clip_grad_norm_`, with all ranks' shards in the norm.

    One all-reduce if a parameter is sharded, else none. Every rank of the model axis must call it.

    Args:
        parameters: With the gradients to scale.
        max_norm: Largest norm that is left alone.
        sharded: The sharded parameters; those that are not among `parameters` do not count.
        norm_type: p, or inf.

    Returns:
        The norm before scaling.
    """
    parameters = list(parameters)
    norm = gradient_norm(parameters, sharded, norm_type)
    clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def gradient_norm(
    parameters: Iterable[nn.Parameter], sharded: Sequence[ShardedParameter], norm_type: float = 2.0
) -> Tensor:
    """Norm of gradients with all ranks' shards in it; a collective as `clip_norm`.

    Args:
        parameters: With the gradients.
        sharded: The sharded parameters; those that are not among `parameters` do not count.
        norm_type: p, or inf.
    """
    parameters = list(parameters)
    shards = {id(parameter.shard): parameter for parameter in sharded}
    among = [shards[id(p)] for p in parameters if id(p) in shards]
    norms = [
        get_total_norm([p.grad for p in parameters if id(p) not in shards and p.grad is not None], norm_type)
    ]
    if among:
        norms.append(_norm_over_ranks(among, float(norm_type)).to(norms[0].dtype))
    # an empty list of gradients has a norm on the host
    return get_total_norm([value.to(norms[-1].device) for value in norms], norm_type)


def restore(sharded: Sequence[ShardedParameter], *, complete: bool) -> None:
    """Give the whole parameters their trained values at the end of a run.

    Args:
        sharded: The sharded parameters.
        complete: Whether all ranks are there to hand over theirs, a collective; else those are nan.
    """
    if complete:
        for parameter in sharded:
            parameter.restore()
        return
    lost = [parameter for parameter in sharded if parameter.trained]
    for parameter in lost:
        parameter.restore_own()
    if lost:
        sizes = [tuple(parameter.whole.shape) for parameter in lost]
        rank_zero_warn(
            f"The run ended early, and {len(lost)} parameters of shapes {sizes!r}, which S2 had split over the ranks,"
            " could not be collected: what other ranks have trained is nan now. Load a checkpoint before you use the"
            " module."
        )


def _convert(
    module: nn.Module,
    state_dict: Mapping[str, Any],
    sharded: Sequence[ShardedParameter],
    convert: Callable[[ShardedParameter, Any, str], Tensor | Part],
) -> dict[str, Any]:
    # copied, not made anew: load_state_dict reads the versions that torch keeps beside the tensors
    converted: dict[str, Any] = copy.copy(
        dict(state_dict) if not isinstance(state_dict, dict) else state_dict
    )
    for parameter, name in _names(module, sharded):
        if name in converted:
            converted[name] = convert(parameter, converted[name], name)
    return converted


def _names(module: nn.Module, sharded: Sequence[ShardedParameter]) -> Iterator[tuple[ShardedParameter, str]]:
    """Every name of every sharded parameter, in the same order on all ranks."""
    modules = list(module.named_modules(remove_duplicate=False))
    for parameter in sharded:
        prefixes = [fqn for fqn, child in modules if child is parameter.module]
        assert prefixes, "a sharded parameter's module is installed while its state is read or loaded"
        for prefix in prefixes:
            yield parameter, f"{prefix}.{parameter.name}" if prefix else parameter.name


def _convert_optimizer(
    optimizer: Optimizer,
    state: Mapping[str, Any],
    sharded: Sequence[ShardedParameter],
    convert: Callable[[ShardedParameter, str, Tensor], Tensor | Part],
) -> dict[str, Any]:
    shards = {id(parameter.shard): parameter for parameter in sharded}
    converted = {**state, "state": dict(state["state"])}
    for group, saved in zip(optimizer.param_groups, state["param_groups"], strict=True):
        for shard, index in zip(group["params"], saved["params"], strict=True):
            if id(shard) in shards and index in converted["state"]:
                converted["state"][index] = {
                    name: convert(shards[id(shard)], name, value) if _has_elements(value) else value
                    for name, value in converted["state"][index].items()
                }
    return converted


def _checked(
    optimizer: Optimizer, convert: Callable[[ShardedParameter, Tensor], Any]
) -> Callable[[ShardedParameter, str, Tensor], Any]:
    def checked(parameter: ShardedParameter, name: str, value: Tensor) -> Any:
        _check_elementwise(optimizer, parameter, name, value)
        return convert(parameter, value)

    return checked


def _check_elementwise(optimizer: Optimizer, parameter: ShardedParameter, name: str, value: Tensor) -> None:
    if value.shape != parameter.shard.shape:
        raise InstallError(
            f"the optimizer {type(optimizer).__name__!r} keeps {name!r} of shape {tuple(value.shape)!r} for a shard"
            f" of shape {tuple(parameter.shard.shape)!r}; only an optimizer that keeps elementwise state can train"
            " what S2 splits over ranks: use another one, or leave S2 out"
        )


def _has_elements(value: Any) -> bool:
    """Whether it is state of the parameter's elements and not, as a number of steps, of the parameter."""
    return isinstance(value, Stored) or (isinstance(value, Tensor) and value.dim() > 0)


def _whole(parameter: ShardedParameter, value: Tensor) -> Tensor:
    return parameter.join(value).cpu()


def _own(parameter: ShardedParameter, value: Any, name: str) -> Tensor:
    shape = tuple(parameter.whole.shape)
    if not isinstance(value, Tensor | Stored) or value.shape != parameter.whole.shape:
        found = tuple(value.shape) if isinstance(value, Tensor | Stored) else value
        raise DataError(
            f"state for {name!r} was to be loaded, found {found!r}; the whole parameter of shape {shape!r} is needed,"
            " of which every rank takes its part: load a checkpoint that was written with strategy='amp' or on one"
            " device"
        )
    whole = value.read() if isinstance(value, Stored) else value
    # a copy: a view would keep the whole alive
    return parameter.own(whole).clone()


def _norm_over_ranks(among: Sequence[ShardedParameter], norm_type: float) -> Tensor:
    first = among[0].shard
    grads = [p.shard.grad for p in among if p.shard.grad is not None and p.shard.grad.numel()]
    own = get_total_norm(grads, norm_type).to(device=first.device, dtype=first.dtype)
    if norm_type == inf:
        return collectives.all_reduce(among[0].mesh, own, "max")
    return collectives.all_reduce(among[0].mesh, own**norm_type) ** (1 / norm_type)
