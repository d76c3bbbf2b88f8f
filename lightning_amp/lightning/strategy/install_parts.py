"""Install what a plan distributes over ranks: shared batch statistics and sharded parameters."""

from collections.abc import Callable

from lightning.pytorch.plugins.layer_sync import LayerSync, TorchSyncBatchNorm
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_amp.errors import PlanError
from lightning_amp.lightning.checkpoints.shards import Shards
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.techniques.contract.protocol import Units
from lightning_amp.techniques.data.batch_norm import share_batch_statistics
from lightning_amp.techniques.data.row import ShareBatchStatistics
from lightning_amp.techniques.table import STRATEGIES, technique_of_steps
from lightning_amp.techniques.technique import function_at


def share_statistics(
    plan: Plan, model: nn.Module, mesh: DeviceMesh, layer_sync: LayerSync | None, undo: list[Callable[[], None]]
) -> nn.Module:
    """Share batch statistics if the plan or the Trainer's sync_batchnorm requires it; return the model."""
    planned = any(isinstance(rule.spec, ShareBatchStatistics) for rule in plan.rules)
    if planned or isinstance(layer_sync, TorchSyncBatchNorm):
        undo.append(share_batch_statistics(model, mesh["data"]))
        return model
    return model if layer_sync is None else layer_sync.apply(model)


def shard_fully(
    plan: Plan,
    model: nn.Module,
    mesh: DeviceMesh,
    groups_of: Callable[[int], DeviceMesh],
    shards: Shards,
    fn: TrainerFn | None,
    undo: list[Callable[[], None]],
) -> Shards:
    """Shard all parameters over the ranks that average gradients, or groups of them, if the plan does so.

    In prediction parameters stay replicated: ranks may have different numbers of batches, so that they could not gather
    parameters together; and there are no gradients or optimiser states to shard.

    Args:
        mesh: Mesh of the ranks that average gradients.
        groups_of: Function that returns that mesh with groups of the given size; all ranks must call it.
        shards: Parameters that are sharded over the model axis already.
    """
    if fn == TrainerFn.PREDICTING:
        return shards
    name = next((name for name in plan.strategies if STRATEGIES[name].split_parameters), "")
    if not name:
        return shards
    rules = [rule for rule in plan.rules if rule.strategy == name]
    split = function_at(STRATEGIES[name].split_parameters)
    units: Units = split(model, rules, mesh, groups_of=groups_of, fitting=fn == TrainerFn.FITTING)
    undo.append(units.undo)
    return Shards(model, (*shards.sharded, *units.sharded), shards.partial, units=units)


def check_split(plan: Plan, fn: TrainerFn | None) -> None:
    """Raise a PlanError if parameters have no values and the plan's shards would not get any."""
    name = technique_of_steps(plan.strategies)
    splits = name and STRATEGIES[name].split_parameters
    if not splits or fn == TrainerFn.PREDICTING:
        raise PlanError(
            "the module's parameters have no values (device 'meta', or left so by a fit with tensor3d), and"
            f" {'predict requires whole parameters' if splits else 'this plan shards none'}; train, validate or test"
            " with strategies='tensor3d', or give them values first"
        )
