"""Define MeshStrategy, DDP on a (data, model) mesh: a model group reads the same cells, and checkpoints are complete.

Ranks are row-major in (data, model), so that a model group is inside a node. The ranks of a model group draw the same
random numbers, and values logged with `sync_dist` are summed once per group. Of a plan, this class uses only how
batches and parameters are sharded.
"""

import atexit
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch.distributed import HashStore, ReduceOp  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from lightning_amp.data.batch import tensors_in
from lightning_amp.errors import DataError, PlanError
from lightning_amp.footprint.host_state import on_device
from lightning_amp.lightning._compat import optimizers_to_device, trainer_of
from lightning_amp.lightning.checkpoints.read_directory import load_either
from lightning_amp.lightning.checkpoints.shards import Shards
from lightning_amp.lightning.checkpoints.write_checkpoint import Form, write_directory
from lightning_amp.lightning.consistency.replicas import make_sure_of_same_batch, share_draws, wait_for_all
from lightning_amp.lightning.faults.failure_watch import FailureWatch
from lightning_amp.lightning.steps.cells import counted_once, unrounded, with_same_draws
from lightning_amp.lightning.strategy.request import Request
from lightning_amp.planning.plan.plan import Plan
from lightning_amp.sharding.meshes import mesh_of
from lightning_amp.sharding.own_parts import OwnParts
from lightning_amp.sharding.sharded_tensor import ShardedTensor
from lightning_amp.sharding.splits import axis_of
from lightning_amp.techniques.hic.scores.nonzero_counts import find_entries
from lightning_amp.techniques.hic.scores.sparse_likelihood import SparseZINB
from lightning_amp.techniques.table import technique_of_steps


class MeshStrategy(DDPStrategy):
    """Distribute cells over data ranks, reduce logged values, and save and load full state of sharded parameters.

    Of these methods, subclasses define only `_model_ranks` and `_compare_ranks`.
    """

    request: Request  # the options, as given
    plan: Plan | None  # the installed plan
    predicted_step: Any  # the profile of its step; None if it was not counted
    pipelined_steps: Any  # runner of a pipeline's steps; None without a pipeline
    _shards: Shards
    _failures: FailureWatch

    @property
    def is_distributed(self) -> bool:
        """True: Lightning then replaces samplers by distributed ones."""
        return True

    @property
    def _model_ranks(self) -> int:
        raise NotImplementedError

    def setup_distributed(self) -> None:
        """Connect the processes; a single process opens no port."""
        environment = self.cluster_environment
        assert environment is not None, "the Trainer sets the environment"
        alone = self.num_nodes * self.num_processes == environment.world_size() == 1
        if alone and not dist.is_initialized():
            backend = self._get_process_group_backend()
            dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
            if backend == "nccl":
                # as Lightning does for its process groups: torch warns about groups that are not destroyed
                atexit.register(dist.destroy_process_group)
        super().setup_distributed()

    @property
    def own_parts(self) -> OwnParts:
        """The part of a batch that this rank reads, for `lightning_amp.own_part` and `as_sharded`."""
        request, plan = self.request, self.plan
        given = request.given_plan if plan is None else plan
        # before planning, the size comes from the options; 0 means that the plan will decide
        requested = 0 if request.model_parallel_size == "auto" else request.model_parallel_size
        size = given.mesh.model if given is not None else requested if self.world_size > 1 else 1
        splits = plan is not None and bool(technique_of_steps(plan.strategies))
        even = request.sequence_sizes == "even" and not request.sequence_grid
        dims = request.sequence_dim if even and isinstance(request.sequence_dim, Mapping) else {}
        return OwnParts(
            rank=self.global_rank % max(size, 1),
            size=size,
            axis=(lambda: axis_of(self._mesh_of(size)["model"])) if splits else None,
            dims={path: (own,) if isinstance(own, int) else tuple(own) for path, own in dims.items()},
        )

    @property
    def data_parallel_size(self) -> int:
        """Ranks that train on different cells; `trainer.world_size` counts all ranks."""
        return self.world_size // self._model_ranks

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Arguments of the distributed sampler; all ranks of a model group read the same cells."""
        return {"num_replicas": self.data_parallel_size, "rank": self.global_rank // self._model_ranks}

    @property
    def mesh(self) -> DeviceMesh:
        """The device mesh with the axes "data" and "model"; available once the processes are connected."""
        return self._mesh_of(self._model_ranks)

    def _mesh_of(self, model_ranks: int, shard_ranks: int | None = None) -> DeviceMesh:
        """Return the mesh of all ranks with the axes "data" and "model"; a model group is consecutive ranks.

        With `shard_ranks`, a divisor of the data axis, the axes "replicate" and "shard" replace "data". PlanError: the
        model axis does not divide the ranks.
        """
        n_ranks = self.world_size
        if n_ranks % model_ranks:
            raise PlanError(
                f"model_parallel_size={model_ranks!r} is not supported, the run has {n_ranks} ranks; it must divide"
                " them. Change `devices` or `num_nodes` of the Trainer, or model_parallel_size"
            )
        sizes = {"data": n_ranks // model_ranks}
        if shard_ranks is not None:
            sizes = {"replicate": sizes["data"] // shard_ranks, "shard": shard_ranks}
        return mesh_of(self.root_device.type, {**sizes, "model": model_ranks})

    def process_dataloader(self, dataloader: object) -> object:
        """Make loader workers and samplers of a model group draw the same numbers, so that they read the same cells."""
        if isinstance(dataloader, DataLoader) and int(os.environ.get("PL_SEED_WORKERS", "0")):
            # `seed_everything(workers=True)` was called
            seeded = partial(pl_worker_init_function, rank=self.distributed_sampler_kwargs["rank"])
            dataloader.worker_init_fn = dataloader.worker_init_fn or seeded
        dataloader = super().process_dataloader(dataloader)
        return dataloader if self._model_ranks == 1 else with_same_draws(dataloader, self._share_draws)

    def _share_draws(self) -> None:
        share_draws(mesh=self.mesh["model"], device=self.root_device)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Move a batch to the device after checking that all ranks of a model group have read the same batch."""
        # batches with sharded tensors differ before the move, and are compared after it
        differs: DataError | None = None
        # the size is checked first, because slicing the model axis out of a mesh takes 0.1 ms or more
        if self._model_ranks > 1:
            try:
                make_sure_of_same_batch(batch, self.mesh["model"], device=self.root_device)
            except DataError as error:
                differs = error
        moved = super().batch_to_device(batch, device, dataloader_idx)
        if self._model_ranks > 1 and any(isinstance(tensor, ShardedTensor) for tensor in tensors_in(moved)):
            self.own_parts.model_axis()
            # shards differ between ranks: the tensors that they belong to are compared
            if differs is not None:
                make_sure_of_same_batch(moved, self.mesh["model"], device=self.root_device)
        elif differs is not None:
            raise differs
        if self.lightning_module is not None:
            find_entries(batch, moved, SparseZINB, self.lightning_module)
        return moved

    def reduce(self, tensor: Tensor, group: Any | None = None, reduce_op: ReduceOp | str | None = "mean") -> Tensor:
        """Reduce over all ranks as DDPStrategy does, but do not round means of integers, and count a model group once.

        Values that are not tensors are returned unchanged; a ReduceOp is passed on to DDPStrategy.
        """
        if not isinstance(tensor, Tensor) or not isinstance(reduce_op, str):
            return super().reduce(tensor, group, reduce_op)
        result = super().reduce(unrounded(tensor, reduce_op), group, reduce_op)
        # in a group given by the user, ranks are not grouped by model
        return result if group is not None else counted_once(result, reduce_op, model_ranks=self._model_ranks)

    # --- state: hooks and checkpoints have full tensors ---

    def _compare_ranks(self) -> None:
        """Compare the ranks; overridden by strategies that train."""

    @property
    def _saved_form(self) -> Form:
        if self.request.save_distributed_checkpoint:
            return "in parts"
        return "whole" if self.is_global_zero else "not here"

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the module's state with full parameters; all ranks must call it, and are compared.

        Only rank 0, which writes, has the values of what is sharded; other ranks have tensors on "meta". With
        `save_distributed_checkpoint`, every rank has its `Part` instead.
        """
        trainer = trainer_of(self.lightning_module)
        with self._failures.saving():
            failed = trainer is not None and trainer.interrupted
            wait_for_all(rank=self.global_rank, ranks=self.world_size, failed=failed)
            state = super().lightning_module_state_dict()
            state = self._shards.saved_state(state, self._saved_form)
        self._compare_ranks()
        return state

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load a state with full parameters."""
        own = self._shards.own_state(checkpoint["state_dict"])
        super().load_model_state_dict({**checkpoint, "state_dict": own}, strict=strict)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return an optimiser's state as for full parameters; a collective if some are sharded."""
        return self._shards.saved_optimizer_state(optimizer, super().optimizer_state(optimizer), self._saved_form)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load optimiser states that belong to full parameters."""
        own = self._shards.own_optimizer_states(self.optimizers, checkpoint["optimizer_states"])
        for optimizer, state in zip(self.optimizers, own, strict=False):
            optimizer.load_state_dict(state)
        if not self._shards.on_host:
            # Lightning would move all of it to the device
            optimizers_to_device(on_device(self.optimizers), self.root_device)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Save a file on rank 0, or a directory of shards, which is a collective."""
        if self.request.save_distributed_checkpoint:
            write_directory(checkpoint, filepath, storage_options, rank=self.global_rank, broadcast=self.broadcast)
        else:
            super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a checkpoint file or a directory of shards; either is accepted."""
        return load_either(checkpoint_path, super().load_checkpoint, weights_only=weights_only)
